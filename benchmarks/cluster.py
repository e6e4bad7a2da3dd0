"""What a Ray cluster costs: its one-core workers on this machine against one run on all its cores.

    python benchmarks/cluster.py                    # two cores, a minute
    python benchmarks/cluster.py --scale paper --to benchmarks/results/cluster.json

Both compute the same study anew, each in a store of its own. Prints the seconds of each, from
nothing and once everything is imported and compiled; the last line is one JSON object with the
ratio of the latter: how fast the cluster is, where 1 is as fast as the local run.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from about import made

from fissile.lab.ray import cluster, connected
from fissile.lab.run import run
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES


def timed(works, backend=None):
    """Compute trials in a store of their own; return the seconds and what they came to."""
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        begin = time.perf_counter()
        run(works, store, backend)
        seconds = time.perf_counter() - begin
        return seconds, [row.measures for row in store.rows([work.key for work in works])]


def here(warm, works):
    begin = time.perf_counter()
    timed(warm)
    ready = time.perf_counter() - begin
    seconds, found = timed(works)
    return ready, seconds, found


def on_ray(warm, works):
    begin = time.perf_counter()
    with connected():
        with cluster(warm, every=0.0) as backend:  # a network at a time, so that all get some
            timed(warm, backend)
        ready = time.perf_counter() - begin
        with cluster(works) as backend:
            seconds, found = timed(works, backend)
    return ready, seconds, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="?", default="superposition")
    parser.add_argument("--scale", default="quick")
    parser.add_argument("--trials", type=int, default=None)
    parser.add_argument("--to", type=Path, default=None, help="a file for the result")
    options = parser.parse_args()
    study = STUDIES[options.study]
    warm, works = study.works("smoke"), study.works(options.scale, options.trials)
    seconds, found = {}, {}
    for name, way in (("local", here), ("ray", on_ray)):
        ready, taken, found[name] = way(warm, works)
        seconds[name] = {"start": round(ready, 2), "run": round(taken, 2)}
        print(f"{name:6} {taken:8.2f} s, and {ready:.2f} s before that to start", flush=True)
    ratio = seconds["local"]["run"] / seconds["ray"]["run"]
    same = found["local"] == found["ray"]
    print(f"{len(works):,} trials: {ratio:.2f} of the local speed, numbers equal: {same}")
    about = made() | {
        "workers": os.cpu_count(),
        "trials": len(works),
        "seconds": seconds,
        "equal": same,
        "ray/local": round(ratio, 3),
    }
    text = json.dumps(about)
    if options.to is not None:
        options.to.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
