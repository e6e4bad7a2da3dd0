"""Batches: how trials are cut into them, and where they are computed on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

from fissile._common.cores import keep_to
from fissile._common.errors import FissileError
from fissile.lab.compute import OnSteps, TrialResult, compute
from fissile.lab.store import Provenance
from fissile.lab.trial import Contender, Images, Text, Trial, Work

#: How much work goes into a batch, in estimated seconds on two cores: what ``kill -9`` may cost.
#: A GPU wants more networks side by side, and is done with them as soon.
BATCH = {"cpu": 6.0, "cuda": 7.0}


class Unit(NamedTuple):
    """The trials of one network, which stay together: its arms share a warm-up."""

    works: list[Work]
    cost: float  # estimated seconds on two cores
    number: int


class Batch(NamedTuple):
    """Trials that are computed together, on a device."""

    works: list[Work]
    device: str


class Pending:
    """Trials that wait, in groups that can be computed together; the lowest ``rank`` is first."""

    def __init__(
        self, works: Iterable[Work] = (), rank: Callable[[Unit], float] = lambda unit: 0.0
    ) -> None:
        self._rank = rank
        self._groups: list[deque[Unit]] = []
        self._last: list[deque[Unit]] = []  # units that are computed by themselves
        self.cost = 0.0  # estimated seconds of all units on two cores
        self.add(works)

    def __bool__(self) -> bool:
        return bool(self._groups or self._last)

    def add(self, works: Iterable[Work]) -> None:
        """Add trials, which are cut into batches as workers want them."""
        for units in _alike(works):
            self._groups.append(deque(sorted(units, key=self._rank)))
            self.cost += sum(unit.cost for unit in units)

    def add_alone(self, works: Iterable[Work]) -> None:
        """Put trials back, to be computed last and network by network."""
        for units in _alike(works):
            self._last += [deque([unit]) for unit in units]
            self.cost += sum(unit.cost for unit in units)

    def clear(self) -> list[Work]:
        """Take everything out."""
        works = list[Work]()
        while self:
            works += self.take(inf)
        return works

    def take(self, cost: float, networks: Callable[[Work], float] = lambda work: 1) -> list[Work]:
        """Take out a batch of about this cost, with at least ``networks(its first trial)``."""
        groups = self._groups or self._last
        group = min(groups, key=lambda units: self._rank(units[0]))
        least, spent, units = networks(group[0].works[0]), 0.0, list[Unit]()
        while group and (not units or spent < cost or len(units) < least):
            units.append(group.popleft())
            spent += units[-1].cost
        self.cost -= spent
        if not group:
            groups.remove(group)
        return [work for unit in units for work in unit.works]


def _alike(works: Iterable[Work]) -> list[list[Unit]]:
    """Group trials by network, and networks by what lets them be trained side by side."""
    networks: dict[Work, list[Work]] = {}
    for work in works:
        networks.setdefault(work.network(), []).append(work)
    alike: dict[object, list[Unit]] = {}
    for network, arms in networks.items():
        key = network.batch_key(), frozenset(getattr(work, "arm", None) for work in arms)
        unit = Unit(arms, sum(work.cost for work in arms), max(work.number for work in arms))
        alike.setdefault(key, []).append(unit)
    return list(alike.values())


def batches(works: Sequence[Work], cost: float, networks: int = 1) -> list[list[Work]]:
    """Cut trials into batches of about this cost, to be computed side by side.

    The arms of a network stay together: they share its warm-up. A batch has at least this number
    of networks, however long they take: on a processor, each keeps one core busy.
    """
    pending, cut = Pending(works), list[list[Work]]()
    while pending:
        cut.append(pending.take(cost, lambda work: networks))
    return cut


def least_networks(work: Work, device: str, cores: int = 1, contenders: float = inf) -> float:
    """Return the least number of networks in a trial's batch that keeps a device busy.

    Contenders of the same data are one graph on a GPU: ``contenders`` is a worker's share of them.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu and isinstance(work, Contender):
        return contenders
    if on_gpu and isinstance(getattr(work, "task", None), Text):
        return inf  # all seeds of a shape are one stack
    if isinstance(work, Trial) and isinstance(work.task, Images):
        from fissile.bank.vision.train import SIDE_BY_SIDE

        return SIDE_BY_SIDE if on_gpu else 1
    return 1 if on_gpu else cores


