"""What a packed layer takes of a GPU that does nothing else for seconds, its clock and its power.

    python benchmarks/pack_sustained.py --to benchmarks/results/pack-sustained-h200.json    # 4 min
    python benchmarks/pack_sustained.py --table    # docs/parts/pack-sustained.md from those results

Other benchmarks time a few milliseconds. Decoding takes power beside the memory's, and a GPU at the
limit of its power soon lowers its clock. So every layer is timed twice: for some milliseconds after
a rest, and in the last half of two seconds without one. Weights are random and none is empty; power
depends on them. Layers are one of many in a CUDA graph, as
in pack_tiles.py; the last line is one JSON object.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch
from about import made, needs_gpu
from pack_tiles import READ, SIZES, layer, microseconds

from fissile.packed.gpu.launch import partitioned_linear

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pack-sustained-h200.json"
ALPHAS, BATCHES, SECONDS = (1, 2, 4, 8), (1, 4, 8, 16), 2.0


def sensed():
    """Return the clock in MHz now, and the power in W as nvidia-smi averages it."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(value) for value in said.splitlines()[0].split(",")]


def sustained(call, copies, each):
    """Return microseconds of a call after many, and the clock and the power meanwhile."""
    graph, calls = torch.cuda.CUDAGraph(), 4 * copies  # so few launches that none has to wait
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % copies)
    replays = max(2, int(SECONDS / 2 * 1e6 / (each * calls)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(replays):
        graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    time.sleep(0.65 * SECONDS)
    clock, power = sensed()
    assert not end.query(), "the clock was read too late"
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / (replays * calls), clock, power


def timed(alpha, x, weights):
    """Return one row of the results: a packed layer, or with alpha 1 the dense one."""

    def call(i):
        if alpha == 1:
            return torch.nn.functional.linear(x, weights[i])
        return partitioned_linear(x, weights[i], None, None, alpha, "none")

    call(0)  # compiles
    time.sleep(1)
    burst = microseconds(call, len(weights))
    time.sleep(0.5)
    took, clock, power = sustained(call, len(weights), burst)
    return {
        "alpha": alpha,
        "burst": round(burst, 2),
        "sustained": round(took, 2),
        "clock_mhz": clock,
        "power_w": power,
    }


NAMES = (
    "size",
    "batch",
    "alpha",
    "burst",
    "over dense",
    "sustained",
    "over dense",
    "clock",
    "power",
)


def table(rows):
    """Return the results as a page."""
    dense = {(row["size"], row["batch"]): row for row in rows if row["alpha"] == 1}
    lines = ["| " + " | ".join(NAMES) + " |", "|---" * len(NAMES) + "|"]
    for row in rows:
        beside = dense[row["size"], row["batch"]]
        cells = [row["size"], row["batch"], "dense" if row is beside else row["alpha"]]
        for kind in ("burst", "sustained"):
            cells += [f"{row[kind]:.1f} µs", f"{row[kind] / beside[kind]:.2f}"]
        cells += [f"{row['clock_mhz']:.0f} MHz", f"{row['power_w']:.0f} W"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path)
    parser.add_argument("--table", action="store_true", help="only write the page of the results")
    options = parser.parse_args()
    if options.table:
        text = table(json.loads(RESULTS.read_text("utf-8"))["rows"])
        (ROOT / "docs" / "parts" / "pack-sustained.md").write_text(text, "utf-8")
        return
    needs_gpu()
    rows = []
    for h, d in SIZES:
        weights = [layer(h, d, 1)[1] for _ in range(min(32, max(6, int(READ / (2 * h * d)))))]
        for batch in BATCHES:
            x = layer(1, d, batch)[0]
            for alpha in ALPHAS:
                rows.append({"size": f"{h}x{d}", "batch": batch} | timed(alpha, x, weights))
                print(rows[-1], flush=True)
    result = made("cuda") | {"rows": rows}
    if options.to:
        options.to.write_text(json.dumps(result) + "\n", "utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
