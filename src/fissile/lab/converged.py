"""The paper's criterion: how much of its converged accuracy a network has at the split.

The paper chose its number of warm-up epochs so that a network is then "at least within 95 %" of a
fully converged one. The arm ``converged`` measures that: the dense network of a cell trains on
until its test accuracy no longer rises.

>>> plateau([0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9], warm_up=1)
Plateau(accuracy=0.9, epochs=7, rising=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["EPOCHS", "WITHIN", "Plateau", "length", "limit", "plateau"]

#: The share of a converged network's accuracy that the paper asks of the warm-up.
WITHIN = 0.95
#: Epochs are looked at in rounds of so many, or of the warm-up's number if that is smaller.
_ROUND = 25
#: A network has converged when the mean accuracy of so many rounds in a row
_PATIENCE = 4
#: is no more than so much above the best round before them.
_RISE = 0.001
#: After so many rounds beyond the warm-up it is stopped, even if it still rises.
_ROUNDS = 40
#: Epochs that such a network trains for, about: what its cost is estimated by.
EPOCHS = 250


class Plateau(NamedTuple):
    """Where a network's accuracy stopped rising."""

    accuracy: float  # the mean of its best round
    epochs: int  # that it was trained for
    rising: bool  # it was stopped before it had converged


def length(warm_up: int) -> int:
    """Return the number of epochs in a round."""
    return max(1, min(_ROUND, warm_up))


def limit(warm_up: int) -> int:
    """Return the number of epochs after which a network is stopped."""
    return warm_up + _ROUNDS * length(warm_up)


def plateau(curve: Sequence[float], warm_up: int) -> Plateau | None:
    """Return where a curve of test accuracies stopped rising, or None if it must go on.

    The curve begins with the first epoch of the warm-up; rounds are counted from its end.
    """
    size, best, waited = length(warm_up), float("-inf"), 0
    for end in range(warm_up + size, len(curve) + 1, size):
        mean = sum(curve[end - size : end]) / size
        waited = 0 if mean > best + _RISE else waited + 1
        best = max(best, mean)
        if waited == _PATIENCE:
            return Plateau(best, end, rising=False)
        if end >= limit(warm_up):
            return Plateau(best, end, rising=True)
    return None