class Lost(Exception):
    """The worker that had a batch has died, and the batch may be tried again."""


class Halt(FissileError):
    """Nothing can be computed any more; the message says why."""


@dataclass(frozen=True)
class Report:
    """The results of a batch, and who computed it."""

    outcomes: list[TrialResult]
    provenance: Provenance
    worker: str = ""
    seconds: float = 0.0


OnReport = Callable[[Report], None]


class Backend(Protocol):
    """What a run needs of the workers that compute it, here or on a cluster."""

    @property
    def slots(self) -> int:
        """How many batches are computed at once."""

    def cut(self, pending: Pending) -> Batch | None:
        """Take a batch for a free slot; return None if no slot is free or nothing is pending."""

    def submit(self, batch: Batch, on_steps: OnSteps, on_report: OnReport) -> Future[Any]:
        """Begin to compute a batch; in this process it reports its progress and first results."""

    def result(self, future: Future[Any]) -> Report:
        """Return the report of a batch, or raise its error.

        After ``Lost`` or ``CancelledError`` the batch may be computed again; after ``Halt`` or
        ``BrokenExecutor`` nothing can be.
        """


class Local:
    """Computes on this machine: in this process, where Ctrl-C reaches it, or with an executor.

    >>> run(works, store, Local("cuda"))

    Args:
        device: where networks are trained.
        executor: anything with the ``submit`` of :class:`concurrent.futures.Executor`.
        slots: batches that the executor is given at once.
        every: estimated seconds of work on two cores after which results are stored.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        executor: Executor | None = None,
        slots: int = 1,
        every: float | None = None,
    ) -> None:
        self.device, self.executor, self.slots = device, executor, slots
        usual = BATCH["cuda" if device.startswith("cuda") else "cpu"]
        self.size = usual if every is None else every
        self._cores = (os.cpu_count() or 1) if executor is None else 1
        self._busy = 0

    @cached_property
    def _provenance(self) -> Provenance:
        return Provenance.here(self.device)

    def cut(self, pending: Pending) -> Batch | None:
        """Take a batch of about the size that is stored at once."""
        if not pending or self._busy >= self.slots:
            return None
        works = pending.take(self.size, lambda work: least_networks(work, self.device, self._cores))
        return Batch(works, self.device)

    def submit(self, batch: Batch, on_steps: OnSteps, on_report: OnReport) -> Future[Any]:
        """Hand a batch to the executor, or compute it at once."""
        self._busy += 1
        if self.executor is not None:
            with _deaf_to_ctrl_c():
                return self.executor.submit(compute, *batch)
        future: Future[Any] = Future()

        def on_outcomes(outcomes: list[TrialResult]) -> None:
            on_report(Report(outcomes, self._provenance))

        try:
            future.set_result(compute(*batch, on_steps, on_outcomes))
        except Exception as error:
            future.set_exception(error)
        return future

    def result(self, future: Future[Any]) -> Report:
        """Return the results with the provenance of this machine."""
        self._busy -= 1
        return Report(future.result(), self._provenance)


def default_jobs(device: str, works: Sequence[Work] = (), cores: int | None = None) -> int:
    """Return how many processes suit a device beside this number of cores, by default all.

    One process leaves a GPU idle, as small networks wait for launches, compilations and measures;
    of convolutional networks and GPTs it fills the GPU. On a processor a bank takes all cores by
    itself.
    """
    if any(isinstance(getattr(work, "task", None), Images | Text) for work in works):
        return 1
    cores = os.cpu_count() or 1 if cores is None else cores
    return max(1, min(8, cores // 2)) if device.startswith("cuda") else 1


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Keep processes for batches; whatever ends this process ends them too.

    >>> with pool(4) as executor:
    ...     run(works, store, Local(executor=executor, slots=4))
    """
    executor = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would not survive CUDA
        initializer=_begin,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()  # nobody waits for a batch whose run has ended
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back; processes that a pool starts meanwhile never see it: it is the parent's."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int) -> None:
    """Prepare a process: its share of the cores, and an end with its parent's."""

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)  # it was killed and could not say goodbye

    keep_to(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=follow_parent, daemon=True).start()
