"""Checks of trends along an axis, and of single numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, hypot, inf, isinf, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from fissile.lab.claims.comparisons import NOTHING, Verdict, p_text, plural, signed
from fissile.lab.frame import cells, pick
from fissile.lab.stats import Line, line, ratios

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "Best",
    "Equivalent",
    "Explains",
    "Flatter",
    "Levels",
    "Near",
    "Reaches",
    "Trend",
    "WarmedUp",
]


@dataclass(frozen=True)
class Trend:
    """A measure rises or falls along an axis: the slope of a least-squares line over all trials.

    >>> Trend("improvement", "clause-4", along="neurons", rises=False, where={"clauses": 8})
    """

    measure: str
    arm: str
    along: str = "neurons"
    rises: bool = True
    where: Mapping[str, object] = field(default_factory=dict)
    until: float = inf

    def __call__(self, frame: DataFrame) -> Verdict:
        """Fit the line."""
        part = pick(frame, self.where, [self.arm])
        part = part[part[self.along] <= self.until]
        if self.measure not in part or len(part) < 3 or part[self.along].nunique() < 2:
            return NOTHING
        fit = line(part[self.along], part[self.measure])
        numbers = (
            f"slope {fit.slope:+.3g} per unit of {self.along} ({p_text(fit.p)}, n = {fit.count})"
        )
        return Verdict(signed(fit.slope if self.rises else -fit.slope, fit.p), numbers)


@dataclass(frozen=True)
class Levels:
    """A rise that flattens: the slope beyond a point is smaller than the slope up to it."""

    measure: str
    arm: str
    along: str
    beyond: float
    where: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the slopes on both sides by their standard errors."""
        part = pick(frame, self.where, [self.arm])
        sides = part[part[self.along] <= self.beyond], part[part[self.along] >= self.beyond]
        if self.measure not in part or any(
            side[self.along].nunique() < 2 or len(side) < 3 for side in sides
        ):
            return NOTHING
        before, after = (line(side[self.along], side[self.measure]) for side in sides)
        drop, p = _apart(before, after)
        numbers = (
            f"slope {before.slope:+.3g} up to {self.beyond:g} {self.along}, "
            f"{after.slope:+.3g} beyond ({p_text(p)})"
        )
        return Verdict(signed(drop, p), numbers)


