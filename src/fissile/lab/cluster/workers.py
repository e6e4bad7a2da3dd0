"""An executor on a Ray cluster: batches become tasks, and what Ray reports becomes futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from math import inf
from textwrap import shorten
from typing import Any
from weakref import WeakSet

import numpy as np

import fissile
from fissile.errors import FissileError
from fissile.lab.classifier import load
from fissile.lab.cluster.task import CORES, entry
from fissile.lab.lanes import Halt, Lost, Report, memory_of
from fissile.lab.trial import Features, Images, Work

__all__ = ["BASE", "Depot", "Workers"]

#: Bytes that a worker takes before it has seen a network.
BASE = 600 << 20
_WORDS = 300  # characters of what Ray has to say


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

    def _put(self, task: Features | Images) -> Any:
        import ray

        found = load(task)
        # As plain arrays, also where they are mapped from a file: workers read them in place.
        whole = replace(found, x=np.asarray(found.x), x_test=np.asarray(found.x_test))
        return ray.put((task.data, whole, task.fingerprint or found.fingerprint()))


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
        try:
            held = self._depot.reference(works)
        except FissileError as error:  # the data set is not what it was
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        on_chip = device.startswith("cuda")
        need = BASE + (0 if on_chip else memory_of(works))
        task = self._task.options(
            num_cpus=CORES,
            num_gpus=self.gpus if on_chip else 0,
            memory=int(min(need, self.largest)),
            max_retries=0,  # a run counts itself how often a batch has lost its worker
        )
        payload = ray.cloudpickle.dumps((fn, works, device))  # type: ignore[no-untyped-call]
        promise = _Promise(task.remote(fissile.__version__, payload, held))
        promise.add_done_callback(self._learn)
        self._flying.add(promise)
        return promise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Call back what is still out, running or not."""
        for promise in list(self._flying):
            if not promise.done():
                promise.cancel()

    def _learn(self, promise: Future[Any]) -> None:
        if promise.exception() is None and promise.result().room:
            self.room = min(self.room or promise.result().room, promise.result().room)


class _Promise(Future[Report]):
    """A report that a worker will make."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self._reference = reference
        reference.future().add_done_callback(self._settle)

    def cancel(self) -> bool:
        """End the task, wherever it is; it will be lost like one whose worker died."""
        import ray

        with suppress(Exception):  # the cluster may be gone
            ray.cancel(self._reference, force=True)
        return True

    def _settle(self, told: Future[Any]) -> None:
        error = told.exception()
        if error is not None:
            self.set_exception(_meant(error))
        elif isinstance(told.result(), str):
            self.set_exception(Halt(told.result()))
        else:
            self.set_result(told.result())


def _meant(error: BaseException) -> BaseException:
    """Return a task's own error, or that its worker was lost."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else FissileError(str(error))
    if isinstance(error, RayError):
        return Lost(f"its worker died: {shorten(str(error), _WORDS)}")
    return error
