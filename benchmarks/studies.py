"""How long the studies take at a scale, and how long a loop over single networks would.

    PYTHONPATH=src python benchmarks/studies.py [--scale paper] [--device cpu] [ID ...]

Everything is computed anew, in a store of its own. The loop's time is its measured time per step
on networks of the smallest and the largest sizes, times the steps.
"""

import argparse
import datetime
import json
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from bank import commit, machine

import fissile
from fissile.bank.loop import fit
from fissile.data import dnf_task
from fissile.lab.batching import Local, default_jobs, pool
from fissile.lab.run import Bar, run
from fissile.lab.store import Store
from fissile.lab.studies import find
from fissile.lab.trial import Trial


def loop_seconds_per_step(device, steps=300):
    """The plain loop's time for a step, averaged over small and large networks of the studies."""
    shapes = [(4, 4, None), (4, 32, None), (32, 4, None), (32, 32, None), (8, 8, 32), (32, 8, 128)]
    total = 0.0
    for clauses, width, embedding in shapes:
        train, _ = dnf_task(clauses, train=64 * steps, test=2)
        x, y = train.x.to(device), train.y.to(device)
        model = fissile.MLP([4 * clauses, width, 1], embedding=embedding).to(device)
        adam = torch.optim.Adam(model.parameters(), 1e-3)
        fit(model, adam, x[:640], y[:640], epochs=1, seed=0)
        begin = time.perf_counter()
        fit(model, adam, x, y, epochs=1, seed=0)
        total += (time.perf_counter() - begin) / steps
    return total / len(shapes)


def steps_of(works):
    """Training steps: the arms of a network share its warm-up."""
    trials = [work for work in works if isinstance(work, Trial)]
    after = sum(replace(trial, warm_up=0).steps for trial in trials)
    networks = {replace(trial.network(), pictures=False) for trial in trials}
    return after + sum(network.steps - replace(network, warm_up=0).steps for network in networks)


def timed(works, device, jobs):
    """Compute trials in a store of their own and return the seconds."""
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store, Bar() as bar:
        begin = time.perf_counter()
        with pool(jobs) if jobs > 1 else nullcontext() as executor:
            run(works, store, Local(device, executor=executor, slots=jobs), watcher=bar)
        return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="by default those that need no data set")
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--each", action="store_true", help="also time every study by itself")
    parser.add_argument("--commit", default=None, help="recorded with the result")
    options = parser.parse_args()
    jobs = options.jobs or default_jobs(options.device)
    chosen = find(options.ids) or [one for one in find(["all"]) if one.data("smoke") is None]
    studies = {study.id: study.works(options.scale) for study in chosen}
    works = list(dict.fromkeys(work for each in studies.values() for work in each))
    seconds, steps = timed(works, options.device, jobs), steps_of(works)
    alone = {}
    if options.each:
        alone = {name: round(timed(w, options.device, jobs), 1) for name, w in studies.items()}
        for name, taken in alone.items():
            print(f"{name:>14} {len(studies[name]):>6,} trials alone: {taken:>6.1f} s")
    per_step = loop_seconds_per_step(options.device)
    estimate = sum(work.cost for work in works)
    print(
        f"{len(works):,} trials, {steps:,} steps in {seconds:.0f} s "
        f"(estimated for two cores: {estimate:.0f} s); "
        f"a loop would take {steps * per_step / 3600:.1f} h"
    )
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(options.device),
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "scale": options.scale,
        "jobs": jobs,
        "trials": len(works),
        "steps": steps,
        "seconds": round(seconds, 1),
        "seconds_alone": alone,
        "estimated_seconds": round(estimate, 1),
        "loop_us_per_step": round(1e6 * per_step, 1),
        "loop_hours": round(steps * per_step / 3600, 2),
        "loop/lab": round(steps * per_step / seconds, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
