"""What a Ray worker does with a batch."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from fissile._common.cores import keep_to
from fissile.lab.batching import Report
from fissile.lab.classifier import Arrays
from fissile.lab.store import Provenance

#: Cores that a task asks for, and keeps to.
CORES = 1
_here = lru_cache(Provenance.here)


def entry() -> Callable[..., object]:
    """Return what a worker calls first; as it is sent whole, it can report a missing fissile.

    It returns a report, or an explanation if the worker can not compute.
    """

    def fissile_batch(version: str, payload: bytes, arrays: object) -> object:
        import platform

        try:
            import fissile
        except ImportError as error:
            return f"the worker on {platform.node()} cannot import fissile ({error}); install it"
        if fissile.__version__ != version:
            return (
                f"the worker on {platform.node()} has fissile {fissile.__version__}, and this is "
                f"{version}; install the same version everywhere"
            )
        from fissile.lab.ray.workers import perform

        return perform(payload, arrays)  # type: ignore[arg-type]

    return fissile_batch


def perform(payload: bytes, arrays: Arrays | None = None) -> Report:
    """Compute a batch with the data set that it needs."""
    keep_to(CORES)  # other tasks have the others
    compute, works, device = pickle.loads(payload)
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(given_gpu())
    begin = time.perf_counter()
    outcomes = compute(works, device, **({} if arrays is None else {"arrays": arrays}))
    seconds = time.perf_counter() - begin
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Report(outcomes, _here(device), worker, seconds)


def given_gpu() -> int:
    """Return the index, among the GPUs that this process sees, of the one Ray gave to its task."""
    import ray

    given = [str(gpu) for gpu in ray.get_gpu_ids()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not given:
        return 0
    return visible.index(given[0]) if given[0] in visible else int(given[0])
