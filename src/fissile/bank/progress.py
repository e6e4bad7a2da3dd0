"""A progress bar for a bank: networks, epochs, steps per second and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fissile._common.errors import needs

__all__ = ["Progress", "quiet"]


class Progress:
    """Shows how far a bank is, in the terminal (needs rich).

    >>> bank.train(until=25, progress=True)
    """

    @contextmanager
    def of(self, networks: int, epochs: int) -> Iterator[None]:
        """Show the bar while a bank trains ``epochs`` epochs, summed over its networks."""
        needs("rich", "bank")
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("epochs, {task.fields[rate]}"),
            progress.TimeRemainingColumn(),
        )
        self._steps, self._since = 0, time.perf_counter()
        with progress.Progress(*columns) as self._bar:
            text = f"{networks:,} network" + ("s" if networks != 1 else "")
            self._task = self._bar.add_task(text, total=epochs, rate="starting")
            yield

    def advance(self, epochs: int, steps: int) -> None:
        """Count epochs and steps that are done."""
        self._steps += steps
        rate = self._steps / max(time.perf_counter() - self._since, 1e-9)
        self._bar.update(self._task, advance=epochs, rate=f"{rate:,.0f} steps/s")


class quiet(Progress):
    """Shows nothing."""

    @contextmanager
    def of(self, networks: int, epochs: int) -> Iterator[None]:
        """Do nothing around the training."""
        yield

    def advance(self, epochs: int, steps: int) -> None:
        """Do nothing."""
