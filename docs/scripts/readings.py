"""Write the tables of docs/fidelity.md that decide between readings, from a store of their runs.

    for n in 10000 20000 30000 50000 100000 200000; do
      fissile run superposition --scale paper --only arm=converged --set train=$n --out readings
      fissile run codes capacity cosine embed-neurons embed-clauses --scale paper --trials 3 \
        --only arm=dense,clause-2,random-2,clause-4,random-4,gram-2 --set train=$n --out readings
    done
    for s in raw unit length-10 standard; do
      fissile run cifar100 single-mask dropconnect --scale paper --trials 3 \
        --set data=cifar100-efficientnet-lite2 --set scaling=$s --out readings
    done
    fissile run cnn-256 cnn-512 --scale paper --trials 3 --device cuda
    fissile run cnn-256 cnn-512 --scale paper --trials 3 --device cuda --set mirror=false
    python benchmarks/cnn_collapse.py --device cuda --to benchmarks/results/cnn-collapse-h200.json
    python docs/scripts/readings.py readings
    python docs/scripts/include.py

Whatever the store lacks is left out, and every table says how many numbers it compares.
"""

import csv
import json
import sys
from math import nan
from pathlib import Path
from typing import get_args

import numpy as np
import pandas

from fissile.data.sets import Scaling
from fissile.lab.classifier import meant
from fissile.lab.store import Store
from fissile.lab.studies import CRITERION, STUDIES
from fissile.lab.task import WITHIN

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "docs" / "parts"
SAMPLES = (10_000, 20_000, 30_000, 50_000, 100_000, 200_000)
TABLES = ("codes", "capacity", "cosine", "embed-neurons", "embed-clauses")
ON_FEATURES = ("cifar100", "single-mask", "dropconnect")
DATA = "cifar100-efficientnet-lite2"
COLLAPSED = 0.015  # of the test images, at most
WIDE = (64, 128)  # neurons of the heads that decide whether images are mirrored


def held(store, works):
    """Return the measures of the trials that are there, each with its trial."""
    found = {row.key: row.measures for row in store.rows([work.key for work in works])}
    return [(work, found[work.key]) for work in works if work.key in found]


def shares(store, study, changes):
    """Return how much of its converged accuracy the network of each cell has at the split."""
    found = held(store, STUDIES[study].converged("paper", changes))
    return {work: measures["warm"] / measures["accuracy"] for work, measures in found}


def means(store, study, changes):
    """Return the means of a study's table by place and arm, beside the paper's numbers."""
    published, values = STUDIES[study].published[0], {}
    for work, measures in held(store, STUDIES[study].works("paper", 10, changes)):
        place = work.columns()[published.along], work.arm.name
        values.setdefault(place, []).append(measures[published.measure])
    scale = 100 if published.measure == "accuracy" else 1
    paper = {
        (place, arm): number[0] if isinstance(number, tuple) else number
        for place, row in published.values.items()
        for arm, number in row.items()
    }
    return {key: (scale * np.mean(values[key]), paper[key]) for key in paper if key in values}


def gains(found):
    """Return relative improvements over the dense network, in percent: ours and the paper's."""
    return {
        (place, arm): tuple(
            100 * (number / dense - 1)
            for number, dense in zip(found[place, arm], found[place, "dense"], strict=True)
        )
        for place, arm in found
        if arm != "dense" and (place, "dense") in found
    }


def distance(pairs, *, relative=False):
    """Return the root mean square of the differences, or of those in percent of the paper's."""
    return (
        nan
        if not pairs
        else float(
            np.sqrt(np.mean([((a - b) * (100 / b if relative else 1)) ** 2 for a, b in pairs]))
        )
    )


def markdown(head, rows):
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def by_samples(store):
    """Return the criterion for each number of samples."""
    rows = []
    for number in SAMPLES:
        counts = []
        for study in ("interference", "superposition"):
            found = list(shares(store, study, {"train": number}).values())
            below = sum(share < WITHIN for share in found)
            counts += [f"{len(found) - below} of {len(found)}", f"{min(found, default=nan):.3f}"]
        rows.append([f"{number:,}", *counts])
    head = ["samples", "cells of both figures", "lowest share", "heat-map", "lowest share"]
    return markdown(head, rows)


