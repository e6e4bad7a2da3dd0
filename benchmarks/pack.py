"""How fast packed layers are: beside the dense layer before the split, and what else one would use.

    make bench-pack                           # two cores, some minutes
    python benchmarks/pack.py --device cuda   # float16 and bfloat16, some minutes
    python benchmarks/pack.py --quick         # half a minute, writes nothing

The rivals of a layer are the layer before the split (dense), the packed one (inline and, of one
size, plane), the split one written out (expanded), and the same in PyTorch's sparse formats (csr,
and 2:4 where it applies). Weights are random. Times are medians, with quartiles; on a CPU rivals
take turns and small layers stay in its caches, on a GPU the caches are cold, and every call is
timed a second time as a CUDA graph, without what Python takes to launch it.

Bytes per second count the weights and the batch, as far as they must be read; beside them stands
their share of what a large copy moves on the same machine in the same run.

Writes benchmarks/results/pack-*.json, from which pack_chart.py draws; the last line it prints is
one JSON object with the ratios to the dense layer.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
from about import commit, machine
from pack_layers import head, masked, partitioned

import fissile
from fissile.packed import dispatch
from fissile.packed.timing import DENSE, EXPANDED, Rival, race

RESULTS = Path(__file__).parent / "results"
SIZES = ["512x512", "4096x4096", "14336x4096", "28672x8192"]
#: Outputs and parents of W2'; it reads alpha times as many children.
SECONDS = ["512x512", "4096x14336"]
#: The classifiers of the studies, which split every neuron in four.
HEADS = {
    "FashionMNIST 784-10-10": (784, 10, 10),
    "CIFAR-100 512-32-100": (512, 32, 100),
    "CIFAR-100 512-128-100": (512, 128, 100),
    "CLINC150 384-64-150": (384, 64, 150),
}
HEAD_ALPHA = 4
FULL = {"sizes": SIZES, "second": SECONDS, "heads": list(HEADS)}
FULL |= {"alphas": [2, 4, 8], "batches": [1, 4, 16, 64, 256]}
QUICK = {"sizes": SIZES[:2], "second": SECONDS[:1], "heads": list(HEADS)[1:2]}
QUICK |= {"alphas": [4], "batches": [1, 16]}
#: The owners' other layout is timed at this size only: each needs kernels of its own.
PLANE = "4096x4096"
COLUMNS = ("inline", "plane", EXPANDED, "csr", "2:4")
#: How far a packed layer's result may be off the written-out one's, as a share of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


#: Bytes of the large copy.
COPIED = 2**29


def copy_rate(device):
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    rivals = {"copy": Rival(lambda x: to.copy_(x))}
    return 2 * COPIED / race(rivals, source, seconds=1.0)[0]["copy"].median


def cases(options, dtype):
    """Yield every layer or network: its part and size, alpha, inputs, and how to make it."""
    how = {"dtype": dtype, "device": options.device}
    most = 1e9 * options.most
    for size in options.sizes:
        outputs, inputs = map(int, size.split("x"))
        for alpha in options.alphas:
            plane = options.plane or size == PLANE
            arguments = outputs, inputs, alpha
            yield (
                "W1",
                size,
                alpha,
                inputs,
                lambda a=arguments, p=plane: partitioned(*a, most=most, plane=p, **how),
            )
    for size in options.second:
        outputs, parents = map(int, size.split("x"))
        for alpha in options.alphas:
            arguments = outputs, parents, alpha
            yield (
                "W2",
                size,
                alpha,
                alpha * parents,
                lambda a=arguments: masked(*a, most=most, **how),
            )
    for name in options.heads:
        yield (
            "head",
            name,
            HEAD_ALPHA,
            HEADS[name][0],
            lambda s=HEADS[name]: head(s, HEAD_ALPHA, plane=options.plane, **how),
        )


def measured(options, dtype, rate):
    """Time every case at every batch size; print lines and yield rows."""
    for part, size, alpha, inputs, make in cases(options, dtype):
        rivals = make()
        for batch in options.batches:
            x = torch.randn(batch, inputs, device=options.device).to(dtype)
            check(rivals, x)
            times, why = race(rivals, x, seconds=options.time)
            rows = []
            for name, rival in rivals.items():
                row = {"part": part, "size": size, "alpha": alpha, "batch": batch}
                row |= {"dtype": short(dtype), "rival": name}
                read = rival.bytes + x[..., : rival.inputs].nbytes
                if name in times:
                    row |= described(times[name], times[DENSE], read, rate)
                else:
                    row["why"] = why[name]
                rows.append(row)
            print(line(rows), flush=True)
            yield from rows
        del rivals
        if options.device == "cuda":
            torch.cuda.empty_cache()


def described(timing, base, read, rate):
    """Return what a row of the results says of one rival: microseconds, bytes, ratios to dense."""
    row = {k: rounded(1e6 * v) for k, v in timing._asdict().items() if v is not None}
    speed = read / timing.median
    row |= {"bytes": read, "bytes_per_second": rounded(speed), "share": rounded(speed / rate)}
    row["ratio"] = rounded(timing.median / base.median)
    if timing.replayed and base.replayed:
        row["replayed_ratio"] = rounded(timing.replayed / base.replayed)
    return row


@torch.inference_mode()
def check(rivals, x):
    """Let nobody be timed who computes something else."""
    wide = rivals[EXPANDED].call or (rivals["csr"].call if "csr" in rivals else None)
    if wide is None:
        return
    wanted = wide(x).double()
    for name in ("inline", "plane"):
        if name in rivals and rivals[name].call is not None:
            found = rivals[name].call(x).double()
            off = float((found - wanted).norm() / wanted.norm())
            # Heads are rounded where they are packed; layers have the same weights in all forms.
            if not off < 4 * TOLERANCE[x.dtype]:
                raise SystemExit(f"the packed layer ({name}) is off by {off:.2g}")


def line(rows):
    """Return a line of the table: microseconds, ratios to dense, and what of a copy is reached."""
    found = {row["rival"]: row for row in rows}
    one, base, packed = rows[0], found[DENSE], found["inline"]
    text = f"{one['part']:<5}{one['size']:<23}{one['alpha']:>2}{one['dtype']:>9}{one['batch']:>5} "
    text += f"{base['median']:>11,.1f}{spread(base):>6}{base['share']:>6.0%}"
    text += f"{packed['median']:>12,.1f}{spread(packed):>6}{packed['share']:>6.0%} "
    text += "".join(f"{multiple(found.get(name, {})):>16}" for name in COLUMNS)
    timed = {row["rival"]: row["median"] for row in rows if "median" in row and row is not base}
    return f"{text}  {min(timed, key=timed.get)}"


def multiple(row):
    """Return the ratio to dense and, on a GPU, that of the CUDA graphs."""
    if "ratio" not in row:
        return "-"
    again = f" ({row['replayed_ratio']:.2f})" if "replayed_ratio" in row else ""
    return f"{row['ratio']:.2f}{again}"


def header():
    names = ("", "layer", "α", "dtype", "batch")
    text = f"{names[0]:<5}{names[1]:<23}{names[2]:>2}{names[3]:>9}{names[4]:>6}"
    text += f"{'dense µs':>11}{'±':>6}{'copy':>6}{'inline µs':>12}{'±':>6}{'copy':>6} "
    return text + "".join(f"{name:>16}" for name in COLUMNS) + "  fastest of the split ones"


def spread(row):
    """Return half the distance of the quartiles, as a share of the median."""
    return f"{(row['high'] - row['low']) / 2 / row['median']:.0%}"


def rounded(number):
    return float(f"{number:.4g}")


def short(dtype):
    return str(dtype).removeprefix("torch.")


def ratios(rows):
    """Return the ratios to the dense layer, by case."""
    found = {}
    for row in rows:
        if "ratio" in row and row["rival"] != DENSE:
            label = f"{row['part']} {row['size']}, alpha {row['alpha']}, {row['dtype']}, "
            mine = found.setdefault(f"{label}batch {row['batch']}", {})
            mine[row["rival"]] = row["ratio"]
            if "replayed_ratio" in row:
                mine[f"{row['rival']}, replayed"] = row["replayed_ratio"]
    return found


def reasons(rows):
    """Say why somebody is missing, once for each reason."""
    seen = {}
    for row in rows:
        if "why" in row:
            seen.setdefault((row["rival"], row["why"]), f"{row['part']} {row['size']}")
    return [f"{rival}: {why} (as in {where})" for (rival, why), where in seen.items()]


def target(options):
    """Say where the results go: nowhere after a quick look, unless told."""
    if options.to is not None or options.quick:
        return options.to
    name = "cpu"
    if options.device == "cuda":
        name = torch.cuda.get_device_name().split()[-1].lower()
    return RESULTS / f"pack-{name}.json"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--sizes", nargs="*", help="of W1, outputs x inputs")
    parser.add_argument("--second", nargs="*", help="of W2, outputs x parents")
    parser.add_argument("--heads", nargs="*", choices=list(HEADS))
    parser.add_argument("--alphas", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--plane", action="store_true", help=f"time it everywhere, not at {PLANE}")
    parser.add_argument("--most", type=float, default=6, help="GB of a written-out layer")
    parser.add_argument("--time", type=float, help="seconds for each case and batch, about")
    parser.add_argument("--quick", action="store_true", help="few sizes; writes nothing")
    parser.add_argument("--commit", default=os.environ.get("FISSILE_COMMIT"), help="to be recorded")
    parser.add_argument("--to", type=Path, help="the results file; by default under results/")
    options = parser.parse_args()
    cuda, chosen = options.device == "cuda", QUICK if options.quick else FULL
    chosen = chosen | {"dtype": ["float16", "bfloat16"] if cuda else ["float32"]}
    for name, value in (chosen | {"time": 0.2 if cuda else 0.5}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main():
    options, begin = arguments(), time.perf_counter()
    device = torch.device(options.device)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(options.device),
        "commit": options.commit or commit(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "kernels": dispatch.kernels_for(device) is not None,
        "fissile": fissile.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/pack.py", *sys.argv[1:]]),
    }
    rate = copy_rate(device)
    about["copy_bytes_per_second"] = rounded(rate)
    print(f"{about['machine']}; a large copy moves {rate / 1e9:,.0f} GB/s (read and written)")
    print("copy: bytes that must be read per second, as a share of that; the others: time over")
    print("dense's (in brackets: of CUDA graphs, without what Python takes to launch). W1 is h x d")
    print("and has alpha h rows when it is split; W2 reads alpha h children.")
    print(header())
    rows = []
    for name in options.dtype:
        rows += measured(options, getattr(torch, name), rate)
    print(*reasons(rows), sep="\n")
    about["minutes"] = round((time.perf_counter() - begin) / 60, 1)
    found = ratios(rows)
    if to := target(options):
        to.parent.mkdir(parents=True, exist_ok=True)
        head_ = json.dumps(about, indent=1)[:-2]
        body = ",\n".join(json.dumps(row) for row in rows)
        to.write_text(f'{head_},\n "rows": [\n{body}\n]}}\n', "utf-8")
        print(f"written to {to}")
    print(json.dumps({k: about[k] for k in ("machine", "commit", "date")} | {"ratios": found}))


if __name__ == "__main__":
    main()
