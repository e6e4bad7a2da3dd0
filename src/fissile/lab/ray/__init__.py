"""The lab on a Ray cluster: the same trials, into the same store, under the same keys.

Workers need an installed fissile of the driver's version and nothing else: trials and data sets
come to them, results go back, and only the driver sees the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor, inf, prod
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

import fissile
from fissile._common.errors import FissileError
from fissile.lab.batching import (
    BATCH,
    Batch,
    Halt,
    Lost,
    Pending,
    Report,
    default_jobs,
    least_networks,
)
from fissile.lab.classifier import Arrays, load
from fissile.lab.compute import compute
from fissile.lab.ray.connect import answers, connected
from fissile.lab.ray.workers import CORES, entry
from fissile.lab.trial import (
    Boolean,
    Contender,
    Features,
    FunctionTrial,
    Images,
    Sampling,
    Text,
    Work,
)

_log = logging.getLogger("fissile")

#: Bytes of a process that trains: Python, PyTorch, compiled kernels, a batch of networks.
PROCESS = 1 << 30
#: Seconds that a cluster may be without workers: a machine that is started on demand takes minutes.
PATIENCE = 300.0
_LOOK = 2.0  # seconds between looks at the cluster
_WORDS = 300  # characters of what Ray has to say
_SILENCE = 20.0  # seconds that it may be silent
#: A process sees all GPUs of its machine, and takes the one it is given. Ray would show it one, and
#: another with the next batch, but CUDA looks only once.
_ALL_SEEN = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
#: What goes into a batch, in estimated seconds on two cores, of which a worker has one.
_BATCH = {"cuda": BATCH["cuda"], "cpu": BATCH["cpu"] * CORES / 2}


class Node(NamedTuple):
    """What a machine of the cluster has."""

    cpus: int
    gpus: int
    memory: float  # in bytes


class Shares(NamedTuple):
    """How many workers of each kind a cluster has."""

    cpus: int
    gpus: int
    per_gpu: int  # workers that share one


def nodes_of(described: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes that are alive, of those that ``ray.nodes()`` describes."""
    alive = [node.get("Resources", {}) for node in described if node["Alive"]]
    return [
        Node(int(has.get("CPU", 0)), int(has.get("GPU", 0)), float(has.get("memory", inf)))
        for has in alive
    ]


