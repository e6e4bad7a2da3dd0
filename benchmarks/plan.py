"""What `fissile plan` says beforehand, and what two runs then take.

    python benchmarks/plan.py [--to FILE]    # two cores, two minutes

A Boolean study and one on FashionMNIST, at a scale that the model was not fitted to, each run by
`fissile run --jobs N` on all N cores, into a store of its own. Times are of whole commands,
with their start-up. The last line is one JSON object.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from about import commit, machine

RUNS = (
    ("superposition", "--scale", "paper", "--trials", "2"),
    ("fashionmnist", "--scale", "paper", "--trials", "2"),
)


def fissile(*words):
    """Run a command of fissile and return what it says."""
    command = [sys.executable, "-m", "fissile.cli", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compared(words, cores):
    """Plan a run, then make it."""
    with tempfile.TemporaryDirectory() as folder:
        told = json.loads(fissile("plan", *words, "--workers", cores, "--out", folder, "--json"))
        estimate = told["plans"][0]
        begin = time.perf_counter()
        fissile("run", *words, "--jobs", cores, "--out", folder)
        seconds = time.perf_counter() - begin
    return {
        "run": " ".join(words),
        "trials": estimate["trials"],
        "estimate": round(estimate["wall"], 1),
        "low": round(estimate["low"], 1),
        "high": round(estimate["high"], 1),
        "measured": round(seconds, 1),
        "measured / estimate": round(seconds / estimate["wall"], 3),
        "within": estimate["low"] <= seconds <= estimate["high"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, help="a file for the result")
    options = parser.parse_args()
    found = []
    for words in RUNS:
        one = compared(words, os.cpu_count())
        found.append(one)
        print(
            f"{one['run']}: estimated {one['estimate']} s ({one['low']} to {one['high']}), "
            f"measured {one['measured']} s, {one['measured / estimate']} times the estimate",
            flush=True,
        )
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/plan.py", *sys.argv[1:]]),
        "runs": found,
    }
    if options.to:
        options.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
