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
    """Return what a worker calls first: it travels whole, and so needs nothing to be there.

    Called, it answers with a report, or with words if the worker is not fit to compute.
    """

    def fissile_batch(version: str, payload: bytes, held: object) -> object:
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

        return perform(payload, held)  # type: ignore[arg-type]

    return fissile_batch


def perform(payload: bytes, held: Arrays | None = None) -> Report:
    """Compute a batch; ``held`` is the data set that it needs."""
    keep_to(CORES)  # other tasks have the others
    compute, works, device = pickle.loads(payload)
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(given_gpu())
    begin = time.perf_counter()
    outcomes = compute(works, device, **({} if held is None else {"arrays": held}))
    seconds = time.perf_counter() - begin
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Report(outcomes, _here(device), worker, seconds)


def given_gpu() -> int:
    """Return which of the GPUs that this process sees Ray has given to its task."""
    import ray

    given = [str(one) for one in ray.get_gpu_ids()]
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not given:
        return 0
    return seen.index(given[0]) if given[0] in seen else int(given[0])