def shares_of(nodes: Sequence[Node], works: Sequence[Work], device: str | None) -> Shares:
    """Count the workers: several for a GPU, each with a core; other cores work by themselves."""
    with_gpu = [node for node in nodes if node.gpus and device != "cpu"]
    jobs = [default_jobs("cuda", works, cores=node.cpus // node.gpus) for node in with_gpu]
    per_gpu = min(jobs, default=1)
    cpus = gpus = 0
    for node in nodes:
        on_gpu = min(node.cpus, per_gpu * node.gpus) if device != "cpu" else 0
        gpus += on_gpu
        if device != "cuda":
            cpus += int(min(node.cpus - on_gpu, node.memory // PROCESS))
    return Shares(cpus, gpus, per_gpu)


def memory_of(work: Work) -> int:
    """Return the bytes that a worker needs: a process that trains, and the trial's data set."""
    if isinstance(work, Sampling | FunctionTrial) or isinstance(work.task, Boolean):
        return PROCESS
    entry = work.task.entry
    samples = (entry.train or 1_280 * entry.classes) + (entry.test or 0)
    return PROCESS + samples * (4 * prod(entry.shape) + 8)


@dataclass
class _Task:
    """A batch that the cluster has."""

    reference: Any
    device: str
    memory: float
    recalled: bool = False


class RayBackend:
    """The workers of the cluster that is connected; ``wait`` says that some may still come."""

    def __init__(
        self,
        works: Sequence[Work],
        home: str = "",
        *,
        device: str | None = None,
        jobs: int | None = None,
        every: float | None = None,
        wait: bool = False,
    ) -> None:
        import ray

        self._works, self._home, self._device = works, home, device
        self._most = inf if jobs is None else jobs
        self._cells = len({work.network() for work in works if isinstance(work, Contender)})
        self._remote = ray.remote(entry())
        self._sizes = _BATCH if every is None else dict.fromkeys(_BATCH, every)
        self._slots = dict.fromkeys(_BATCH, 0)  # batches at once, for each device
        self._contenders = inf  # networks of a batch on a GPU, at least, where they are contenders
        self._tasks: dict[Future[Any], _Task] = {}
        self._data: dict[tuple[str, str], Any] = {}  # data sets in the cluster's object store
        self._gpus = 1.0  # what a batch takes of one
        self._largest = inf  # the memory of the largest node
        self._looked = self._heard = self._manned = time.monotonic()
        self._look()
        self._asked = not self.slots  # for machines, at the autoscaler
        if self._asked:
            lacks = f"no node of the cluster has {'a GPU' if device == 'cuda' else 'a core'} for us"
            if not wait:
                raise FissileError(f"{lacks}; add one that has, or ask for another device")
            _log.warning(f"{lacks}: waiting for workers ({PATIENCE:.0f} s) ...")
            # As many as are worth the minutes that they take to come.
            worth = max(1, ceil(sum(work.cost for work in works) / PATIENCE))
            _ask(int(min(worth, self._most)), device)

    @property
    def slots(self) -> int:
        """How many batches the cluster has at once."""
        return sum(self._slots.values())

    def cut(self, pending: Pending) -> Batch | None:
        """Take a batch for a free worker, first for a GPU; the last batches are smaller."""
        self._look_again()
        if not pending:
            return None
        for device, size in self._sizes.items():
            if sum(task.device == device for task in self._tasks.values()) < self._slots[device]:
                share = pending.cost / (2 * self.slots)
                networks = partial(least_networks, device=device, contenders=self._contenders)
                return Batch(pending.take(min(size, max(size / 8, share)), networks), device)
        return None

    def submit(self, batch: Batch, *_: object) -> Future[Any]:
        """Let a worker compute a batch; Ray decides which one, and when."""
        import ray

        works, device = batch
        memory = min(memory_of(works[0]), self._largest)
        gpu = {"num_gpus": self._gpus, "runtime_env": _ALL_SEEN} if device == "cuda" else {}
        # A run counts itself how often a batch has lost its worker.
        options = {"num_cpus": CORES, "num_gpus": 0, "memory": int(memory), "max_retries": 0, **gpu}
        payload = ray.cloudpickle.dumps((compute, works, device))  # type: ignore[no-untyped-call]
        future: Future[Any] = Future()
        try:
            task = self._remote.options(**options)
            reference = task.remote(fissile.__version__, payload, self._arrays(works))
        except FissileError as error:  # the data set is not what it was
            future.set_exception(error)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise Halt(f"the cluster takes no batch: {shorten(str(error), _WORDS)}") from None
        else:
            future = reference.future()
            self._tasks[future] = _Task(reference, device, memory)
        return future

    def result(self, future: Future[Any]) -> Report:
        """Return a worker's report, or raise what has become of its batch."""
        task = self._tasks.pop(future, None)
        try:
            report: Report | str = future.result()
        except Exception as error:
            if task is not None and task.recalled:
                raise CancelledError from None
            raise self._meant(error) from None
        if isinstance(report, str):
            raise Halt(report)
        return report

    def dismiss(self) -> None:
        """Call back every batch that is still out, and every machine that was asked for."""
        self._recall(self._tasks.values())
        if self._asked and (not self._home or answers(self._home)):
            _ask(0, self._device)

    def _arrays(self, works: list[Work]) -> Any:
        """Return where the data set of a batch is in the cluster, or None if it needs none."""
        import ray

        task = getattr(works[0], "task", None)
        if not isinstance(task, Features | Images | Text):
            return None
        key = task.data, task.fingerprint
        if key not in self._data:
            samples = load(task)
            # As plain arrays, also where they are mapped from a file: a machine has them once,
            # however many of its workers read them.
            whole = replace(samples, x=np.asarray(samples.x), x_test=np.asarray(samples.x_test))
            arrays = Arrays(task.data, whole, task.fingerprint or samples.fingerprint())
            self._data[key] = ray.put(arrays)
        return self._data[key]

    def _meant(self, error: Exception) -> Exception:
        """Return a task's own error, or that its worker was lost."""
        from ray.exceptions import RayError, RayTaskError

        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RayError):
                self._data.clear()  # the machine that had it may be gone
                return Lost(f"its data was lost: {shorten(str(error.cause), _WORDS)}")
            return error.cause if isinstance(error.cause, Exception) else FissileError(str(error))
        if isinstance(error, RayError):
            return Lost(f"its worker died: {shorten(str(error), _WORDS)}")
        return error

    def _recall(self, tasks: Iterable[_Task]) -> None:
        import ray

        for task in tasks:
            task.recalled = True
            with suppress(Exception):  # the cluster may be gone
                ray.cancel(task.reference, force=True)

    def _look_again(self) -> None:
        """Look at the cluster every few seconds; give up where it stays without workers."""
        now = time.monotonic()
        if now > self._looked + _LOOK:
            self._looked = now
            if not self._home or answers(self._home):
                self._heard = now
                self._look()
            elif now > self._heard + _SILENCE:
                raise Halt(f"the cluster at {self._home} does not answer any more")
        if self.slots:
            self._manned = now
        elif now > self._manned + PATIENCE:
            raise Halt(f"the cluster has had no worker for {PATIENCE:.0f} seconds")

    def _look(self) -> None:
        nodes = _nodes()
        cpus, gpus, per_gpu = shares_of(nodes, self._works, self._device)
        # One batch more than there are workers lies ready for whoever is done first.
        on_gpu = int(min(gpus + (gpus > 0), self._most))
        on_cpu = int(min(cpus + (cpus > 0), self._most - on_gpu))
        self._slots = {"cuda": on_gpu, "cpu": on_cpu}
        self._contenders = ceil(self._cells / max(1, gpus))
        self._gpus = floor(1e4 / per_gpu) / 1e4  # as finely as Ray counts
        self._largest = max((node.memory for node in nodes if node.cpus), default=inf)
        gone = [kind for kind, count in (("cuda", gpus), ("cpu", cpus)) if not count]
        self._recall(
            task
            for task in self._tasks.values()
            if not task.recalled and (task.device in gone or task.memory > self._largest)
        )


def _ask(workers: int, device: str | None) -> None:
    """Ask the cluster's autoscaler, if it has one, for machines for this many workers."""
    worker = {"CPU": CORES, "GPU": 1} if device == "cuda" else {"CPU": CORES}
    with suppress(Exception):  # it is a favour
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=workers * [worker])


def _nodes() -> list[Node]:
    import ray

    try:
        return nodes_of(ray.nodes())  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever Ray says where nobody is any more
        raise Halt(f"the cluster does not answer any more ({shorten(str(error), 200)})") from None


@contextmanager
def cluster(
    works: Sequence[Work],
    *,
    address: str | None = None,
    device: str | None = None,
    jobs: int | None = None,
    every: float | None = None,
) -> Iterator[RayBackend]:
    """Join a cluster, or start one here, for as long as these trials take (needs ray).

    >>> with cluster(works) as backend:
    ...     run(works, store, backend)

    If a cluster that is joined has no worker yet, its autoscaler is asked for some. ``device``
    chooses workers with or without a GPU. At most ``jobs`` batches are in flight, each of ``every``
    estimated seconds of work on two cores.
    """
    with connected(address) as home:
        backend = RayBackend(
            works, home.address, device=device, jobs=jobs, every=every, wait=not home.own
        )
        try:
            yield backend
        finally:
            backend.dismiss()
