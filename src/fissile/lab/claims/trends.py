"""Checks of how a measure goes along an axis, or with another measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, hypot, inf, sqrt
from typing import TYPE_CHECKING, Any

from fissile.lab.claims.verdict import NOTHING, Verdict, p_text, signed
from fissile.lab.frame import cells, pick
from fissile.lab.stats import Line, line

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Explains", "Flatter", "Levels", "Trend"]


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
