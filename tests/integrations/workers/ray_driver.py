"""A driver with trials that no study has; what became of them goes to standard output as JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import fissile
from fissile._common.cores import cores
from fissile.data.sets import Labelled
from fissile.lab import ray, run
from fissile.lab.compute import compute
from fissile.lab.ray import cluster, connected
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Arm, Boolean, Features, Trial

BOOLEAN = Boolean(train=64, test=64)
FEATURES = Features("cifar100-clip", fingerprint="0" * 16)


def tiny(task=BOOLEAN, **changes):
    return Trial(task, warm_up=1, fine_tune=1, **changes)


def somewhere(works, device):
    """Compute on a processor, whatever the device, and note which it was."""
    found = compute(works, "cpu")
    threads = __import__("torch").get_num_threads()
    for one in found:
        one.measures.update(gpu=device == "cuda", cores=cores(), threads=threads)
    return found


def deadly(works, device):
    """Kill the worker that has the trial with number 1."""
    if any(work.number == 1 for work in works):
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(works, device)


def arrays():
    rng = np.random.default_rng(0)
    x, x_test = (rng.standard_normal((n, 512)).astype(np.float32) for n in (256, 128))
    return Labelled(x, np.arange(256) % 100, x_test, np.arange(128) % 100)


def went(works, folder, device="cpu", jobs=1):
    """Run trials on the cluster, a network at a time; return what was said and what is stored."""
    with Store(folder) as store:
        try:
            with cluster(works, device=device, jobs=jobs, every=0.0) as backend:
                said = run.run(works, store, backend).text()
        except run.RunFailed as error:
            said = str(error)
        rows = store.rows([work.key for work in works])
        number = {work.key: work.number for work in works}
        return {"said": said, "stored": [(number[row.key], row.measures) for row in rows]}


def failing(folder):
    works = [tiny(number=0), tiny(number=1, arm=Arm("random", 200)), tiny(number=2)]
    return went(works, folder)


def dying(folder):
    ray.compute, run._RETRIES = deadly, 0
    try:
        return went([tiny(number=number) for number in range(3)], folder)
    finally:
        ray.compute = compute


def mixed(folder):
    ray.compute = somewhere
    try:
        return went([tiny(number=n) for n in range(6)], folder, device=None, jobs=3)
    finally:
        ray.compute = compute


def data(folder):
    """Train on arrays that no file holds; count how often they are loaded for the object store."""
    puts = []
    ray.load = lambda task: (puts.append(task.data), arrays())[1]
    found = went([tiny(FEATURES, number=number) for number in range(4)], folder)
    return found | {"puts": puts}


def mismatched(folder):
    version, fissile.__version__ = fissile.__version__, "9.9"
    try:
        return went([tiny()], folder)
    finally:
        fissile.__version__ = version


def lost(folder):
    ray._LOOK = ray._SILENCE = 0.5
    return went(STUDIES["theory"].works("paper", None, {"networks": 400}), folder)


def main(address, folder):
    found = {}
    with connected(address):
        for scene in (failing, dying, mixed, data, mismatched, lost):
            found[scene.__name__] = scene(folder / scene.__name__)
        print(json.dumps(found), flush=True)
        os._exit(0)  # Ray would wait some seconds for the cluster that is gone


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
