"""Running trials: what is missing is cut into batches, computed by an executor, and stored.

>>> tally = run(STUDIES["capacity"].works("quick"), store)
>>> tally.computed, tally.found

An executor is anything with the ``submit`` of :class:`concurrent.futures.Executor`; a batch is
computed by :func:`fissile.lab.compute.compute`, which depends on nothing but its arguments.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import ParamSpec, TypeVar

from fissile.errors import FissileError
from fissile.lab.compute import Outcome, compute
from fissile.lab.store import Provenance, Store
from fissile.lab.trial import Contender, Features, Images, Trial, Work
from fissile.vision.train import SIDE_BY_SIDE

__all__ = ["Here", "RunFailed", "Tally", "batches", "run"]

_log = logging.getLogger("fissile")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Flying = dict["Future[list[Outcome]]", list[Work]]

#: How much work goes into a batch, in estimated seconds on two cores: what ``kill -9`` may cost.
#: A GPU wants more networks side by side, and is done with them as soon.
_BATCH = {"cpu": 6.0, "cuda": 7.0}
_POLL = 0.5  # seconds between looks at trials that another process is computing


class Here(Executor):
    """Computes what it is given at once, in this thread, where Ctrl-C reaches it."""

    def submit(
        self,
        fn: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Result]:
        """Call the function and return its finished future."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class RunFailed(FissileError):
    """Some trials could not be computed; all others are stored."""


@dataclass
class Tally:
    """What a run did."""

    found: int = 0  # trials that were stored already
    computed: int = 0
    left: int = 0  # for want of time
    elsewhere: int = 0  # computed by another process meanwhile
    failed: dict[str, int] = field(default_factory=dict)  # trials by error message

    def text(self) -> str:
        """Say it in a line."""
        parts = [f"{self.computed:,} trials computed", f"{self.found:,} found in the store"]
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} computed by another process")
        if self.left:
            parts.append(f"{self.left:,} left for want of time")
        if self.failed:
            parts.append(f"{sum(self.failed.values()):,} failed")
        return ", ".join(parts)


class Watcher:
    """Is told how a run goes; this one does not care. See :mod:`fissile.lab.progress`."""

    def begin(self, trials: int, cost: float) -> None:
        """Hear how much is to be done."""

    def advance(self, trials: int, cost: float) -> None:
        """Hear what has been done."""

    def start(self, cost: float) -> None:
        """Hear how much the next batch is."""

    def within(self, share: float) -> None:
        """Hear which share of the batch in this process is done."""

    def idle(self, trials: int) -> None:
        """Hear that another process has the last trials."""


def run(
    works: Sequence[Work],
    store: Store,
    *,
    executor: Executor | None = None,
    device: str = "cpu",
    in_flight: int = 1,
    every: float | None = None,
    within: float | None = None,
    watcher: Watcher | None = None,
) -> Tally:
    """Compute the trials that the store does not hold, and store each batch as it is finished.

    Args:
        works: the trials; those that several studies share are computed once.
        store: where results go, and are found again.
        executor: who computes; by default this process.
        device: where networks are trained.
        in_flight: batches given to the executor at once.
        every: estimated seconds of work on two cores after which results are stored.
        within: seconds after which no batch is begun; first trials of all cells then come first.
        watcher: is told of the progress.

    Returns:
        A tally. Trials that cannot be computed do not stop the others; then RunFailed is raised.
    """
    works, watcher, tally = list(dict.fromkeys(works)), watcher or Watcher(), Tally()
    _check_bound(works)
    missing = _missing(works, store)
    if within is not None:
        missing.sort(key=lambda work: work.number)
    tally.found = len(works) - len(missing)
    watcher.begin(len(missing), sum(work.cost for work in missing))
    # Only a batch in this process can tell how far it is; elsewhere it must stand alone.
    runner = _Runner(store, executor or Here(), compute, device, in_flight, watcher, tally)
    if executor is None:
        runner.job = partial(compute, on_steps=watcher.within, on_outcomes=runner.keep)
    runner.until = inf if within is None else time.monotonic() + within
    size = _BATCH["cuda" if device.startswith("cuda") else "cpu"] if every is None else every
    try:
        runner.run(missing, size, _side_by_side(missing, device, alone=executor is None))
    except BrokenExecutor as error:
        raise RunFailed(
            f"a process that computes was killed, perhaps for want of memory ({error}); what is "
            "stored is kept: run again, with fewer jobs"
        ) from None
    finally:
        store.release(work.key for work in missing)
    if tally.failed:
        errors = "; ".join(f"{count} with: {text}" for text, count in tally.failed.items())
        raise RunFailed(f"{tally.text()} ({errors})")
    return tally


def _check_bound(works: Sequence[Work]) -> None:
    """Refuse trials that do not say which arrays they mean: results of others could be theirs."""
    for work in works:
        task = getattr(work, "task", None)
        if isinstance(task, Features | Images) and not task.fingerprint and not task.entry.make:
            raise FissileError(
                f"these trials name {task.data} without the fingerprint of its arrays; pass "
                "fissile.lab.classifier.bound(works)"
            )


def _side_by_side(works: Sequence[Work], device: str, *, alone: bool) -> int:
    """Return how many networks a batch needs to keep a device busy, however long they take."""
    if device.startswith("cuda") and any(isinstance(work, Contender) for work in works):
        return len(works)  # whatever sees the same data is one graph
    if any(isinstance(work, Trial) and isinstance(work.task, Images) for work in works):
        return SIDE_BY_SIDE if device.startswith("cuda") else 1
    return (os.cpu_count() or 1) if device == "cpu" and alone else 1


