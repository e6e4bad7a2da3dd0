"""Checks of trends along an axis, of single numbers and of intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, hypot, inf, isinf, sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fissile._common.progress import number_of
from fissile.lab.claims import (
    AXES,
    NOTHING,
    Verdict,
    p_text,
    pairs,
    signed,
    verdict,
    words,
)
from fissile.lab.frame import pick
from fissile.lab.stats import Line, holm, line, ratios

if TYPE_CHECKING:
    from pandas import DataFrame


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
        part = pick(frame, self.where, [self.arm])
        fits = _fits(self.measure, self.along, part[part[self.along] <= self.until])
        if not fits:
            return NOTHING
        fit = fits[0]
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
        part = pick(frame, self.where, [self.arm])
        sides = {
            f"up to {self.beyond:g} {self.along}": part[part[self.along] <= self.beyond],
            "beyond": part[part[self.along] >= self.beyond],
        }
        return _steeper(self.measure, self.along, sides)


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
        sides = {
            f"where {words(where)}": pick(frame, where, [self.arm])
            for where in (self.where, self.than)
        }
        return _steeper(self.measure, self.along, sides)


def _fits(measure: str, along: str, *parts: DataFrame) -> list[Line]:
    """Return the line through each part; none if some part has too few trials for one."""
    few = any(len(part) < 3 or part[along].nunique() < 2 for part in parts)
    return [] if few or measure not in parts[0] else [line(p[along], p[measure]) for p in parts]


def _steeper(measure: str, along: str, sides: Mapping[str, DataFrame]) -> Verdict:
    """Judge whether the first side's line has a larger slope than the second's."""
    fits = _fits(measure, along, *sides.values())
    if not fits:
        return NOTHING
    first, second = fits
    more, error = first.slope - second.slope, hypot(first.error, second.error)
    p = erfc(abs(more) / error / sqrt(2)) if error else float(more == 0)
    slopes = [f"{fit.slope:+.3g} {place}" for place, fit in zip(sides, fits, strict=True)]
    return Verdict(signed(more, p), f"slope {', '.join(slopes)} ({p_text(p)})")


@dataclass(frozen=True)
class Explains:
    """One measure goes with another over cells: a line through the means has an R² of 0.5."""

    y: str
    x: str
    arms: Sequence[str]
    where: Mapping[str, object] = field(default_factory=dict)
    rises: bool = True
    along: Sequence[str] = ("neurons",)

    def __call__(self, frame: DataFrame) -> Verdict:
        if not {self.x, self.y} <= set(frame.columns):
            return NOTHING
        fits = {}
        for arm in self.arms:
            means = pick(frame, self.where, [arm]).groupby(list(self.along))
            means = means[[self.x, self.y]].mean()
            fit = line(means[self.x], means[self.y])
            if fit.count > 2:
                fits[arm] = fit
        if not fits:
            return NOTHING
        corrected = holm([fit.p for fit in fits.values()])
        numbers, each = [], []
        for (arm, fit), p in zip(fits.items(), corrected, strict=True):
            numbers.append(f"{arm}: R² = {fit.r2:.2f}, slope {fit.slope:+.3g} ({p_text(p)})")
            each.append(signed(fit.slope if self.rises else -fit.slope, p))
        strong = all(fit.r2 >= 0.5 for fit in fits.values())
        return verdict("fails" in each, strong and set(each) == {"holds"}, "; ".join(numbers))


@dataclass(frozen=True)
class Near:
    """One column comes close to another: within four of its errors, or within a factor.

    >>> Near("coverage_simulated", "coverage", error="coverage_error")
    >>> Near("collision_ratio", "collision_ratio_approx", factor=2, where={"literals": 128})
    """

    least_trials: ClassVar[int] = 1  # each row stands for many networks

    measure: str
    target: str
    error: str | None = None
    factor: float = 1.0
    where: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, self.where)
        if not len(part) or self.measure not in part:
            return NOTHING
        if self.error is not None:
            off = ((part[self.measure] - part[self.target]) / part[self.error]).abs()
            furthest = f"the furthest off by {off.max():.2g} standard errors"
            numbers = f"{number_of(len(part), 'row')}, {furthest}"
            return Verdict("holds" if off.max() <= 4 else "fails", numbers)
        ratio = part[self.measure] / part[self.target]
        numbers = (
            f"{number_of(len(part), 'row')}, between {ratio.min():.3g} and {ratio.max():.3g} times"
        )
        near = 1 / self.factor <= ratio.min() and ratio.max() <= self.factor
        return Verdict("holds" if near else "fails", numbers)


@dataclass(frozen=True)
class Reaches:
    """In some cell, an arm is better than dense by at least some percent.

    >>> Reaches("random-4", least=100.0)  # it doubles

    It holds if the 95 % interval of some cell lies above, and fails if those of all lie below. The
    improvement is that of the cell's mean, as in the paper's tables.
    """

    arm: str
    least: float

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, {}, [self.arm, "dense"])
        found = []
        for at, cell in part.groupby("neurons"):
            if sides := pairs(cell, self.arm, "dense"):
                own, dense = sides
                picks = np.random.default_rng(0).integers(0, len(own), (2000, len(own)))
                drawn = 100 * (own[picks].mean(1) / dense[picks].mean(1) - 1)
                low, high = np.percentile(drawn, [2.5, 97.5])
                found.append((100 * (own.mean() / dense.mean() - 1), low, high, at))
        if not found:
            return NOTHING
        mean, low, high, at = max(found)
        numbers = (
            f"most: {mean:.3g} % ({low:.3g} to {high:.3g}) at neurons = {at:g}; "
            f"asked: {self.least:g} %"
        )
        reached = max(low for _, low, _, _ in found) >= self.least
        below = max(high for _, _, high, _ in found) < self.least
        return verdict(below, reached, numbers)


@dataclass(frozen=True)
class Best:
    """These settings have the highest mean of all that were searched.

    >>> Best("accuracy", {"every": 100, "fraction": 0.3}, "dynamic-2")

    Cells and trials that some setting lacks are left out, as they may be easier than others.
    """

    measure: str
    settings: Mapping[str, object]
    arm: str

    def __call__(self, frame: DataFrame) -> Verdict:
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
            f"{means[ours]:.4g} over {number_of(len(table), 'network')}; the best of "
            f"{number_of(len(rest), 'other setting')} {rest.max():.4g}, the worst {rest.min():.4g}"
        )
        return Verdict("holds" if means[ours] >= rest.max() else "fails", numbers)


@dataclass(frozen=True)
class Equivalent:
    """An arm is as good as dense networks with some multiple of its weights, at every width.

    >>> Equivalent("random-4", least=1.2)

    It holds where the lower end of every interval reaches the multiple, and fails where the upper
    end of some does not. A width that beats every dense network is left out if none of those was
    large enough to tell. See :func:`fissile.lab.stats.ratios`.
    """

    arm: str
    least: float
    at: int | None = None  # only this width

    def __call__(self, frame: DataFrame) -> Verdict:
        found = ratios(frame, self.arm)
        if self.at is not None:
            found = found[found["neurons"] == self.at]
        low = found[["low", "bound"]].min(axis=1)
        told = found[~(np.isinf(found["low"].astype(float)) & (found["bound"] < self.least))]
        if not len(told):
            return NOTHING
        numbers = "; ".join(_multiple(row) for row in found.to_dict("records"))
        held = (low[told.index] >= self.least).all()
        return verdict((told["high"] < self.least).any(), held, numbers)


@dataclass(frozen=True)
class WarmedUp:
    """At the split, the dense network has a share of the accuracy that it converges to.

    >>> WarmedUp(0.95)

    One network of each cell trains until it has converged (see :mod:`fissile.lab.task`). The
    claim holds if every one had the share at the split, and fails if some had less.
    """

    axes: ClassVar[tuple[str, ...]] = ()  # it is asked of every network, whatever the study
    least_trials: ClassVar[int] = 1

    least: float

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, {}, ["converged"])
        if not len(part) or "warm" not in part:
            return NOTHING
        share = (part["warm"] / part["accuracy"]).fillna(0.0)  # a network that diverged has nothing
        below, worst = int((share < self.least).sum()), part.loc[share.idxmin()]
        axes = [name for name in AXES if name in part and part[name].nunique() > 1]
        where = words({name: worst[name] for name in axes})
        numbers = (
            f"{share.min():.3f} to {share.max():.3f} of the converged accuracy, "
            f"mean {share.mean():.3f}; below {self.least:g} in {below} of "
            f"{number_of(len(part), 'cell')}{f'; lowest at {where}' if where else ''}"
        )
        if rising := int(part["rising"].sum()) if "rising" in part else 0:
            numbers += f"; {rising} still rose when stopped"
        return Verdict("fails" if below else "holds", numbers)


def _multiple(row: Mapping[str, float]) -> str:
    ratio, low, high = (
        f"over {row['bound']:.2f}" if isinf(row[name]) else f"{row[name]:.2f}"
        for name in ("ratio", "low", "high")
    )
    return f"{row['neurons']:g} neurons: {ratio} ({low} to {high})"
