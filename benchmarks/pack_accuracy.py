"""What packing costs in accuracy, and what it saves on disk, over all trials of two studies.

    python benchmarks/pack_accuracy.py                # some 12 minutes on two idle cores
    python benchmarks/pack_accuracy.py --scale quick  # half a minute, writes nothing

The networks of the studies `fashionmnist` and `cifar100` are trained again, exactly as the lab
trains them, and kept under build/pack-accuracy: killed at any time, the same command goes on with
the batch it was at. Each is then tested as it is, rounded to a narrower dtype, and packed.

Writes docs/parts/pack-table.md and benchmarks/results/pack-accuracy.json; the last line printed
is one JSON object. Data sets are looked for as `fissile data` says. CIFAR-100 is seen through the
features of a frozen EfficientNet-Lite2, not CLIP's; --features takes others.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pandas
import torch
from about import commit, machine
from pack_forms import measured
from pack_table import page
from rich.progress import track

import fissile
from fissile.bank import Bank
from fissile.lab.batching import batches
from fissile.lab.classifier import Classifiers, bound
from fissile.lab.compute import bank_arm
from fissile.lab.run import Bar
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "pack-accuracy"
TABLE = ROOT / "docs" / "parts" / "pack-table.md"
RESULTS = ROOT / "benchmarks" / "results" / "pack-accuracy.json"

BATCH = 6.0  # estimated seconds of work that kill -9 may cost; the lab's own


# --- the networks


def kept(trial, ending="safetensors"):
    """Say where a trained network lies; its key names all that decides it, its data included."""
    return KEPT / f"{trial.key}.{ending}"


def train(works, bench):
    """Train what is missing, in batches as the lab cuts them."""
    missing = [trial for trial in works if not kept(trial, "json").exists()]
    KEPT.mkdir(parents=True, exist_ok=True)
    with Bar() as bar:
        bar.start(len(missing), work=sum(trial.cost for trial in missing))
        for batch in batches(missing, BATCH, os.cpu_count()):
            train_batch(batch, bench)
            bar.advance(len(batch), work=sum(trial.cost for trial in batch))


def train_batch(batch, bench):
    """Train networks in all their arms, and keep every one in a file of its own."""
    networks = list(dict.fromkeys(trial.network() for trial in batch))
    arms = list(dict.fromkeys(trial.arm for trial in batch))
    begin, first = time.perf_counter(), networks[0]
    bank = Bank([bench.spec(network) for network in networks])
    bank.train(until=first.warm_up)
    branched = bank.branch({repr(arm): bank_arm(arm, first) for arm in arms})
    branched.train(until=first.warm_up + first.fine_tune)
    seconds = (time.perf_counter() - begin) / len(batch)
    for trial in batch:
        row = networks.index(trial.network()) * len(arms) + arms.index(trial.arm)
        fissile.save(branched.take(row)[0], kept(trial))
        about = {"accuracy": float(branched.last[row]), "seconds": seconds}
        part = kept(trial, "part")
        part.write_text(json.dumps(about), "utf-8")
        part.replace(kept(trial, "json"))  # last: with this beside it, a network is whole


def told(trial):
    """Return the test accuracy that the bank saw after the last epoch, and the time it took."""
    return json.loads(kept(trial, "json").read_text("utf-8"))


def lab_accuracy(study, works, store):
    """Return what the lab holds for these trials: its store, or else the table in results/."""
    if store is not None:
        with Store(store, create=False) as found:
            rows = found.rows([trial.key for trial in works])
            return {row.key: 100 * row.measures["accuracy"] for row in rows}
    path = ROOT / "results" / "tidy" / f"{study}.parquet"
    if not path.exists():
        return {}
    frame = pandas.read_parquet(path).query("measure == 'accuracy'")
    names = ["data", "neurons", "lr", "warm_up", "fine_tune", "arm", "trial"]
    held = frame.set_index(names)["value"].to_dict()
    found = {trial.key: held.get(tuple(trial.columns()[n] for n in names)) for trial in works}
    return {key: value for key, value in found.items() if value is not None}


# --- a study


def measure_study(name, options):
    """Return a study's rows, one for each network and form, and how they compare to the lab's."""
    changes = {"data": options.features} if name == "cifar100" else {}
    works = bound(STUDIES[name].works(options.scale, options.trials, changes))
    bench = Classifiers("cpu")
    train(works, bench)
    data, rows = bench.spec(works[0]).data, []
    with tempfile.TemporaryDirectory() as folder:
        for trial in track(works, f"{name}: packing and testing"):
            rows += measured(trial, fissile.load(kept(trial)).eval(), data, folder)
    frame = pandas.DataFrame(rows)
    frame.insert(0, "study", name)
    checked = {
        "features": works[0].task.columns()["encoder"],
        "test_rows": len(data.y_test),
        "training_minutes": round(sum(told(trial)["seconds"] for trial in works) / 60, 1),
    }
    checked |= against_lab(name, works, options.store)
    return frame, checked | against_bank(works, frame, len(data.y_test))


def against_lab(name, works, store):
    """Compare the accuracies that the bank saw with those that the lab holds, digit by digit."""
    held = lab_accuracy(name, works, store)
    off = [abs(held[t.key] - 100 * told(t)["accuracy"]) for t in works if t.key in held]
    return {
        "networks": len(works),
        "in_lab": len(off),
        "as_in_lab": sum(value == 0 for value in off),
        "furthest_from_lab": max(off, default=None),
    }


def against_bank(works, frame, rows):
    """Compare the bank's accuracies with those found here, in another order of adding."""
    plain = frame[(frame.dtype == "float32") & (frame.layout == "unpacked")]
    here = {(row.arm, row.neurons, row.trial): row.correct for row in plain.itertuples()}
    off = [abs(here[t.arm.name, t.neurons, t.number] - rows * told(t)["accuracy"]) for t in works]
    return {"furthest_from_bank_in_rows": round(max(off))}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="paper", help="smoke, quick or paper (the default)")
    parser.add_argument("--trials", type=int, help="of each width; by default the scale's")
    parser.add_argument("--data", type=Path, help="a folder with data sets; see: fissile data")
    parser.add_argument("--features", default="cifar100-efficientnet-lite2", help="of CIFAR-100")
    parser.add_argument("--store", type=Path, help="the lab's store; by default results/tidy")
    return parser.parse_args()


def main():
    options, begin = arguments(), time.perf_counter()
    source = commit()  # it may move on while this runs
    if options.data is not None:
        others = os.environ.get("FISSILE_DATA", "")
        os.environ["FISSILE_DATA"] = os.pathsep.join(filter(None, (str(options.data), others)))
    found = {name: measure_study(name, options) for name in ("fashionmnist", "cifar100")}
    frame = pandas.concat([rows for rows, _ in found.values()], ignore_index=True)
    checks = {name: checked for name, (_, checked) in found.items()}
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": source,
        "fissile": fissile.__version__,
        "torch": torch.__version__,
        "scale": options.scale,
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        "command": " ".join(["python", "benchmarks/pack_accuracy.py", *sys.argv[1:]]),
        "checks": checks,
    }
    text, summary = page(frame, about)
    print(text)
    about["summary"] = summary
    if options.scale == "paper" and options.trials is None:
        TABLE.write_text(text, "utf-8")
        rows = ",\n".join(json.dumps(row) for row in frame.to_numpy().tolist())
        head = json.dumps(about | {"columns": list(frame.columns)}, indent=1)[:-2]
        RESULTS.write_text(f'{head},\n "rows": [\n{rows}\n]}}\n', "utf-8")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
