"""Running trials: what is missing is cut into batches, computed by a backend, and stored.

>>> tally = run(STUDIES["capacity"].works("quick"), store)
>>> tally.computed, tally.found
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from fissile._common.errors import FissileError
from fissile._common.progress import ProgressBar, number_of
from fissile.lab.batching import Backend, Batch, Halt, Local, Lost, Pending, Report, Unit, batches
from fissile.lab.store import Store
from fissile.lab.trial import Features, Images, Text, Work

_log = logging.getLogger("fissile")

_POLL = 0.5  # seconds between looks at what other processes and workers are doing
_RETRIES = 3  # for a batch whose worker has died


class RunFailed(FissileError):
    """Some trials could not be computed; all others are stored."""


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
    failed: Counter[str] = field(default_factory=Counter)  # trials by error message

    def text(self) -> str:
        """Return the counts as one line."""
        computed = number_of(self.computed, "trial")
        parts = [f"{computed} computed", f"{self.found:,} found in the store"]
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} computed by another process")
        if self.left:
            parts.append(f"{self.left:,} left for want of time")
        if self.failed:
            parts.append(f"{self.failed.total():,} failed")
        return ", ".join(parts)


class Watcher:
    """Is called as a run goes on; this one does nothing."""

    def start(self, total: int, *, work: float) -> None:
        """Take the number of trials, and their cost."""

    def advance(self, count: int, *, work: float) -> None:
        """Take how many trials are done, and their cost."""

    def refresh(self, ahead: float) -> None:
        """Take the cost of what this process has done of its batch."""

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Take what one of several workers has done, and how long it took."""

    def idle(self, trials: int) -> None:
        """Take how many trials another process has; they are the last."""


