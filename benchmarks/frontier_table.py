"""The finished trials of the study frontier as one small file, from which its page is made.

    fissile run frontier --scale paper --device cuda --out STORE
    python benchmarks/frontier_table.py --out STORE
    python docs/frontier.py && python docs/include.py

Writes benchmarks/results/frontier.json: for every data set, budget and method the test accuracies
of all trials, what was counted, and the setting that held-out samples chose. With --first, also
the recipe's cells of an earlier run, from a store of when plans were not part of a trial's key;
without it, those that the file has already stay.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path

from fissile.lab.keys import key_of
from fissile.lab.methods import OURS
from fissile.lab.results import latest, load
from fissile.lab.store import Store
from fissile.lab.studies.frontier import FRONTIER

TO = Path(__file__).parent / "results" / "frontier.json"
COMMAND = "fissile run frontier --scale paper --device cuda"
#: What a setting chooses, besides the width.
DIALS = ("lr", "schedule", "decay", "dropout", "smooth")


def percent(share):
    return round(100 * share, 2)


def cell(short, trials):
    """Return a line of the file: one method at one budget, from its trials in their order."""
    work, row = trials[0]
    measures = [row.measures for _, row in trials]
    counted = [int(one["nonzeros"]) for one in measures]
    setting = int(row.measures["setting"])
    plan = work.plans[setting]
    return {
        "set": short,
        "budget": work.budget,
        "method": work.method,
        "accuracy": [percent(one["accuracy"]) for one in measures],
        "nonzeros": [min(counted), max(counted)],
        "setting": setting,
        "held_out": percent(row.measures["held_out"]),
        "plan": {
            "hidden": plan.hidden,
            "weights": plan.weights(work.inputs, work.task.outputs),
            **{name: getattr(plan, name) for name in DIALS},
        },
    }


def cells(short, works, rows):
    """Return a line for every budget and method whose trials are there."""
    held = {row.key: row for row in rows}
    pairs = [(work, held[work.key]) for work in works]
    grouped = groupby(pairs, lambda pair: (pair[0].budget, pair[0].method))
    return [cell(short, sorted(trials, key=lambda t: t[0].number)) for _, trials in grouped]


def described(short, results):
    """Return what was trained on, and how."""
    one = results.works[0]
    return {
        "set": short,
        "title": results.study.title.removeprefix("The frontier: "),
        "data": one.task.data,
        "features": one.task.encoder or one.task.entry.encoder,
        "train": one.task.entry.train,
        "test": one.task.entry.test,
        "inputs": one.inputs,
        "outputs": one.task.outputs,
        "batch": one.batch,
        "epochs": one.epochs,
        "trials": len({work.number for work in results.works}),
        "budgets": list(dict.fromkeys(work.budget for work in results.works)),
        "widths": list(dict.fromkeys(work.neurons for work in results.works)),
    }


def earlier(store, found):
    """Return the recipe's cells of an earlier run, which has no plans in its keys."""
    lines = []
    for short, results in found.items():
        ours = [work for work in results.works if work.method == OURS]
        rows = {row.key: row for row in store.rows([key_of(work) for work in ours])}
        pairs = [(work, rows[key_of(work)]) for work in ours if key_of(work) in rows]
        for _, trials in groupby(pairs, lambda pair: pair[0].budget):
            line = cell(short, list(trials))
            del line["plan"]  # it is of now, and was another
            lines.append(line)
    return lines


def about(found):
    """Say when and where the trials ran, as their rows have it."""
    rows = [row for results in found.values() for row in results.rows]
    made = [row.provenance for row in rows]
    return {
        "command": COMMAND,
        "finished": [min(row.finished for row in rows), max(row.finished for row in rows)],
        "device": sorted({one.device for one in made}),
        "commit": sorted({one.commit for one in made}),
        "fissile": sorted({one.version for one in made}),
        "torch": sorted({one.torch for one in made}),
        "seconds": round(sum(row.seconds for row in rows)),
        "trials": len(rows),
    }


def written(parts):
    """Return the file as text: an entry on a line."""
    lines = ["{"]
    for name, part in parts.items():
        last = "" if name == list(parts)[-1] else ","
        if isinstance(part, dict):
            lines.append(f'"{name}": {json.dumps(part)}{last}')
        else:
            body = ",\n".join(json.dumps(one, separators=(",", ":")) for one in part)
            lines.append(f'"{name}": [\n{body}\n]{last}')
    return "\n".join([*lines, "}"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the store")
    parser.add_argument("--first", help="a store with an earlier run of the recipe")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    with Store(options.out, create=False) as store:
        runs = {run.study: load(store, run) for run in latest(store, FRONTIER["frontier"], "paper")}
    short = {name: name.removeprefix("frontier-") for name in FRONTIER["frontier"]}
    missing = [name for name in short if name not in runs or not runs[name].complete]
    if missing:
        raise SystemExit(f"not finished: {', '.join(missing)}; run `{COMMAND}`")
    found = {short[name]: runs[name] for name in short}
    parts = {
        "about": about(found),
        "sets": [described(*item) for item in found.items()],
        "cells": [line for s, r in found.items() for line in cells(s, r.works, r.rows)],
        "first": json.loads(options.to.read_text("utf-8"))["first"] if options.to.exists() else [],
    }
    if options.first:
        with Store(options.first, create=False) as store:
            parts["first"] = earlier(store, found)
    options.to.write_text(written(parts), "utf-8")
    print(f"{len(parts['cells'])} cells written to {options.to}")


if __name__ == "__main__":
    main()
