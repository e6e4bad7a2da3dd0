"""A progress bar over a whole run: trials done, the time that is left, what each worker did."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from fissile._common.errors import needs
from fissile.lab.run import Watcher

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Bar"]

_SHOWN = 8  # workers that have a line of their own


class Bar(Watcher):
    """Shows how far a run is, in the terminal (needs rich).

    >>> with Bar() as bar:
    ...     run(works, store, watcher=bar)

    The time that is left goes by the estimated cost of the trials, not by their number. Workers of
    a cluster have a line each, with the trials they did and how many they do in a second.
    """

    def __enter__(self) -> Bar:
        needs("rich", "lab")
        from rich import progress
        from rich.console import Console
        from rich.live import Live

        self._workers: dict[str, tuple[int, float]] = {}  # trials and seconds of each
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[done]:,} of {task.fields[trials]:,} trials"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
        )
        self._live = Live(get_renderable=self._shown, console=Console(stderr=True))
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if not self._live.console.is_terminal:  # where nothing has ended the last line yet
            self._live.console.print()

    def _shown(self) -> Group:
        from rich.console import Group

        return Group(self._bar, *self._lines())

    def _lines(self) -> list[str]:
        """Say what each worker did, the first to have come first."""
        lines = [
            f"  {worker}: {trials:,} trials, {trials / max(seconds, 1e-9):,.3g} a second"
            for worker, (trials, seconds) in list(self._workers.items())[:_SHOWN]
        ]
        more = len(self._workers) - _SHOWN
        return [*lines, f"  and {more} more"] if more > 0 else lines

    def begin(self, trials: int, cost: float) -> None:
        """Show the bar, still empty."""
        self._done, self._spent, self._batch = 0, 0.0, 0.0
        self._task = self._bar.add_task("training", total=max(cost, 1e-9), done=0, trials=trials)

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Count what a worker did."""
        before, taken = self._workers.get(worker, (0, 0.0))
        self._workers[worker] = before + trials, taken + seconds

    def start(self, cost: float) -> None:
        """Remember how much the batch is that begins."""
        self._batch = cost

    def within(self, share: float) -> None:
        """Fill it by a part of the batch."""
        self._bar.update(self._task, completed=self._spent + share * self._batch)

    def advance(self, trials: int, cost: float) -> None:
        """Fill it by what is finished."""
        self._done += trials
        self._spent += cost
        self._bar.update(self._task, completed=self._spent, done=self._done, description="training")

    def idle(self, trials: int) -> None:
        """Say what it is waiting for."""
        self._bar.update(self._task, description=f"another process has the last {trials}")
