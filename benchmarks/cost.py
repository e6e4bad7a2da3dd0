"""Fits what `fissile plan` says to measured runs, and measures how far off it is.

    python benchmarks/cost_fill.py STORE    # measures; see there
    python benchmarks/cost.py STORE... [--to src/fissile/lab/measured.json]

Rows of a batch are stored at once and share its time, so a batch can be put together again. Its
time is a worker's if one process had one core (as on Ray; the row says so), or a GPU to itself
(`fissile run --device cuda --jobs 1`; whoever gives the store must know). Rows of processes with
several cores are left out. Convolutional networks are stored one by one while their batch goes on:
for them the clock counts. The error is that of studies which a fit has not seen.

`--to` replaces what these stores measured and keeps the rest. The last line is one JSON object.
"""

import argparse
import datetime
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import exp, log
from pathlib import Path

import numpy as np
from about import commit, machine
from scipy.optimize import nnls

from fissile._common.errors import FissileError
from fissile.lab.measured import Load, Speed, kind_of, loads, machine_of
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import from_spec

# --- measured batches


@dataclass
class Batch:
    """Trials that were computed together."""

    worker: str  # its name in the provenance
    device: str
    study: str
    works: tuple
    seconds: float

    @cached_property
    def loads(self):
        """What it asks of a worker, by kind of network."""
        return loads(self.works)

    @cached_property
    def kind(self):
        """The kind that most of its work is of."""
        return max(self.loads, key=lambda kind: self.loads[kind].cost)


def batches_of(folder):
    """Put the batches of a store together again."""
    groups, strange = defaultdict(list), set()
    with Store(folder, create=False) as store:
        studies = studies_of(store)
        rows = store.rows([key for (key,) in store._query("SELECT key FROM trials")])
    for row in rows:
        try:
            work = from_spec(row.kind, row.spec)
        except FissileError:  # of a method that is gone: its batch cannot be put together
            strange.add(row.finished)
            continue
        name, cores = machine_of(row.provenance.device)
        stamp = row.finished if kind_of(work) != "images" else row.provenance.commit
        if cores < 2:
            device = "cpu" if cores else "cuda"
            groups[name, device, work.batch_key(), stamp].append((work, row))
    found = []
    for (name, device, _, stamp), members in groups.items():
        if stamp in strange:
            continue
        works, rows = zip(*members, strict=True)
        labels = Counter(studies.get(work.key, str(work.batch_key())) for work in works)
        if kind_of(works[0]) == "images":
            works, seconds = clocked(works, rows)
        else:
            seconds = sum(row.seconds for row in rows)
        if seconds > 0:
            found.append(Batch(name, device, labels.most_common(1)[0][0], tuple(works), seconds))
    return found


def studies_of(store):
    """The studies that trials were computed for, by key."""
    found = {}
    for one in store.runs():
        for work in STUDIES[one.study].works(one.scale, one.trials, one.changes):
            found.setdefault(work.key, one.study)
    return found


def clocked(works, rows):
    """Networks that were finished one after another, without the first, and the time between."""
    times = [datetime.datetime.fromisoformat(row.finished).timestamp() for row in rows]
    after = [work for work, at in zip(works, times, strict=True) if at > min(times)]
    return after, max(times) - min(times)


# --- the fit

#: What a kind of network may take time for; more than its work only where that predicts better.
TERMS = (("cost",), ("steps", "cost"), ("shapes", "steps", "cost"))


def fitted(batches, terms):
    """Seconds of a set-up, a step and a unit of work for every kind, none below zero.

    What is made small is the relative error, so that short batches count as long ones do.
    """
    asked = [batch.loads for batch in batches]
    kinds = sorted({kind for load in asked for kind in load})
    columns = [(kind, name) for kind in kinds for name in terms.get(kind, TERMS[-1])]
    matrix = np.array(
        [[getattr(load.get(kind, Load()), name) for kind, name in columns] for load in asked]
    )
    seconds = np.array([batch.seconds for batch in batches])
    scale = 1 / (seconds + 0.05)  # what is over at once is mostly noise
    size = np.maximum(matrix.max(0), 1e-30)  # columns of one size, or rounding decides
    found, _ = nnls(matrix * scale[:, None] / size, seconds * scale)
    values = dict(zip(columns, found / size, strict=True))
    return {
        kind: Speed(*(values.get((kind, name), 0.0) for name in Load._fields)) for kind in kinds
    }