class Bar(ProgressBar, Watcher):
    """Shows in the terminal how much of a run is done.

    >>> with Bar() as bar:
    ...     run(works, store, watcher=bar)

    The time that is left follows the cost of the trials, not their number. Each worker of a cluster
    has a line of its own.
    """

    _SHOWN = 8  # workers that have a line

    def __init__(self) -> None:
        super().__init__("training", "trial", self._lines)
        self._workers: dict[str, tuple[int, float]] = {}  # trials and seconds of each

    def __enter__(self) -> Bar:
        return self

    def _lines(self) -> list[str]:
        lines = [
            f"  {worker}: {number_of(trials, 'trial')}, {trials / max(seconds, 1e-9):,.3g} a second"
            for worker, (trials, seconds) in list(self._workers.items())[: self._SHOWN]
        ]
        more = len(self._workers) - self._SHOWN
        return [*lines, f"  and {more} more"] if more > 0 else lines

    def advance(self, count: int = 1, *, work: float | None = None) -> None:
        """Show that trials are done."""
        self.task = "training"
        super().advance(count, work=work)

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Show what a worker has done."""
        before, taken = self._workers.get(worker, (0, 0.0))
        self._workers[worker] = before + trials, taken + seconds

    def idle(self, trials: int) -> None:
        """Show that another process has the rest."""
        self.task = f"another process has the last {trials}"
        self.refresh()


def run(
    works: Sequence[Work],
    store: Store,
    backend: Backend | None = None,
    *,
    within: float | None = None,
    watcher: Watcher | None = None,
) -> Tally:
    """Compute the trials that the store does not hold, and store each batch as it is finished.

    >>> run(works, store, Local("cuda"), within=600)

    Args:
        works: the trials; those that several studies share are computed once.
        store: where results go, and are found again.
        backend: what computes: by default this process, on its processor. For other devices and
            executors see :class:`fissile.lab.batching.Local`, for clusters :mod:`fissile.lab.ray`.
        within: seconds after which no batch is begun; first trials of all cells then come first.
        watcher: is told of the progress.

    Returns:
        A tally. Trials that cannot be computed do not stop the others; then RunFailed is raised.
    """
    works, backend, watcher = list(dict.fromkeys(works)), backend or Local(), watcher or Watcher()
    _check_bound(works)
    missing = store.missing(works)
    tally = Tally(found=len(works) - len(missing))
    watcher.start(len(missing), work=_cost(missing))
    until = inf if within is None else time.monotonic() + within
    pending = Pending(missing, _rank(until, backend.slots))
    try:
        _Runner(store, backend, watcher, tally, pending).run(until)
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
        if (
            isinstance(task, Features | Images | Text)
            and not task.fingerprint
            and not task.entry.make
        ):
            raise FissileError(
                f"these trials name {task.data} without the fingerprint of its arrays; pass "
                "fissile.lab.classifier.bound(works)"
            )


def _cost(works: Sequence[Work]) -> float:
    return sum(work.cost for work in works)


def _rank(until: float, slots: int) -> Callable[[Unit], float]:
    """Return what decides which networks come first: those of the lowest rank."""
    if until < inf:
        return lambda unit: unit.number  # the first trials of all studies
    if slots != 1:
        return lambda unit: -unit.cost  # the longest, or one of them ends alone
    return lambda unit: 0.0


@dataclass
class _Runner:
    """Submits batches and stores what comes back: the one place where a run is counted."""

    store: Store
    backend: Backend
    watcher: Watcher
    tally: Tally
    pending: Pending
    running: dict[Future[Any], list[Work]] = field(default_factory=dict)
    died: Counter[Work] = field(default_factory=Counter)  # workers, by the networks they had
    kept: set[str] = field(default_factory=set)  # stored while their batch was still at work

    def run(self, until: float) -> None:
        """Go on until every trial is stored, by us or by another process, or has failed."""
        taken = list[Work]()  # another process is at it
        while self.pending or self.running or taken:
            if time.monotonic() > until:
                self.tally.left += len(self.pending.clear()) + len(taken)
                taken = []
            while (batch := self.backend.cut(self.pending)) is not None:
                taken += self._start(batch)
            if self.running:
                done, _ = wait(self.running, timeout=_POLL, return_when=FIRST_COMPLETED)
                for future in done:
                    self._finish(self.running.pop(future), future)
            elif self.pending:  # for which there is no worker at the moment
                time.sleep(_POLL)
            elif taken:
                self.watcher.idle(len(taken))
                time.sleep(_POLL)
                self.pending.add(self._left(taken))
                taken = []

    def _start(self, batch: Batch) -> list[Work]:
        """Submit what nobody else has stored or is computing; return what somebody is."""
        claimed = self.store.claim(work.key for work in batch.works)
        mine = [work for work in batch.works if work.key in claimed]
        for part in batches(mine, inf):
            on_steps = partial(self._show, _cost(part))
            future = self.backend.submit(batch._replace(works=part), on_steps, self._keep)
            self.running[future] = part
        return self._left([work for work in batch.works if work.key not in claimed])

    def _show(self, cost: float, share: float) -> None:
        """Show the share of a batch of this cost that is done."""
        self.watcher.refresh(share * cost)

    def _left(self, works: list[Work]) -> list[Work]:
        """Count what another process has stored, and return the rest."""
        left = self.store.missing(works)
        stored = [work for work in works if work not in set(left)]
        self.tally.elsewhere += len(stored)
        self._advance(stored)
        return left

    def _keep(self, report: Report) -> None:
        """Store what is finished before the rest of its batch."""
        self.store.add(report.outcomes, report.provenance)
        self.kept |= {outcome.work.key for outcome in report.outcomes}

    def _finish(self, batch: list[Work], future: Future[Any]) -> None:
        try:
            report = self.backend.result(future)
        except (BrokenExecutor, Halt):
            raise
        except CancelledError:
            self._again(batch)
        except Exception as error:
            networks = {work.network() for work in batch}
            if isinstance(error, Lost):
                self.died.update(networks)
                if max(self.died[network] for network in networks) <= _RETRIES:
                    return self._again(batch)
            self._failed(batch, networks, error)
        else:
            self.store.add(report.outcomes, report.provenance)
            self._computed(batch)
            if report.worker:
                self.watcher.worked(report.worker, len(batch), report.seconds)

    def _again(self, batch: list[Work]) -> None:
        """Put a batch back: it is cut to suit whoever is free, but a network alone stays so."""
        alone = len({work.network() for work in batch}) == 1
        (self.pending.add_alone if alone else self.pending.add)(batch)

    def _failed(self, batch: list[Work], networks: set[Work], error: Exception) -> None:
        """Try the networks of a batch one by one; count what fails even so."""
        if len(networks) > 1:
            self._computed([work for work in batch if work.key in self.kept])
            rest = [work for work in batch if work.key not in self.kept]
            self.store.release(work.key for work in rest)
            for network in networks:  # which now stand for themselves
                self.died.pop(network, None)
            self.pending.add_alone(rest)
            return
        text = str(error) or type(error).__name__
        if not isinstance(error, FissileError | Lost):  # the others are told at the end, whole
            _log.warning("%s failed: %s", number_of(len(batch), "trial"), text, exc_info=error)
        self.tally.failed[text] += len(batch)
        self._advance(batch)

    def _computed(self, works: Sequence[Work]) -> None:
        self.tally.computed += len(works)
        self._advance(works)

    def _advance(self, works: Sequence[Work]) -> None:
        self.store.release(work.key for work in works)
        self.watcher.advance(len(works), work=_cost(works))