def by_table(store):
    """Return the distance of each table for each number of samples."""
    rows = []
    for study in TABLES:
        relative = STUDIES[study].published[0].measure != "accuracy"
        found = [means(store, study, {"train": number}).values() for number in SAMPLES]
        cells = [f"{distance(one, relative=relative):.1f}" if one else "" for one in found]
        rows.append([study, "%" if relative else "points", *cells])
    return markdown(["table", "unit", *(f"{number:,}" for number in SAMPLES)], rows)


def by_scale(store):
    """Return the distance of each table of CIFAR-100 for each scale of the features."""
    rows, arrays = [], meant(DATA)
    for scaling in get_args(Scaling):
        changes = {"data": DATA, "scaling": scaling, **arrays}
        each = [gains(means(store, study, changes)) for study in ON_FEATURES]
        every = [pair for one in each for pair in one.values()]
        warm = shares(store, "cifar100", changes)
        rows.append(
            [
                f"`{scaling}`",
                f"**{distance(every):.1f}** ({len(every)})",
                *(f"{distance(one.values()):.1f} ({len(one)})" for one in each),
                " ".join(f"{share:.3f}" for share in warm.values()),
            ]
        )
    head = ["scale", "all three", *ON_FEATURES, "share at the split, 4 to 128 neurons"]
    return markdown(head, rows)


def by_mirror():
    """Return the dense heads of 64 and 128 neurons, with and without mirrored images."""
    rows, differences = [], {}
    for projection in (256, 512):
        study = STUDIES[f"cnn-{projection}"]
        for neurons in WIDE:
            paper, cells = study.published[0].values[neurons]["dense"][0], []
            for suffix in ("-unmirrored", ""):
                path = ROOT / "results" / "tidy" / f"{study.id}{suffix}.parquet"
                kept = pandas.read_parquet(path).query(
                    "measure == 'accuracy' and arm == 'dense' and neurons == @neurons"
                )
                mean = kept["value"].mean()
                differences.setdefault(suffix, []).append((mean, paper))
                cells.append(f"{mean:.1f} ± {kept['value'].sem():.1f}")
            rows.append([projection, neurons, f"{paper:.1f}", *cells])
    distances = [f"**{distance(pairs):.1f}**" for pairs in differences.values()]
    rows.append(["distance, points", "", "", *distances])
    return markdown(["projection", "neurons", "paper", "as they are", "half mirrored"], rows)


def by_collapse():
    """Return how many heads collapsed under each reading, and the best accuracy of a head."""
    with open(ROOT / "benchmarks" / "results" / "cnn-collapse-h200.json") as file:
        found = json.load(file)["accuracy"]
    rows = []
    for reading, heads in found.items():
        cells = (
            f"{sum(each <= COLLAPSED for each in seeds)} of {len(seeds)} ({100 * max(seeds):.0f} %)"
            for seeds in heads.values()
        )
        rows.append([reading, *cells])
    heads = (head.replace(" x ", ", ") for head in next(iter(found.values())))
    return markdown(["reading", *heads], rows)


def by_study():
    """Return what the results in the repository say of the criterion, study by study."""
    with open(ROOT / "results" / "claims.csv", newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["claim"] == CRITERION.text]
    rows = [[row["study"], row["verdict"], row["numbers"]] for row in found]
    return markdown(["study", "within 95 %?", "numbers"], rows)


if __name__ == "__main__":
    (PARTS / "fidelity-criterion.md").write_text(by_study(), "utf-8")
    (PARTS / "fidelity-mirror.md").write_text(by_mirror(), "utf-8")
    (PARTS / "fidelity-collapse.md").write_text(by_collapse(), "utf-8")
    if len(sys.argv) == 1:
        sys.exit()  # these need no store
    with Store(sys.argv[1], create=False) as store:
        for name, made in (("samples", by_samples), ("tables", by_table), ("scales", by_scale)):
            (PARTS / f"fidelity-{name}.md").write_text(made(store), "utf-8")
