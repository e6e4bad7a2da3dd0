"""Fills a store with small runs that `benchmarks/cost.py` can be fitted to.

    python benchmarks/cost_fill.py STORE                  # two cores, four minutes
    python benchmarks/cost_fill.py STORE --device cuda    # a GPU, seven minutes

Runs are parts of studies on arrays of the right shapes: what is in them does not matter to the
clock. Workers are as they are planned with: a process with one core, all cores being busy, or the
only process on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fissile.data.catalogue import find
from fissile.lab.batching import BATCH, Here, Lane
from fissile.lab.classifier import bound, fingerprint
from fissile.lab.compute import compute
from fissile.lab.cost import data_bytes
from fissile.lab.measured import machine_of
from fissile.lab.pool import pool
from fissile.lab.run import run, side_by_side
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Boolean, Features, Trial

LITE = {"data": "cifar100-efficientnet-lite2"}
SHORT = {"warm_up": 1, "fine_tune": 1}
#: Study, scale, trials, widths if only some, and what is changed.
ANYWHERE = (
    ("superposition", "quick", 1, (), {}),
    ("interference", "quick", None, (), {}),
    ("circuits", "quick", None, (), {}),
    ("capacity", "quick", None, (), {}),
    ("codes", "quick", None, (), {}),
    ("embed-neurons", "quick", None, (), {}),
    ("embed-clauses", "quick", None, (), {}),
    ("theory", "quick", None, (), {}),
    ("cifar100", "quick", 2, (), LITE),
    ("feature-demand", "quick", None, (), LITE),
    ("clinc150", "quick", None, (), {}),
    ("equivalence", "quick", 2, (), LITE),
    ("deep", "smoke", 2, (), LITE),
    ("deep", "quick", 1, (), LITE),
    ("dynamic", "smoke", None, (), LITE),
    ("dynamic-search", "smoke", None, (), LITE),
    ("dropconnect", "smoke", None, (), LITE),
    ("dropconnect", "smoke", 1, (8,), LITE | {"fine_tune": 3}),
    ("frontier-clinc150", "smoke", None, (), {}),
    ("frontier-banking77", "smoke", None, (), {}),
    ("ablation-banking77", "smoke", None, (), {}),
)
RUNS = {
    "cpu": (
        *ANYWHERE,
        ("frontier-banking77", "quick", 4, (), {"epochs": 4}),
        ("ablation-clinc150", "quick", 1, (), {"epochs": 1}),
        ("imagenet100", "smoke", 2, (), {}),
        ("fashionmnist", "quick", None, (), {}),  # real images, where they are here
    ),
    "cuda": (
        *ANYWHERE,
        ("superposition", "paper", 8, (), {}),
        ("clinc150", "paper", 2, (), {}),
        ("imagenet1k", "paper", 1, (8, 16), SHORT),
        ("imagenet1k", "paper", 4, (12,), SHORT),
        ("frontier-banking77", "quick", None, (), {}),
        ("frontier-clinc150", "quick", None, (), {}),
        ("dropconnect", "quick", 1, (32,), LITE | SHORT),
    ),
}
TINY = [Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1)]
#: Files, inputs, classes, training and test samples.
ARRAYS = (
    ("cifar100-efficientnet-lite2-512", 512, 100, 50_000, 10_000),
    ("clinc150-minilm-384", 384, 150, 15_000, 4_500),
    ("banking77-minilm-384", 384, 77, 10_003, 3_080),
    ("imagenet100-clip-vit-b-16", 512, 100, 128_000, 5_000),
    ("imagenet1k-clip-vit-b-16", 512, 1000, 1_281_167, 50_000),
)


def fill(folder, device, data):
    """Compute small runs of studies, with arrays in a folder of their own."""
    os.environ["FISSILE_DATA"] = data  # for the processes too
    names = {STUDIES[one[0]].data(one[1], one[4]) for one in RUNS[device]} - {None}
    write(Path(data), names)
    names = {name for name in names if find(name)}
    with Store(folder) as store, lane_of(device) as lane:
        begin = {"start": sorted(started(device) for _ in range(3))[1], "reads": reads(names)}
        begin = {device: {name: round(value, 1) for name, value in begin.items()}}
        (Path(folder) / "begin.json").write_text(json.dumps(begin))
        for study, scale, trials, widths, changes in RUNS[device]:
            name = STUDIES[study].data(scale, changes)
            if name and find(name) is None:
                print(f"{study}: left out for want of {name}")
                continue
            works = bound(STUDIES[study].works(scale, trials, changes))
            works = [work for work in works if not widths or work.neurons in widths]
            mark = getattr(getattr(works[0], "task", None), "fingerprint", None)
            noted = changes | ({"fingerprint": mark} if mark else {})
            store.note_run(Run(study, scale, trials, noted, "benchmarks/cost_fill.py"))
            lane.networks = side_by_side(works, device)
            begin = time.perf_counter()
            tally = run(works, store, lanes=partial(list, [lane]))
            taken = time.perf_counter() - begin
            print(f"{study} {scale}: {tally.text()}, {taken:.1f} s", flush=True)


@contextmanager
def lane_of(device):
    """As many processes as there are cores, with one each; or this one, which has the GPU."""
    here, size = Provenance.here(device), BATCH[device]
    if device == "cuda":
        alone = SimpleNamespace(submit=partial(Here().submit, computed, device))
        yield Lane(alone, device, size=size, provenance=here)
        return
    cores = os.cpu_count()
    with pool(cores) as executor:
        own = replace(here, device=f"{machine_of(here.device)[0]}, 1 cores")
        each = SimpleNamespace(submit=partial(executor.submit, computed, device))
        yield Lane(each, "cpu", cores, size / 2, least=size / 16, provenance=own)


def computed(device, function, works, *rest):
    """Compute a batch; the time is that of its networks alone.

    Whatever a process does once is done before: compiling, reading the data. On one core it is the
    processor's time that counts, not what others do on this machine meanwhile.
    """
    prepare(device, getattr(getattr(works[0], "task", None), "data", None))
    if device == "cuda":
        return function(works, *rest)
    wall, busy = time.perf_counter(), time.process_time()
    found = function(works, *rest)
    share = (time.process_time() - busy) / (time.perf_counter() - wall)
    return [replace(one, seconds=min(1.0, share) * one.seconds) for one in found]


@lru_cache
def prepare(device, name):
    if device == "cpu":
        os.cpu_count = lambda: 1  # which decides how many threads a bank starts
    compute(TINY, device)
    if name is not None:
        fingerprint(name)


def reads(names):
    """The seconds that a GiB of data takes to be read and looked at."""
    begin = time.process_time()
    for name in names:
        fingerprint(name)
    return (time.process_time() - begin) / sum(data_bytes(Features(n)) / 2**30 for n in names)


def started(device):
    """The seconds until a new process has computed its first trial, a tiny one."""
    code = (
        "from fissile.lab.compute import compute; from fissile.lab.trial import *; "
        f"compute([Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1)], {device!r})"
    )
    wall, busy = time.perf_counter(), sum(os.times()[2:4])
    subprocess.run([sys.executable, "-c", code], check=True)
    alone = sum(os.times()[2:4]) - busy  # of the child: what others do here does not count
    return alone if device == "cpu" else time.perf_counter() - wall


def write(folder, names):
    """Clouds around random means for every set that is asked for."""
    for stem, inputs, classes, train, test in ARRAYS:
        if not any(stem.startswith(name) for name in names):
            continue
        rng, arrays = np.random.default_rng(0), {}
        means = rng.standard_normal((classes, inputs), dtype=np.float32)
        for part, count in (("train", train), ("test", test)):
            y = np.arange(count) % classes
            x = means[y] + rng.standard_normal((count, inputs), dtype=np.float32)
            arrays |= {f"x_{part}": x.astype(np.float16), f"y_{part}": y}
        (folder / stem).mkdir()
        for name, array in arrays.items():
            np.save(folder / stem / f"{name}.npy", array)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        fill(options.store, options.device, data)


if __name__ == "__main__":
    main()
