"""Which larger dense network an expanded one is as good as, with an interval.

The dense networks' accuracies are joined by straight lines over the logarithm of their weights;
where that curve first reaches an expanded network's accuracy, its weights are read off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ratios"]

Array = NDArray[np.float64]
_DRAWS = 2000


def ratios(frame: DataFrame, arm: str) -> DataFrame:
    """Return, for every width of an arm, the dense network's weights as a multiple of its own.

    >>> ratios(frame, "random-4")  # columns neurons, nonzeros, ..., ratio, low, high, bound

    The interval holds 95 % of what comes out if trials are drawn again, with replacement; it needs
    three. A width that is better than every dense network has an infinite multiple: all that is
    known is that it is more than the ``bound``, the largest dense network's.
    """
    import pandas

    columns = ["neurons", "nonzeros", "accuracy", "error", "ratio", "low", "high", "bound"]
    dense, split = (_by_trial(frame, name) for name in ("dense", arm))
    if not len(dense) or not len(split):
        return pandas.DataFrame(columns=columns)
    trials = dense.index.intersection(split.index)
    if len(trials) < 3:
        return pandas.DataFrame(columns=columns)
    sizes = {name: _sizes(frame, name) for name in ("dense", arm)}
    weights = np.array([sizes["dense"][width] for width in dense.columns])
    picks = np.random.default_rng(0).integers(0, len(trials), (_DRAWS, len(trials)))
    table = dense.loc[trials].to_numpy()
    drawn = table[picks].mean(1)
    rows = []
    for width in split.columns:
        own = split.loc[trials, width].to_numpy()
        size = sizes[arm][width]
        ratio = _weights_at(own.mean(), table.mean(0), weights) / size
        several = [
            _weights_at(goal, curve, weights) / size
            for goal, curve in zip(own[picks].mean(1), drawn, strict=True)
        ]
        # Not interpolated between ranks, which infinite multiples would not survive.
        low, high = np.percentile(several, [2.5, 97.5], method="nearest")
        error = own.std(ddof=1) / np.sqrt(len(own))
        rows.append((width, size, own.mean(), error, ratio, low, high, weights.max() / size))
    return pandas.DataFrame(rows, columns=columns)


def _by_trial(frame: DataFrame, arm: str) -> DataFrame:
    """Return the accuracies of an arm: a row for each trial, a column for each width."""
    part = frame[frame["arm"] == arm]
    return part.pivot(index="trial", columns="neurons", values="accuracy").dropna()


def _sizes(frame: DataFrame, arm: str) -> dict[Any, float]:
    return dict(frame[frame["arm"] == arm].groupby("neurons")["nonzeros"].mean())


def _weights_at(goal: float, accuracy: Array, weights: Array) -> float:
    """Return how many weights first reach an accuracy; infinitely many if no dense network does.

    Accuracy need not rise all the way: what counts is the smallest network that is as good.
    """
    as_good = np.flatnonzero(accuracy >= goal)
    if not len(as_good):
        return float("inf")
    at = as_good[0]
    if at == 0:
        return float(weights[0])
    share = (goal - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
    low, high = np.log(weights[at - 1 : at + 1])
    return float(np.exp(low + share * (high - low)))