def judged(batches):
    """The speed of every kind, with its error: that of studies which the fit has not seen."""
    kinds = sorted({kind for batch in batches for kind in batch.loads})
    terms = {}
    for kind in kinds:
        errors = {one: error_of(left_out(batches, kind, terms | {kind: one})) for one in TERMS}
        terms[kind] = min(TERMS, key=lambda one: (errors[one] or 99.0) * 1.02 ** len(one))
    speeds = fitted(batches, terms)
    for kind, speed in speeds.items():
        mine = [batch for batch in batches if batch.kind == kind]
        ratios, studies = left_out(batches, kind, terms), {batch.study for batch in mine}
        speeds[kind] = replace(
            speed, error=error_of(ratios), batches=len(mine), studies=len(studies)
        )
        print(
            f"{kind:12} {len(mine):4} batches of {len(studies)} studies: "
            f"{speed.shapes:.3g} s a shape, {1e6 * speed.steps:.3g} µs a step, {speed.cost:.3g} s "
            f"a unit of work; within {speeds[kind].error:.2f} times; left out, predicted / "
            f"measured: {', '.join(f'{one:.2f}' for one in ratios) or 'unknown'}"
        )
    return speeds


def left_out(batches, kind, terms):
    """How many times as long studies were predicted to take, by fits without them.

    Of a kind that only one study has, single batches are left out instead.
    """
    mine = [batch for batch in batches if batch.kind == kind]
    folds = [[b for b in mine if b.study == study] for study in sorted({b.study for b in mine})]
    if len(folds) == 1:
        folds = [[batch] for batch in mine]
    ratios = []
    for fold in folds:
        out = set(map(id, fold))
        speeds = fitted([batch for batch in batches if id(batch) not in out], terms)
        told = [predicted(speeds, batch) for batch in fold]
        if all(told):
            ratios.append(sum(told) / sum(batch.seconds for batch in fold))
    return ratios


def error_of(ratios):
    """The factor that estimates are off, the root of its mean square; 0 if nothing was left out."""
    return exp((sum(log(one) ** 2 for one in ratios) / len(ratios)) ** 0.5) if ratios else 0.0


def predicted(speeds, batch):
    """The seconds of a batch; 0 where one of its kinds is not known."""
    asked = batch.loads
    known = asked.keys() <= speeds.keys()
    return sum(speeds[kind].seconds(load) for kind, load in asked.items()) if known else 0.0


def rounded(speed):
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(speed).items()}


def merged(old, new):
    """What was measured before, where it was not measured again."""
    found = {(one["name"], one["device"]): one for one in old}
    for one in new:
        key = one["name"], one["device"]
        before = found.get(key, {})
        kinds = dict(sorted((before.get("kinds", {}) | one["kinds"]).items()))
        found[key] = before | one | {"kinds": kinds}
    return list(found.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--kind", action="append", help="only such networks")
    parser.add_argument("--to", type=Path, help="the file to bring up to date")
    options = parser.parse_args()
    batches, begins = [], {}
    for store in options.stores:
        batches += batches_of(store)
        if (store / "begin.json").exists():
            begins |= json.loads((store / "begin.json").read_text())
    if options.kind:
        batches = [batch for batch in batches if set(batch.loads) <= set(options.kind)]
    found = []
    for name, device in sorted({(batch.worker, batch.device) for batch in batches}):
        begin = begins.get(device, {})
        print(f"{name} ({device})", *(f"{key}: {value} s" for key, value in begin.items()))
        speeds = judged([b for b in batches if (b.worker, b.device) == (name, device)])
        kinds = {kind: rounded(speed) for kind, speed in speeds.items()}
        found.append({"name": name, "device": device, **begin, "kinds": kinds})
    made = {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    if options.to:
        old = json.loads(options.to.read_text())["workers"] if options.to.exists() else []
        text = json.dumps({"workers": merged(old, found)}, indent=1)
        options.to.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({"made": made, "workers": found}))


if __name__ == "__main__":
    main()