def _missing(works: Iterable[Work], store: Store) -> list[Work]:
    works = list(works)
    finished = store.finished(work.key for work in works)
    return [work for work in works if work.key not in finished]


class _Runner:
    def __init__(
        self,
        store: Store,
        executor: Executor,
        job: Callable[..., list[Outcome]],
        device: str,
        in_flight: int,
        watcher: Watcher,
        tally: Tally,
    ) -> None:
        self.store, self.executor, self.job, self.device = store, executor, job, device
        self.in_flight, self.watcher, self.tally = in_flight, watcher, tally
        self.provenance = Provenance.here(device)
        self.flying: Flying = {}
        self.pending: deque[list[Work]] = deque()
        self.until = inf
        self.kept: set[str] = set()  # stored while their batch was still at work

    def run(self, missing: Sequence[Work], size: float, networks: int) -> None:
        """Go on until every trial is stored, by us or by another process, or has failed."""
        cut = batches(missing, size, networks)
        if self.until < inf:  # the first trials of all studies first
            cut.sort(key=lambda batch: max(work.number for work in batch))
        elif self.in_flight > 1:  # the longest first, or one of them ends alone
            cut.sort(key=lambda batch: -sum(work.cost for work in batch))
        self.pending, taken = deque(cut), list[Work]()  # taken: another process is at it
        while self.pending or self.flying or taken:
            if time.monotonic() > self.until:
                self.tally.left += sum(map(len, self.pending)) + len(taken)
                self.pending, taken = deque(), []
            while self.pending and len(self.flying) < self.in_flight:
                self.watcher.start(sum(work.cost for work in self.pending[0]))
                taken += self._start(self.pending.popleft())
            if self.flying:
                self._land()
            elif taken and not self.pending:
                self.watcher.idle(len(taken))
                time.sleep(_POLL)
                left = batches(self._left(taken), size, networks)
                self.pending, taken = deque(left), []

    def _start(self, batch: list[Work]) -> list[Work]:
        """Submit what nobody else has stored or is computing; return what somebody is."""
        claimed = self.store.claim(work.key for work in batch)
        mine = [work for work in batch if work.key in claimed]
        for part in batches(mine, float("inf")):
            self.flying[self.executor.submit(self.job, part, self.device)] = part
        return self._left([work for work in batch if work.key not in claimed])

    def _left(self, works: list[Work]) -> list[Work]:
        """Count what another process has stored, and return the rest."""
        left = _missing(works, self.store)
        found = [work for work in works if work not in set(left)]
        mine = sum(work.key in self.kept for work in found)  # of a batch that failed later on
        self.tally.computed += mine
        self.tally.elsewhere += len(found) - mine
        self._advance(found)
        return left

    def keep(self, outcomes: list[Outcome]) -> None:
        """Store what is finished before the rest of its batch."""
        self.store.add(outcomes, self.provenance)
        self.kept |= {one.work.key for one in outcomes}

    def _land(self) -> None:
        done, _ = wait(self.flying, return_when=FIRST_COMPLETED)
        for future in done:
            batch = self.flying.pop(future)
            error = future.exception()
            if error is None:
                self.store.add(future.result(), self.provenance)
                self.tally.computed += len(batch)
                self._advance(batch)
            elif isinstance(error, BrokenExecutor):
                raise error
            else:
                self._failed(batch, error)

    def _failed(self, batch: list[Work], error: BaseException) -> None:
        """Try the networks of a batch one by one; count what fails even so."""
        alone = batches(batch, 0.0)
        if len(alone) > 1:
            self.store.release(work.key for work in batch)
            self.pending.extend(alone)
            return
        text = str(error) or type(error).__name__
        _log.warning("%d trials failed: %s", len(batch), text, exc_info=_surprise(error))
        self.tally.failed[text] = self.tally.failed.get(text, 0) + len(batch)
        self._advance(batch)

    def _advance(self, works: Sequence[Work]) -> None:
        self.store.release(work.key for work in works)
        self.watcher.advance(len(works), sum(work.cost for work in works))


def _surprise(error: BaseException) -> BaseException | None:
    """Return an error worth a traceback: one that is not ours."""
    return None if isinstance(error, FissileError) else error


def batches(works: Sequence[Work], cost: float, networks: int = 1) -> list[list[Work]]:
    """Cut trials into batches of about so many estimated seconds, to be computed side by side.

    >>> batches(STUDIES["codes"].works("smoke"), cost=8.0)

    The arms of a network stay together: they share its warm-up. A batch has at least so many
    networks, however long they take: on a processor, each keeps one core busy.
    """
    found: dict[Work, list[Work]] = {}
    for work in works:
        found.setdefault(work.network(), []).append(work)
    alike: dict[object, list[list[Work]]] = {}
    for network, arms in found.items():
        key = network.batch_key(), frozenset(getattr(work, "arm", None) for work in arms)
        alike.setdefault(key, []).append(arms)
    return [batch for group in alike.values() for batch in _cut(group, cost, networks)]


def _cut(group: Sequence[list[Work]], cost: float, networks: int) -> list[list[Work]]:
    found: list[list[Work]] = [[]]
    spent, count = 0.0, 0
    for arms in group:
        if found[-1] and spent >= cost and count >= networks:
            found.append([])
            spent, count = 0.0, 0
        found[-1] += arms
        spent += sum(work.cost for work in arms)
        count += 1
    return found
