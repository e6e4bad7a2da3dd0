"""What commands print: a progress bar, durations, tables in plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["ProgressBar", "aligned", "duration"]

_BETWEEN = 10.0  # seconds between two lines where rich is not installed


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(5_400)
    '90 min'
    """
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Align the columns of a table, those of numbers to the right.

    >>> aligned([("layer", "weights"), ("first", "12")], right=[1])
    ['layer  weights', 'first       12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class ProgressBar:
    """Shows on stderr how much of a task is done and how long the rest takes.

    >>> with ProgressBar("encoding", "images") as bar:
    ...     bar.start(50_000)
    ...     bar.advance(64)

    Without rich, it prints a plain line every ten seconds.

    Args:
        task: what is going on.
        unit: what is counted.
        lines: returns more lines to show below the bar.
    """

    def __init__(
        self, task: str, unit: str, lines: Callable[[], Sequence[str]] = lambda: ()
    ) -> None:
        self.task, self.unit, self.lines = task, unit, lines
        self.note = ""
        self._live: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is None:
            return
        self._live.stop()
        if not self._live.console.is_terminal:  # there, nothing has ended the last line yet
            self._live.console.print()

    def start(self, total: int, *, done: int = 0, work: float | None = None) -> None:
        """Show the bar.

        Args:
            total: how many units there are.
            done: how many of them are done already.
            work: how much work they are, where units differ; the time left follows the work.
        """
        self._total, self._done = total, done
        self._all = max(float(total if work is None else work), 1e-9)
        self._before = self._worked = float(done) if work is None else 0.0
        self._since = self._printed = time.monotonic()
        if find_spec("rich") is None:
            return
        from rich import progress
        from rich.console import Console
        from rich.live import Live

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[count]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
        )
        self._id = self._bar.add_task(self.task, total=self._all, count=self._count())
        self._bar.update(self._id, completed=self._worked)
        self._live = Live(get_renderable=self._shown, console=Console(stderr=True))
        self._live.start()

    def advance(self, count: int = 1, *, work: float | None = None) -> None:
        """Add units that are done, and the work they were."""
        self._done += count
        self._worked += count if work is None else work
        self.refresh()

    def refresh(self, ahead: float = 0.0) -> None:
        """Show the bar as it is now, with some work of an unfinished unit ahead of the count."""
        if self._live is not None:
            at = self._worked + ahead
            self._bar.update(self._id, completed=at, description=self.task, count=self._count())
        elif time.monotonic() > self._printed + _BETWEEN:
            self._printed = time.monotonic()
            print(self._plain(ahead), file=sys.stderr)

    def _count(self) -> str:
        text = f"{self._done:,} of {self._total:,} {self.unit}"
        return f"{text}, {self.note}" if self.note else text

    def _plain(self, ahead: float) -> str:
        new = self._worked + ahead - self._before
        if new <= 0:
            return f"{self.task}: {self._count()}"
        rest = max(self._all - self._worked - ahead, 0.0)
        left = rest * (time.monotonic() - self._since) / new
        return f"{self.task}: {self._count()}, {duration(left)} left"

    def _shown(self) -> Group:
        from rich.console import Group

        return Group(self._bar, *self.lines())
