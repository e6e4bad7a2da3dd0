"""A progress bar over a whole run: trials done, and the time that is left."""

from __future__ import annotations

from types import TracebackType

from fissile.errors import needs
from fissile.lab.run import Watcher

__all__ = ["Bar"]


class Bar(Watcher):
    """Shows how far a run is, in the terminal (needs rich).

    >>> with Bar() as bar:
    ...     run(works, store, watcher=bar)

    The time that is left goes by the estimated cost of the trials, not by their number.
    """

    def __enter__(self) -> Bar:
        needs("rich", "lab")
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[done]:,} of {task.fields[trials]:,} trials"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, trials: int, cost: float) -> None:
        """Show the bar, still empty."""
        self._done, self._spent, self._batch = 0, 0.0, 0.0
        self._task = self._bar.add_task("training", total=max(cost, 1e-9), done=0, trials=trials)

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
