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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import TracebackType
from typing import Any

from fissile._common.errors import FissileError
from fissile._common.progress import ProgressBar
from fissile.lab.batching import (
    BATCH,
    Halt,
    Here,
    Lane,
    Lanes,
    Lost,
    Pending,
    Recalled,
    Report,
    Unit,
    batches,
    side_by_side,
)
from fissile.lab.compute import TrialResult, compute
from fissile.lab.store import Provenance, Store
from fissile.lab.trial import Features, Images, Work

__all__ = ["Bar", "RunFailed", "Tally", "Watcher", "run"]


@dataclass
class Tally:
    """What a run did.

    >>> run(works, store).text()
    '12 trials computed, 0 found in the store'
    """

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
    """Is called as a run goes on; this one does nothing."""

    def begin(self, trials: int, cost: float) -> None:
        """Take how much is to be done."""

    def advance(self, trials: int, cost: float) -> None:
        """Take what has been done."""

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Take what one of several workers has done, and how long it took."""

    def start(self, cost: float) -> None:
        """Take the cost of the next batch."""

    def within(self, share: float) -> None:
        """Take the share of the batch in this process that is done."""

    def idle(self, trials: int) -> None:
        """Take how many trials another process has; they are the last."""


class Bar(Watcher):
    """Shows in the terminal how much of a run is done.

    >>> with Bar() as bar:
    ...     run(works, store, watcher=bar)

    The time that is left follows the cost of the trials, not their number. Each worker of a cluster
    has a line of its own.
    """

    _SHOWN = 8  # workers that have a line

    def __enter__(self) -> Bar:
        self._workers: dict[str, tuple[int, float]] = {}  # trials and seconds of each
        self._batch = 0.0
        self._bar = ProgressBar("training", "trials", self._lines)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def _lines(self) -> list[str]:
        lines = [
            f"  {worker}: {trials:,} trials, {trials / max(seconds, 1e-9):,.3g} a second"
            for worker, (trials, seconds) in list(self._workers.items())[: self._SHOWN]
        ]
        more = len(self._workers) - self._SHOWN
        return [*lines, f"  and {more} more"] if more > 0 else lines

    def begin(self, trials: int, cost: float) -> None:
        self._bar.start(trials, work=cost)

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        before, taken = self._workers.get(worker, (0, 0.0))
        self._workers[worker] = before + trials, taken + seconds

    def start(self, cost: float) -> None:
        self._batch = cost

    def within(self, share: float) -> None:
        self._bar.refresh(ahead=share * self._batch)

    def advance(self, trials: int, cost: float) -> None:
        self._bar.task = "training"
        self._bar.advance(trials, work=cost)

    def idle(self, trials: int) -> None:
        self._bar.task = f"another process has the last {trials}"
        self._bar.refresh()


_log = logging.getLogger("fissile")

_POLL = 0.5  # seconds between looks at what other processes and workers are doing
_RETRIES = 3  # for a batch whose worker has died


class RunFailed(FissileError):
    """Some trials could not be computed; all others are stored."""


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
    lanes: Lanes | None = None,
) -> Tally:
    """Compute the trials that the store does not hold, and store each batch as it is finished.

    >>> run(works, store, device="cuda", within=600)

    Args:
        works: the trials; those that several studies share are computed once.
        store: where results go, and are found again.
        executor: who computes; by default this process.
        device: where networks are trained.
        in_flight: batches given to the executor at once.
        every: estimated seconds of work on two cores after which results are stored.
        within: seconds after which no batch is begun; first trials of all cells then come first.
        watcher: is told of the progress.
        lanes: several kinds of workers, in place of the executor, its device and its batches;
            see :mod:`fissile.lab.ray`.

    Returns:
        A tally. Trials that cannot be computed do not stop the others; then RunFailed is raised.
    """
    works, watcher, tally = list(dict.fromkeys(works)), watcher or Watcher(), Tally()
    _check_bound(works)
    missing = store.missing(works)
    if within is not None:
        missing.sort(key=lambda work: work.number)
    tally.found = len(works) - len(missing)
    watcher.begin(len(missing), sum(work.cost for work in missing))
    runner = _Runner(store, watcher, tally)
    runner.until = inf if within is None else time.monotonic() + within
    if lanes is None:
        lanes = partial(list, [_lane(missing, executor, device, in_flight, every)])
    try:
        runner.run(missing, lanes)
    except BrokenExecutor as error:
        raise RunFailed(
            f"a process that computes was killed, perhaps for want of memory ({error}); what is "
            "stored is kept: run again, with fewer jobs"
        ) from None
    except Halt as error:
        raise RunFailed(f"{error}; what is stored is kept: the same command goes on") from None
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


def _lane(
    works: Sequence[Work], executor: Executor | None, device: str, slots: int, every: float | None
) -> Lane:
    """Return the only lane of a run on this machine."""
    alone = executor is None
    return Lane(
        Here() if executor is None else executor,
        device,
        slots,
        size=BATCH["cuda" if device.startswith("cuda") else "cpu"] if every is None else every,
        networks=side_by_side(works, device, cores=(os.cpu_count() or 1) if alone else 1),
        provenance=Provenance.here(device),
    )


class _Runner:
    """Hands batches to lanes and stores what comes back: the one place where a run is counted."""

    def __init__(self, store: Store, watcher: Watcher, tally: Tally) -> None:
        self.store, self.watcher, self.tally = store, watcher, tally
        self.until = inf
        self.pending = Pending()
        self.flying: dict[Future[Any], tuple[Lane, list[Work]]] = {}
        self.died: Counter[Work] = Counter()  # workers, by the networks they had
        self.kept: set[str] = set()  # stored while their batch was still at work

    def run(self, missing: Sequence[Work], lanes: Lanes) -> None:
        """Go on until every trial is stored, by us or by another process, or has failed."""
        self.pending = Pending(missing, self._rank(lanes()))
        taken = list[Work]()  # another process is at it
        while self.pending or self.flying or taken:
            if time.monotonic() > self.until:
                self.tally.left += self.pending.clear() + len(taken)
                taken = []
            taken += self._fill(lanes())
            if self.flying:
                self._land()
            elif taken and not self.pending:
                self.watcher.idle(len(taken))
                time.sleep(_POLL)
                self.pending.add(self._left(taken))
                taken = []
            elif self.pending:  # for which there is no worker at the moment
                time.sleep(_POLL)

    def _rank(self, lanes: Sequence[Lane]) -> Callable[[Unit], float]:
        """Say what comes first."""
        if self.until < inf:
            return lambda unit: unit.number  # the first trials of all studies
        if sum(lane.slots for lane in lanes) > 1:
            return lambda unit: -unit.cost  # the longest, or one of them ends alone
        return lambda unit: 0.0

    def _fill(self, lanes: Sequence[Lane]) -> list[Work]:
        """Give every lane as much as it takes; return what another process is computing."""
        taken = list[Work]()
        slots = sum(lane.slots for lane in lanes)
        for lane in lanes:
            mine = [future for future, (whose, _) in self.flying.items() if whose is lane]
            if lane.gone:
                for future in mine:
                    future.cancel()
            free = lane.slots - len(mine)
            while self.pending and free > 0:
                batch = lane.cut(self.pending, slots)
                self.watcher.start(sum(work.cost for work in batch))
                before = len(self.flying)
                taken += self._start(batch, lane)
                free -= len(self.flying) - before
        return taken

    def _start(self, batch: list[Work], lane: Lane) -> list[Work]:
        """Submit what nobody else has stored or is computing; return what somebody is."""
        claimed = self.store.claim(work.key for work in batch)
        mine = [work for work in batch if work.key in claimed]
        for part in batches(mine, float("inf")):
            self.flying[self._submit(part, lane)] = lane, part
        return self._left([work for work in batch if work.key not in claimed])

    def _submit(self, batch: list[Work], lane: Lane) -> Future[Any]:
        if not isinstance(lane.executor, Here) or lane.provenance is None:
            return lane.executor.submit(compute, batch, lane.device)
        keep = partial(self.keep, lane)  # a batch in this process reports as it goes
        return lane.executor.submit(
            compute, batch, lane.device, on_steps=self.watcher.within, on_outcomes=keep
        )

    def _left(self, works: list[Work]) -> list[Work]:
        """Count what another process has stored, and return the rest."""
        left = self.store.missing(works)
        found = [work for work in works if work not in set(left)]
        mine = sum(work.key in self.kept for work in found)  # of a batch that failed later on
        self.tally.computed += mine
        self.tally.elsewhere += len(found) - mine
        self._advance(found)
        return left

    def keep(self, lane: Lane, outcomes: list[TrialResult]) -> None:
        """Store what is finished before the rest of its batch."""
        assert lane.provenance is not None
        self.store.add(outcomes, lane.provenance)
        self.kept |= {one.work.key for one in outcomes}

    def _land(self) -> None:
        done, _ = wait(self.flying, timeout=_POLL, return_when=FIRST_COMPLETED)
        for future in done:
            lane, batch = self.flying.pop(future)
            error = future.exception()
            if error is None:
                self._store(batch, lane, future.result())
            elif isinstance(error, BrokenExecutor | Halt):
                raise error
            elif isinstance(error, Lost) and self._forgiven(batch, error):
                self._again(batch)
            else:
                self._failed(batch, error)

    def _again(self, batch: list[Work]) -> None:
        """Put a batch back: whoever is free cuts what suits it, but a network alone stays so."""
        alone = len({work.network() for work in batch}) == 1
        (self.pending.alone if alone else self.pending.add)(batch)

    def _forgiven(self, batch: list[Work], error: Lost) -> bool:
        """Tell whether a batch that has lost its worker may try another."""
        networks = {work.network() for work in batch}
        if isinstance(error, Recalled):
            return True
        self.died.update(networks)
        return max(self.died[network] for network in networks) <= _RETRIES

    def _store(self, batch: list[Work], lane: Lane, found: Report | list[TrialResult]) -> None:
        if not isinstance(found, Report):
            assert lane.provenance is not None
            found = Report(found, lane.provenance)
        self.store.add(found.outcomes, found.provenance)
        self.tally.computed += len(batch)
        self._advance(batch)
        if found.worker:
            self.watcher.worked(found.worker, len(batch), found.seconds)

    def _failed(self, batch: list[Work], error: BaseException) -> None:
        """Try the networks of a batch one by one; count what fails even so."""
        networks = {work.network() for work in batch}
        if len(networks) > 1:
            self.store.release(work.key for work in batch)
            for network in networks:  # which now stand for themselves
                self.died.pop(network, None)
            self.pending.alone(batch)
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
    return None if isinstance(error, FissileError | Lost) else error
