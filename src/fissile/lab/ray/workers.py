"""What a Ray worker does with a batch, and an executor that turns batches into Ray's tasks."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import inf
from textwrap import shorten
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

import fissile
from fissile._common.cores import keep_to
from fissile._common.errors import FissileError
from fissile.lab.batching import (
    Halt,
    Lost,
    Recalled,
    Report,
    data_bytes,
    memory_of,
    process_bytes,
)
from fissile.lab.classifier import Arrays, load
from fissile.lab.store import Provenance
from fissile.lab.trial import Features, Images, Work

__all__ = ["CORES", "Depot", "Workers", "entry", "given_gpu", "perform"]


#: Cores that a task asks for, and keeps to.
CORES = 1


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
    """Compute a batch; ``held`` is the data set that it needs.

    >>> perform(pickle.dumps((compute, [Trial(warm_up=1, fine_tune=1)], "cpu"))).outcomes
    """
    keep_to(CORES)  # other tasks have the others
    compute, works, device = pickle.loads(payload)
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(given_gpu())
    begin = time.perf_counter()
    outcomes = compute(works, device, **({} if held is None else {"arrays": held}))
    seconds = time.perf_counter() - begin
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Report(outcomes, _here(device), worker, seconds, _room(device))


def given_gpu() -> int:
    """Return which of the GPUs that this process sees Ray has given to its task.

    >>> given_gpu()
    0
    """
    import ray

    given = [str(one) for one in ray.get_gpu_ids()]
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not given:
        return 0
    return seen.index(given[0]) if given[0] in seen else int(given[0])


@lru_cache
def _here(device: str) -> Provenance:
    return Provenance.here(device)


def _room(device: str) -> int:
    """Return the bytes of a GPU's memory."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


_WORDS = 300  # characters of what Ray has to say


#: A process sees all GPUs of its machine, and takes the one it is given (see ``task``): by itself
#: Ray would show it one, which CUDA looks at only once, and another with the next batch.
_ALL_SEEN = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


class _DataLost(Lost):
    """The data set did not come to a worker."""


class Depot:
    """Data sets in the cluster's object store: each is put there once, and comes to a node once."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Any] = {}

    def reference(self, works: list[Work]) -> Any:
        """Return where the data set of a batch is, or nothing if it needs none."""
        task = getattr(works[0], "task", None)
        if not isinstance(task, Features | Images):
            return None
        key = task.data, task.fingerprint
        if key not in self._held:
            self._held[key] = self._put(task)
        return self._held[key]

    def forget(self) -> None:
        """Put everything anew when it is asked for next: the machine that had it may be gone."""
        self._held.clear()

    def _put(self, task: Features | Images) -> Any:
        import ray

        found = load(task)
        # As plain arrays, also where they are mapped from a file: a machine has them once, however
        # many of its workers read them.
        whole = replace(found, x=np.asarray(found.x), x_test=np.asarray(found.x_test))
        return ray.put(Arrays(task.data, whole, task.fingerprint or found.fingerprint()))


def _need(works: list[Work], device: str) -> int:
    """Estimate the bytes that a worker takes of its machine's memory."""
    held = data_bytes(works[0]) if device.startswith("cuda") else memory_of(works)
    return process_bytes(works) + held


def _failed(error: Exception) -> Future[Any]:
    """Return a future that has come to an error already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Workers(Executor):
    """Workers of one kind; Ray decides which of them computes a batch, and when.

    >>> Workers(Depot()).submit(compute, works, "cpu")
    """

    def __init__(self, depot: Depot) -> None:
        import ray

        self._depot = depot
        self._task = ray.remote(entry())
        self._flying: WeakSet[_Promise] = WeakSet()
        self.gpus = 1.0  # what a batch takes of one
        self.largest: float = inf  # the memory of the largest node
        self.room = 0  # bytes on a worker's device, once one has told

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call ``fn(works, device)``; the future comes to a report."""
        import ray

        works, device = args
        on_chip, memory = device.startswith("cuda"), min(_need(works, device), self.largest)
        task = self._task.options(
            num_cpus=CORES,
            num_gpus=self.gpus if on_chip else 0,
            memory=int(memory),
            max_retries=0,  # a run counts itself how often a batch has lost its worker
            **({"runtime_env": _ALL_SEEN} if on_chip else {}),
        )
        payload = ray.cloudpickle.dumps((fn, works, device))  # type: ignore[no-untyped-call]
        try:
            held = self._depot.reference(works)
            promise = _Promise(task.remote(fissile.__version__, payload, held), memory)
        except FissileError as error:  # the data set is not what it was
            return _failed(error)
        except (ray.exceptions.RayError, ConnectionError) as error:
            return _failed(Halt(f"the cluster takes no batch: {shorten(str(error), _WORDS)}"))
        promise.add_done_callback(self._learn)
        self._flying.add(promise)
        return promise

    def fit(self, largest: float) -> None:
        """Hear how much memory the largest node has; call back what would wait for ever."""
        self.largest = largest
        for promise in list(self._flying):
            if not promise.done() and promise.memory > largest:
                promise.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Call back what is still out, running or not."""
        for promise in list(self._flying):
            if not promise.done():
                promise.cancel()

    def _learn(self, promise: Future[Any]) -> None:
        if isinstance(promise.exception(), _DataLost):
            self._depot.forget()
        if promise.exception() is None and promise.result().room:
            self.room = min(self.room or promise.result().room, promise.result().room)


class _Promise(Future[Report]):
    """A report that a worker will make."""

    def __init__(self, reference: Any, memory: float) -> None:
        super().__init__()
        self._reference, self.memory, self._recalled = reference, memory, False
        reference.future().add_done_callback(self._settle)

    def cancel(self) -> bool:
        """End the task, wherever it is."""
        import ray

        self._recalled = True
        with suppress(Exception):  # the cluster may be gone
            ray.cancel(self._reference, force=True)
        return True

    def _settle(self, told: Future[Any]) -> None:
        error = told.exception()
        if error is not None:
            self.set_exception(Recalled("it was called back") if self._recalled else _meant(error))
        elif isinstance(told.result(), str):
            self.set_exception(Halt(told.result()))
        else:
            self.set_result(told.result())


def _meant(error: BaseException) -> BaseException:
    """Return a task's own error, or that its worker was lost."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RayError):
            return _DataLost(f"its data was lost: {shorten(str(cause), _WORDS)}")
        return cause if isinstance(cause, Exception) else FissileError(str(error))
    if isinstance(error, RayError):
        return Lost(f"its worker died: {shorten(str(error), _WORDS)}")
    return error