@dataclass(frozen=True)
class Flatter:
    """A measure falls more slowly in some cells than in others.

    >>> Flatter("improvement", "random-4", "neurons", where={"load": 4.0}, than={"classes": 40})
    """

    measure: str
    arm: str
    along: str
    where: Mapping[str, object]
    than: Mapping[str, object]

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the slopes by their standard errors."""
        sides = [pick(frame, where, [self.arm]) for where in (self.where, self.than)]
        if any(len(side) < 3 or side[self.along].nunique() < 2 for side in sides):
            return NOTHING
        one, other = (line(side[self.along], side[self.measure]) for side in sides)
        more, p = _apart(one, other)
        numbers = (
            f"slope {one.slope:+.3g} where {_words(self.where)}, {other.slope:+.3g} where "
            f"{_words(self.than)} ({p_text(p)})"
        )
        return Verdict(signed(more, p), numbers)


def _words(where: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in where.items())


def _apart(one: Line, other: Line) -> tuple[float, float]:
    """Return how much steeper one line is than another, and the p-value of that."""
    more, error = one.slope - other.slope, hypot(one.error, other.error)
    return more, erfc(abs(more) / error / sqrt(2)) if error else float(more == 0)


@dataclass(frozen=True)
class Explains:
    """One measure goes with another across cells: a line through their means, with its R²."""

    y: str
    x: str
    arms: Sequence[str]
    along: Sequence[str] = ("neurons",)
    where: Mapping[str, object] = field(default_factory=dict)
    rises: bool = True
    least: float = 0.5

    def __call__(self, frame: DataFrame) -> Verdict:
        """Fit a line for every arm; each must be steep the right way and explain enough."""
        fits = {}
        if not {self.x, self.y} <= set(frame.columns):
            return NOTHING
        for arm in self.arms:
            part = pick(frame, self.where, ["dense", arm])
            if not len(part[part["arm"] == arm]):
                continue
            xs, ys = (_means(part, name, self.along, arm) for name in (self.x, self.y))
            fits[arm] = line(xs, ys)
        fits = {arm: fit for arm, fit in fits.items() if fit.count > 2}
        if not fits:
            return NOTHING
        numbers = "; ".join(
            f"{arm}: R² = {fit.r2:.2f}, slope {fit.slope:+.3g} ({p_text(fit.p)})"
            for arm, fit in fits.items()
        )
        each = [signed(f.slope if self.rises else -f.slope, f.p) for f in fits.values()]
        if "fails" in each:
            return Verdict("fails", numbers)
        strong = all(fit.r2 >= self.least for fit in fits.values())
        sure = all(status == "holds" for status in each)
        return Verdict("holds" if strong and sure else "not significant", numbers)


def _means(frame: DataFrame, measure: str, along: Sequence[str], arm: str) -> Any:
    found = cells(frame, measure, along)
    return found[found["arm"] == arm]["mean"].to_numpy()


@dataclass(frozen=True)
class Near:
    """One column comes close to another: within so many of its errors, or within a factor.

    >>> Near("coverage_simulated", "coverage", error="coverage_error")
    >>> Near("collision_ratio", "collision_ratio_approx", factor=2, where={"literals": 128})
    """

    measure: str
    target: str
    error: str | None = None
    errors: float = 4.0
    factor: float = 1.0
    where: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look at every row."""
        part = pick(frame, self.where)
        if not len(part) or self.measure not in part:
            return NOTHING
        if self.error is not None:
            off = ((part[self.measure] - part[self.target]) / part[self.error]).abs()
            numbers = f"{len(part)} rows, the furthest off by {off.max():.2g} standard errors"
            return Verdict("holds" if off.max() <= self.errors else "fails", numbers)
        ratio = part[self.measure] / part[self.target]
        numbers = f"{len(part)} rows, between {ratio.min():.3g} and {ratio.max():.3g} times"
        near = 1 / self.factor <= ratio.min() and ratio.max() <= self.factor
        return Verdict("holds" if near else "fails", numbers)


@dataclass(frozen=True)
class Reaches:
    """In some cell, an arm is better than dense by at least so many percent.

    >>> Reaches("random-4", least=100.0)  # it doubles

    It holds if the 95 % interval of some cell lies above, and fails if those of all lie below. The
    improvement is that of the cell's mean, as in the paper's tables.
    """

    arm: str
    least: float
    along: str = "neurons"

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look at the interval of every cell."""
        part = pick(frame, {}, [self.arm, "dense"])
        found = [(*_improvement(cell, self.arm), at) for at, cell in part.groupby(self.along)]
        found = [one for one in found if not isnan(one[0])]
        if not found:
            return NOTHING
        mean, low, high, at = max(found)
        numbers = (
            f"most: {mean:.3g} % ({low:.3g} to {high:.3g}) at {self.along} = {at:g}; "
            f"asked: {self.least:g} %"
        )
        if max(low for _, low, _, _ in found) >= self.least:
            return Verdict("holds", numbers)
        below = max(high for _, _, high, _ in found) < self.least
        return Verdict("fails" if below else "not significant", numbers)


def _improvement(cell: DataFrame, arm: str) -> tuple[float, float, float]:
    """Return by how many percent an arm's mean is above dense's, and the interval of that."""
    table = cell.pivot(index="trial", columns="arm", values="accuracy").dropna()
    if len(table) < 3 or not {arm, "dense"} <= set(table.columns):
        return nan, nan, nan
    own, dense = table[arm].to_numpy(), table["dense"].to_numpy()
    picks = np.random.default_rng(0).integers(0, len(own), (2000, len(own)))
    several = 100 * (own[picks].mean(1) / dense[picks].mean(1) - 1)
    low, high = np.percentile(several, [2.5, 97.5])
    return 100 * (own.mean() / dense.mean() - 1), float(low), float(high)


@dataclass(frozen=True)
class Best:
    """Of all settings that were searched, these have the highest mean.

    >>> Best("accuracy", {"every": 100, "fraction": 0.3}, "dynamic-2")

    Only cells and trials that every setting has are compared: a search that was cut short would
    favour what was tried where it is easy.
    """

    measure: str
    settings: Mapping[str, object]
    arm: str

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the means over everything else."""
        part = pick(frame, {}, [self.arm])
        if not len(part) or self.measure not in part:
            return NOTHING
        table = part.pivot_table(
            index=["neurons", "trial"], columns=list(self.settings), values=self.measure
        ).dropna()
        means, ours = table.mean(), tuple(self.settings.values())
        if not len(table) or ours not in means.index or len(means) < 2:
            return NOTHING
        rest = means.drop(ours)
        numbers = (
            f"{means[ours]:.4g} over {len(table)} networks; the best of {len(rest)} other "
            f"settings {rest.max():.4g}, the worst {rest.min():.4g}"
        )
        return Verdict("holds" if means[ours] >= rest.max() else "fails", numbers)


