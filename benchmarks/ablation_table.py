"""The finished trials of the study ablation as one small file, from which its tables are made.

    fissile run ablation --scale paper --device cuda --out STORE
    python benchmarks/ablation_table.py --out STORE
    python docs/scripts/ablation.py && python docs/scripts/include.py

Writes benchmarks/results/ablation.json, as frontier_table.py writes its own. Arms that the file has
and the code no longer knows stay in it.
"""

import argparse
import json
from pathlib import Path

from contests import about, cells, described, finished, written

from fissile.lab.budget_methods import METHODS

TO = Path(__file__).parent / "results" / "ablation.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the store")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    before = json.loads(options.to.read_text("utf-8"))["cells"] if options.to.exists() else []
    found = finished(options.out, "ablation")
    parts = {
        "about": about(found, "ablation"),
        "sets": described(found),
        "cells": cells(found) + [line for line in before if line["method"] not in METHODS],
    }
    options.to.write_text(written(parts), "utf-8")
    print(f"{len(parts['cells'])} cells written to {options.to}")


if __name__ == "__main__":
    main()
