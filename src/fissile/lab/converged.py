"""The paper's criterion: how much of its converged accuracy a network has at the split.

The paper chose its number of warm-up epochs so that a network is then "at least within 95 %" of a
fully converged one. The arm ``converged`` measures that: the dense network of a cell trains on
until its test accuracy no longer rises.

>>> plateau([0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9], warm_up=1)
Plateau(accuracy=0.9, epochs=7, rising=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

__all__ = ["EPOCHS", "WITHIN", "Plateau", "length", "limit", "plateau", "stopped"]

#: The share of a converged network's accuracy that the paper asks of the warm-up.
WITHIN = 0.95
#: Epochs are looked at in rounds of so many, or of the warm-up's number if that is smaller.
_ROUND = 25
#: A network has converged when so many rounds in a row
_PATIENCE = 4
#: have each brought no more than this to the best mean accuracy of a round so far.
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


def stopped(curve: Sequence[float], warm_up: int) -> Plateau:
    """Return what a network that diverged had reached: the mean of its best round.

    If it never finished a round after the warm-up, its last epochs are that round.
    """
    size, known = length(warm_up), [value for value in curve if isfinite(value)]
    ends = range(min(warm_up + size, len(known)), len(known) + 1, size)
    rounds = [known[max(0, end - size) : end] for end in ends if end]
    best = max((sum(one) / len(one) for one in rounds), default=nan)
    return Plateau(best, len(known), rising=False)