@dataclass(frozen=True)
class Equivalent:
    """An arm is as good as dense networks with so many times its weights, at every width.

    >>> Equivalent("random-4", least=1.2)

    It holds where the lower end of every interval reaches the multiple, and fails where the upper
    end of some does not. A width that beats every dense network is left out if none of those was
    large enough to tell. See :func:`fissile.lab.stats.ratios`.
    """

    arm: str
    least: float
    at: int | None = None  # only this width

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look at every width, or at one."""
        found = ratios(frame, self.arm)
        if self.at is not None:
            found = found[found["neurons"] == self.at]
        low = found[["low", "bound"]].min(axis=1)
        told = found[~(np.isinf(found["low"].astype(float)) & (found["bound"] < self.least))]
        if not len(told):
            return NOTHING
        numbers = "; ".join(_range(row) for row in found.to_dict("records"))
        if (told["high"] < self.least).any():
            return Verdict("fails", numbers)
        held = (low[told.index] >= self.least).all()
        return Verdict("holds" if held else "not significant", numbers)


@dataclass(frozen=True)
class WarmedUp:
    """At the split, the dense network has a share of the accuracy that it converges to.

    >>> WarmedUp(0.95)

    One network of each cell trains until it has converged (see :mod:`fissile.lab.task`). The
    claim holds if every one had the share at the split, and fails if some had less.
    """

    least: float

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare every cell's accuracy at the split with its converged one."""
        part = pick(frame, {}, ["converged"])
        if not len(part) or "warm" not in part:
            return NOTHING
        share = (part["warm"] / part["accuracy"]).fillna(0.0)  # a network that diverged has nothing
        below, worst = int((share < self.least).sum()), part.loc[share.idxmin()]
        axes = [name for name in _AXES if name in part and part[name].nunique() > 1]
        where = ", ".join(f"{name} = {worst[name]:g}" for name in axes)
        numbers = (
            f"{share.min():.3f} to {share.max():.3f} of the converged accuracy, "
            f"mean {share.mean():.3f}; below {self.least:g} in {below} of {len(part)} "
            f"{plural('cell', len(part))}{f'; lowest at {where}' if where else ''}"
        )
        if rising := int(part["rising"].sum()) if "rising" in part else 0:
            numbers += f"; {rising} still rose when stopped"
        return Verdict("fails" if below else "holds", numbers)


#: What tells the cells of a study apart.
_AXES = ("clauses", "classes", "depth", "neurons")


def _range(row: Mapping[str, float]) -> str:
    ratio, low, high = (
        f"over {row['bound']:.2f}" if isinf(row[name]) else f"{row[name]:.2f}"
        for name in ("ratio", "low", "high")
    )
    return f"{row['neurons']:g} neurons: {ratio} ({low} to {high})"
