"""A progress bar over a whole run: trials done, the time that is left, what each worker did."""

from __future__ import annotations

from types import TracebackType

from fissile._common.progress import ProgressBar
from fissile.lab.run import Watcher

__all__ = ["Bar"]

_SHOWN = 8  # workers that have a line of their own


class Bar(Watcher):
    """Shows in the terminal how much of a run is done.

    >>> with Bar() as bar:
    ...     run(works, store, watcher=bar)

    The time that is left follows the estimated cost of the trials, not their number. Each worker
    of a cluster has a line with its trials, and its trials per second.
    """

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
        """Return a line for each worker, the first to finish a trial first."""
        lines = [
            f"  {worker}: {trials:,} trials, {trials / max(seconds, 1e-9):,.3g} a second"
            for worker, (trials, seconds) in list(self._workers.items())[:_SHOWN]
        ]
        more = len(self._workers) - _SHOWN
        return [*lines, f"  and {more} more"] if more > 0 else lines

    def begin(self, trials: int, cost: float) -> None:
        """Show the bar, still empty."""
        self._bar.start(trials, work=cost)

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Count what a worker did."""
        before, taken = self._workers.get(worker, (0, 0.0))
        self._workers[worker] = before + trials, taken + seconds

    def start(self, cost: float) -> None:
        """Remember the cost of the batch that begins."""
        self._batch = cost

    def within(self, share: float) -> None:
        """Fill the bar by a part of the batch."""
        self._bar.refresh(ahead=share * self._batch)

    def advance(self, trials: int, cost: float) -> None:
        """Fill the bar by the trials that are finished."""
        self._bar.task = "training"
        self._bar.advance(trials, work=cost)

    def idle(self, trials: int) -> None:
        """Show that the run waits for another process."""
        self._bar.task = f"another process has the last {trials}"
        self._bar.refresh()
