"""The finished trials of the study frontier as one small file, from which its page is made.

    fissile run frontier --scale paper --device cuda --out STORE
    python benchmarks/frontier_table.py --out STORE
    python docs/scripts/frontier.py && python docs/scripts/include.py

Writes benchmarks/results/frontier.json: for every data set, budget and method the test accuracies
of all trials, what was counted, and the setting that held-out samples chose. With --keep COMMIT,
what the file has had so far is kept as an earlier run: the recipe and the best other method at
every point. Earlier runs that the file has already stay.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from statistics import mean

from contests import about, cells, described, finished, written

from fissile.lab.budget_methods import OURS

TO = Path(__file__).parent / "results" / "frontier.json"


def kept(lines, commit):
    """Return the recipe's cells and those of the best other method, with their commit."""
    chosen = []
    for _, point in groupby(lines, lambda line: (line["set"], line["budget"])):
        methods = {line["method"]: line for line in point}
        ours = methods.pop(OURS)
        best = max(methods.values(), key=lambda line: mean(line["accuracy"]))
        chosen += [{"commit": commit, **best}, {"commit": commit, **ours}]
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the store")
    parser.add_argument("--keep", metavar="COMMIT", help="keep what the file has, of this commit")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    before = json.loads(options.to.read_text("utf-8")) if options.to.exists() else {}
    earlier = before.get("earlier", [])
    if options.keep:
        earlier += kept(before["cells"], options.keep)
    found = finished(options.out, "frontier")
    parts = {
        "about": about(found, "frontier"),
        "sets": described(found),
        "cells": cells(found),
        "earlier": earlier,
    }
    options.to.write_text(written(parts), "utf-8")
    print(f"{len(parts['cells'])} cells written to {options.to}")


if __name__ == "__main__":
    main()
