"""How engines report what they have finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Record"]


class Record(Protocol):
    """Takes the curves of some networks over the epochs they have just finished."""

    def __call__(
        self,
        members: Sequence[int],
        accuracy: Sequence[Sequence[float]],
        loss: Sequence[Sequence[float]],
        steps: int,
    ) -> None:
        """Add one row of each curve per network; ``steps`` counts the steps of all together."""
