"""A store of 200,000 trials, and what it takes to look at it: time, and memory at its peak.

    PYTHONPATH=src python benchmarks/store.py [--trials 200000] [--to benchmarks/results/FILE.json]

The store is filled with invented numbers of the study `capacity`, as many and as long as real ones.
Each command runs in a process of its own, once to bring the file into memory, then some more times;
the fastest counts. Processor seconds say more than the clock where other work has the cores. What
Python needs to start and to import libraries is part of all of it, and is given beside it as the
command `theory`, which computes next to nothing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from about import made

GOALS = {"status": (3, 300), "results": (10, None), "report": (15, 1000)}  # seconds, MB
RUN = "import sys; from fissile.cli.__main__ import main; sys.argv[0] = 'fissile'; main()"


def fill(folder, count):
    """Store invented results of one run; real ones have as many measures of as many digits."""
    from fissile.lab.compute import TrialResult
    from fissile.lab.store import Provenance, Run, Store
    from fissile.lab.studies import STUDIES

    study, numbers = STUDIES["capacity"], random.Random(0)
    cells = len(study.works("quick", 1))
    trials = -(-count // cells)
    works, about = study.works("quick", trials), Provenance.here("cpu")
    names = (
        "accuracy", "best", "capacity", "cosine", "absolute_cosine", "diagonal_cosine",
        "collisions", "warm", "diverged",
    )  # fmt: skip
    with Store(folder) as store:
        for start in range(0, len(works), 1000):
            found = []
            for work in works[start : start + 1000]:
                measures = {name: 0.5 + 0.1 * numbers.random() for name in names}
                measures |= {"nonzeros": 264.0, "diverged": 0.0}
                found.append(TrialResult(work, measures, 0.01 * numbers.random()))
            store.add(found, about)
        store.note_run(
            Run("capacity", "quick", trials, {}, f"fissile run capacity --trials {trials}")
        )
        return store.count()


def measured(*command):
    """Return the seconds, those of processors and the most megabytes that a command takes.

    The most memory of a process is never less than what its parent had: so this one stays small.
    """
    begin = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, command)], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, command
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=200_000)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--note", default="", help="what else the machine did")
    options.add_argument("--to", type=Path)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:
            count = elsewhere.submit(fill, Path(folder) / "lab", given.trials).result()
        size = (Path(folder) / "lab" / "trials.sqlite").stat().st_size
        commands = {
            "start": ("theory", "--simulate", 2),
            "status": ("status", "--out", f"{folder}/lab"),
            "results": (
                *("results", "capacity", "--format", "parquet"),
                *("--to", f"{folder}/table.parquet", "--out", f"{folder}/lab"),
            ),
            "report": ("report", "--to", f"{folder}/report", "--out", f"{folder}/lab"),
        }
        found = {}
        for name, command in commands.items():
            measured(*command)
            runs = [measured(*command) for _ in range(given.repeats)]
            found[name] = {
                "seconds": round(min(seconds for seconds, *_ in runs), 2),
                "processor_seconds": round(min(seconds for _, seconds, _ in runs), 2),
                "all_seconds": [round(seconds, 2) for seconds, *_ in runs],
                "megabytes": round(max(memory for *_, memory in runs)),
            }
    print(f"{count:,} trials in {size / 1e6:,.0f} MB")
    for name, one in found.items():
        seconds, memory = GOALS.get(name, (None, None))
        goal = (
            "" if seconds is None else f"  goal: {seconds} s" + (f", {memory} MB" if memory else "")
        )
        print(
            f"{name:8} {one['seconds']:6.2f} s, {one['processor_seconds']:.2f} s of processors, "
            f"{one['megabytes']:,} MB{goal}"
        )
    text = json.dumps({**made(), "note": given.note, "trials": count, "bytes": size, **found})
    if given.to:
        given.to.write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
