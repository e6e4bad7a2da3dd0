"""What commands print: a progress bar, durations, tables in plain text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(5_400)
    '90 min'
    """
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"


def number_of(count: int, what: str) -> str:
    """Return a count with its noun, in the plural if it is not one.

    >>> number_of(1, "trial"), number_of(1_200, "trial")
    ('1 trial', '1,200 trials')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


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
    """Shows on stderr how much of a task is done and how long the rest takes (needs rich).

    >>> with ProgressBar("encoding", "image") as bar:
    ...     bar.start(50_000)
    ...     bar.advance(64)

    Args:
        task: what is going on.
        unit: what is counted, one of it.
        lines: returns more lines to show below the bar.
    """

    def __init__(
        self, task: str, unit: str, lines: Callable[[], Sequence[str]] = lambda: ()
    ) -> None:
        self.task, self.unit, self.lines = task, unit, lines
        self.note = ""
        self._live: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        from rich import progress
        from rich.console import Console, Group
        from rich.live import Live

        self._total, self._done = total, done
        self._worked = float(done) if work is None else 0.0
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[count]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
        )
        whole = max(float(total if work is None else work), 1e-9)
        self._id = self._bar.add_task(self.task, total=whole, count="")
        self.refresh()
        console = Console(stderr=True)
        self._live = Live(get_renderable=lambda: Group(self._bar, *self.lines()), console=console)
        self._live.start()

    def advance(self, count: int = 1, *, work: float | None = None) -> None:
        """Add units that are done, and the work they were."""
        self._done += count
        self._worked += count if work is None else work
        self.refresh()

    def refresh(self, ahead: float = 0.0) -> None:
        """Show the bar as it is now, with some work of an unfinished unit ahead of the count."""
        count = f"{self._done:,} of {number_of(self._total, self.unit)}"
        if self.note:
            count = f"{count}, {self.note}"
        at = self._worked + ahead
        self._bar.update(self._id, completed=at, description=self.task, count=count)
