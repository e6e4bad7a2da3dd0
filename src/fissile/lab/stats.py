"""Statistics of trials: means and their errors, tests against the dense arm, straight lines.

>>> summary([0.70, 0.72, 0.74]).mean
0.72

:func:`ratios` finds the larger dense network that an expanded one is as good as. The dense
networks' accuracies are joined by straight lines over the logarithm of their weights; where that
curve first reaches an expanded network's accuracy, its weights are read off.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fissile._common.errors import FissileError, needs

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "LEVEL",
    "Comparison",
    "Line",
    "Summary",
    "compare",
    "fold_change",
    "interval",
    "line",
    "ratios",
    "summary",
]

#: Below this a difference is called significant, as in the paper.
LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """A mean and its standard error, which needs two values."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.error:.2g}"


@dataclass(frozen=True)
class Comparison:
    """How much higher one arm is than another, and how likely chance would do as much."""

    difference: float
    p: float
    count: int

    @property
    def significant(self) -> bool:
        """Tell whether the difference is significant; without a p-value it is not."""
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
    found = _finite(values)
    count = len(found)
    mean = float(found.mean()) if count else nan
    error = float(found.std(ddof=1)) / sqrt(count) if count > 1 else nan
    return Summary(mean, error, count)


def compare(values: ArrayLike, others: ArrayLike, *, paired: bool = True) -> Comparison:
    """Test whether two arms differ: trial by trial, or (``paired=False``) by Welch's t-test.

    >>> compare([2.0, 3.1, 4.0], [1.0, 2.0, 3.0]).significant
    True
    """
    first, second = np.asarray(values, float), np.asarray(others, float)
    if paired:
        if first.shape != second.shape:
            raise FissileError("a paired test needs as many trials of one arm as of the other")
        return _paired(_finite(first - second))
    first, second = _finite(first), _finite(second)
    difference = float(first.mean() - second.mean()) if len(first) and len(second) else nan
    count = min(len(first), len(second))
    if count < 2:
        return Comparison(difference, nan, count)
    if _equal(first) and _equal(second):
        return Comparison(difference, _certain(difference, count), count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that one of them hardly varies is no harm
        p = _scipy().ttest_ind(first, second, equal_var=False).pvalue
    return Comparison(difference, float(p), count)


def _paired(differences: NDArray[np.float64]) -> Comparison:
    count = len(differences)
    mean = float(differences.mean()) if count else nan
    if count < 2:
        return Comparison(mean, nan, count)
    if _equal(differences):  # the t statistic would be 0 / 0 or infinite
        return Comparison(mean, _certain(mean, count), count)
    return Comparison(mean, float(_scipy().ttest_1samp(differences, 0.0).pvalue), count)


def interval(differences: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Return where the mean of all trials' differences lies with so much confidence.

    >>> interval([1.0, 1.2, 0.8])
    (0.503..., 1.496...)
    """
    found = _finite(differences)
    if len(found) < 2:
        return nan, nan
    half = _scipy().t.ppf((1 + level) / 2, len(found) - 1) * found.std(ddof=1) / sqrt(len(found))
    mean = float(found.mean())
    return mean - float(half), mean + float(half)


def _equal(values: NDArray[np.float64]) -> bool:
    """Tell whether values are the same up to rounding."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def _certain(difference: float, count: int) -> float:
    """Return the p-value of trials that all agree; two may well agree by chance."""
    return 1.0 if difference == 0 else 0.0 if count > 2 else nan


def fold_change(values: ArrayLike, others: ArrayLike) -> NDArray[np.float64]:
    """Return how many times the others the values are, trial by trial; NaN where others are 0.

    >>> fold_change([2.0, 3.0], [1.0, 0.0]).tolist()
    [2.0, nan]
    """
    first, second = np.asarray(values, float), np.asarray(others, float)
    folds = np.full(first.shape, nan)
    np.divide(first, second, out=folds, where=second != 0)
    return folds


def line(x: ArrayLike, y: ArrayLike) -> Line:
    """Fit a straight line by least squares.

    >>> line([0, 1, 2], [1, 3, 5]).slope
    2.0
    """
    across, up = np.asarray(x, float), np.asarray(y, float)
    there = np.isfinite(across) & np.isfinite(up)
    across, up = across[there], up[there]
    if len(across) < 2 or np.ptp(across) == 0:
        return Line(nan, nan, nan, nan, nan, len(across))
    if np.ptp(up) == 0:
        return Line(0.0, float(up[0]), nan, 1.0, 0.0, len(across))
    fit = _scipy().linregress(across, up)
    # Two points always lie on a line: that says nothing about its slope.
    p, error = (float(fit.pvalue), float(fit.stderr)) if len(across) > 2 else (nan, inf)
    return Line(
        float(fit.slope), float(fit.intercept), float(fit.rvalue) ** 2, p, error, len(across)
    )


def _finite(values: ArrayLike | Sequence[float]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.asarray(values, float).ravel()
    kept: NDArray[np.float64] = found[np.isfinite(found)]
    return kept


def _scipy() -> Any:
    needs("scipy", "lab")
    from scipy import stats

    return stats


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
