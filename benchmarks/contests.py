"""Finished contests of the lab as lines of a small file, for frontier and ablation alike."""

import json
from itertools import groupby

from fissile.lab.results import load, nearest
from fissile.lab.store import Store
from fissile.lab.studies.frontier import FRONTIER

#: What a setting chooses, besides the width.
DIALS = ("direct", "lr", "schedule", "decay", "dropout", "smooth")


def finished(out, name):
    """Return the results of a study's five data sets, or leave with what is missing."""
    ids = FRONTIER[name]
    with Store(out, create=False) as store:
        runs = {run.study: load(store, run) for run in nearest(store, ids, "paper")}
    missing = [one for one in ids if one not in runs or not runs[one].complete]
    if missing:
        raise SystemExit(f"not finished: {', '.join(missing)}; run `{command(name)}`")
    return {one.removeprefix(f"{name}-"): runs[one] for one in ids}


def command(name):
    return f"fissile run {name} --scale paper --device cuda"


def cells(found):
    """Return a line for every data set, budget and method."""
    lines = []
    for short, results in found.items():
        rows = {row.key: row for row in results.rows}
        pairs = [(work, rows[work.key]) for work in results.works]
        for _, trials in groupby(pairs, lambda pair: (pair[0].budget, pair[0].method)):
            lines.append(cell(short, sorted(trials, key=lambda pair: pair[0].number)))
    return lines


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


def percent(share):
    return round(100 * share, 3)


def described(found):
    """Return what was trained on, and how."""
    return [_described(short, results) for short, results in found.items()]


def _described(short, results):
    one = results.works[0]
    return {
        "set": short,
        "title": results.study.title.partition(": ")[2],
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


def about(found, name):
    """Say when and where the trials ran, as their rows have it."""
    rows = [row for results in found.values() for row in results.rows]
    made = [row.provenance for row in rows]
    return {
        "command": command(name),
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
