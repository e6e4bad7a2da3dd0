"""What a run did, and who is told how it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Tally", "Watcher"]


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
    """Is told how a run goes; this one does not care. See :mod:`fissile.lab.progress`."""

    def begin(self, trials: int, cost: float) -> None:
        """Hear how much is to be done."""

    def advance(self, trials: int, cost: float) -> None:
        """Hear what has been done."""

    def worked(self, worker: str, trials: int, seconds: float) -> None:
        """Hear what one of several workers has done, and how long it was at it."""

    def start(self, cost: float) -> None:
        """Hear how much the next batch is."""

    def within(self, share: float) -> None:
        """Hear which share of the batch in this process is done."""

    def idle(self, trials: int) -> None:
        """Hear that another process has the last trials."""
