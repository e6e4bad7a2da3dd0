"""Statistics of trials: means and their errors, tests against the dense arm, straight lines.

>>> summary([0.70, 0.72, 0.74]).mean
0.72

:func:`ratios` finds the larger dense network that an expanded one is as good as. The dense
networks' accuracies are joined by straight lines over the logarithm of their weights; where that
curve first reaches an expanded network's accuracy, its weights are read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fissile._common.errors import FissileError, needs

if TYPE_CHECKING:
    from pandas import DataFrame

#: Below this a difference is called significant, as in the paper.
LEVEL = 0.05
#: Fewer trials prove nothing: two may agree by chance.
ENOUGH = 3
_DRAWS = 2000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """A mean and its standard error, which needs two values."""

    mean: float
    error: float
    count: int


class Comparison(NamedTuple):
    """How much higher one arm is than another, and how likely chance would do as much."""

    difference: float
    p: float

    @property
    def significant(self) -> bool:
        """Return whether the difference is significant; without a p-value it is not."""
        return self.p < LEVEL


@dataclass(frozen=True)
class Line:
    """A least-squares line; ``p`` is that of a slope of zero."""

    slope: float
    intercept: float
    r2: float
    p: float
    error: float
    count: int


def summary(values: ArrayLike) -> Summary:
    """Return the mean and its standard error, over the values that are there.

    >>> summary([1.0, 3.0])
    Summary(mean=2.0, error=1.0, count=2)
    """
    known = _finite(values)
    count = len(known)
    mean = float(known.mean()) if count else nan
    error = float(known.std(ddof=1)) / sqrt(count) if count > 1 else nan
    return Summary(mean, error, count)


def compare(values: ArrayLike, others: ArrayLike) -> Comparison:
    """Test trial by trial whether two arms differ; fewer than three trials have no p-value.

    >>> compare([2.0, 3.1, 4.0], [1.0, 2.0, 3.0]).significant
    True
    """
    first, second = np.asarray(values, float), np.asarray(others, float)
    if first.shape != second.shape:
        raise FissileError("a paired test needs as many trials of one arm as of the other")
    differences = _finite(first - second)
    mean = summary(differences).mean
    if len(differences) < ENOUGH:
        return Comparison(mean, nan)
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        # All agree, and the t statistic would be 0 / 0 or infinite.
        return Comparison(mean, 1.0 if mean == 0 else 0.0)
    return Comparison(mean, float(_scipy().ttest_1samp(differences, 0.0).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method; a missing one (NaN) stays so.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, highest = list(p_values), 0.0
    known = sorted((p, place) for place, p in enumerate(p_values) if not isnan(p))
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[place] = highest
    return corrected


def interval(differences: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean; another level leaves as much out.

    >>> interval([1.0, 1.2, 0.8])
    (0.503..., 1.496...)
    """
    known = summary(differences)
    if known.count < 2:
        return nan, nan
    half = float(_scipy().t.ppf(1 - level / 2, known.count - 1)) * known.error
    return known.mean - half, known.mean + half


def fold_change(values: ArrayLike, others: ArrayLike) -> Array:
    """Return how many times the others the values are, trial by trial; NaN where others are 0.

    >>> fold_change([2.0, 3.0], [1.0, 0.0]).tolist()
    [2.0, nan]
    """
    second = np.asarray(others, float)
    return np.asarray(values, float) / np.where(second == 0, nan, second)


def line(x: ArrayLike, y: ArrayLike) -> Line:
    """Fit a straight line by least squares.

    >>> line([0, 1, 2], [1, 3, 5]).slope
    2.0
    """
    points = np.column_stack([np.asarray(x, float), np.asarray(y, float)])
    across, up = points[np.isfinite(points).all(1)].T
    count = len(across)
    if count < 2 or np.ptp(across) == 0:
        return Line(nan, nan, nan, nan, nan, count)
    if np.ptp(up) == 0:
        return Line(0.0, float(up[0]), nan, 1.0, 0.0, count)
    fit = _scipy().linregress(across, up)
    # Two points always lie on a line: that says nothing about its slope.
    p, error = (float(fit.pvalue), float(fit.stderr)) if count > 2 else (nan, inf)
    return Line(float(fit.slope), float(fit.intercept), float(fit.rvalue) ** 2, p, error, count)


def _finite(values: ArrayLike) -> Array:
    known: Array = np.asarray(values, float).ravel()
    return known[np.isfinite(known)]


def _scipy() -> Any:
    needs("scipy", "lab")
    from scipy import stats

    return stats


def ratios(frame: DataFrame, arm: str) -> DataFrame:
    """Return, for every width of an arm, the dense network's weights as a multiple of its own.

    >>> ratios(frame, "random-4")  # columns neurons, ratio, low, high, bound

    The interval holds 95 % of the multiples of resampled trials; it needs three trials. A width
    that beats every dense network has an infinite multiple: it is above the ``bound``, the largest
    dense network's.
    """
    import pandas

    def by_trial(name: str, measure: str) -> DataFrame:
        """Return a measure of an arm: a row for each trial, a column for each width."""
        part = frame[frame["arm"] == name]
        return part.pivot(index="trial", columns="neurons", values=measure)

    dense, split = (by_trial(name, "accuracy").dropna() for name in ("dense", arm))
    trials = dense.index.intersection(split.index)
    rows = []
    if len(trials) >= ENOUGH:
        sizes = by_trial(arm, "nonzeros").mean()
        weights = by_trial("dense", "nonzeros").mean()[dense.columns].to_numpy()
        picks = np.random.default_rng(0).integers(0, len(trials), (_DRAWS, len(trials)))
        table = dense.loc[trials].to_numpy()
        drawn = table[picks].mean(1)
        for width in split.columns:
            own, size = split.loc[trials, width].to_numpy(), sizes[width]
            ratio = _weights_at(own.mean(), table.mean(0), weights) / size
            several = [
                _weights_at(goal, curve, weights) / size
                for goal, curve in zip(own[picks].mean(1), drawn, strict=True)
            ]
            # Not interpolated between ranks, which infinite multiples would not survive.
            low, high = np.percentile(several, [2.5, 97.5], method="nearest")
            rows.append((width, ratio, low, high, weights.max() / size))
    return pandas.DataFrame(rows, columns=["neurons", "ratio", "low", "high", "bound"])


def _weights_at(goal: float, accuracy: Array, weights: Array) -> float:
    """Return how many weights first reach an accuracy; infinitely many if no dense network does.

    Accuracy need not rise all the way: what counts is the smallest network that is as good.
    """
    as_good = np.flatnonzero(accuracy >= goal)
    if not len(as_good):
        return inf
    at = as_good[0]
    if at == 0:
        return float(weights[0])
    share = (goal - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
    low, high = np.log(weights[at - 1 : at + 1])
    return float(np.exp(low + share * (high - low)))
