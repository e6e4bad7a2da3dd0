"""Checks of single numbers: close to another, large enough, the best of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isinf
from typing import TYPE_CHECKING

from fissile.lab.claims.verdict import NOTHING, Verdict
from fissile.lab.equivalence import ratios
from fissile.lab.frame import cells, pick

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Best", "Equivalent", "Near", "Reaches"]


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
    """In some cell, an arm's mean is at least so high.

    >>> Reaches("improvement", "random-4", least=100.0)
    """

    measure: str
    arm: str
    least: float
    along: str = "neurons"

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look for the highest cell."""
        part = pick(frame, {}, [self.arm])
        if self.measure not in part or not len(part):
            return NOTHING
        found = cells(part, self.measure, [self.along])
        top = found.loc[found["mean"].idxmax()]
        numbers = (
            f"highest: {top['mean']:.3g} ± {top['error']:.2g} at {self.along} = "
            f"{top[self.along]:g}; asked: {self.least:g}"
        )
        return Verdict("holds" if top["mean"] >= self.least else "fails", numbers)


@dataclass(frozen=True)
class Best:
    """Of all settings that were searched, these have the highest mean.

    >>> Best("accuracy", {"every": 100, "fraction": 0.3, "grow": "gradient"})
    """

    measure: str
    settings: Mapping[str, object]
    arm: str = ""

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the means over everything else."""
        part = pick(frame, {}, [self.arm] if self.arm else [])
        if not len(part) or self.measure not in part:
            return NOTHING
        means = part.groupby(list(self.settings), sort=True)[self.measure].mean()
        ours = means.get(tuple(self.settings.values()))
        if ours is None:
            return NOTHING
        rest = means.drop(tuple(self.settings.values()))
        numbers = (
            f"{ours:.4g} over all widths and trials; the best of {len(rest)} others "
            f"{rest.max():.4g}, the worst {rest.min():.4g}"
        )
        return Verdict("holds" if ours >= rest.max() else "fails", numbers)


@dataclass(frozen=True)
class Equivalent:
    """An arm is as good as dense networks with so many times its weights, at every width.

    >>> Equivalent("random-4", least=1.2)

    It holds where the lower end of every interval reaches the multiple, and fails where the upper
    end of some does not. See :mod:`fissile.lab.equivalence`.
    """

    arm: str
    least: float
    at: int | None = None  # only this width

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look at every width, or at one."""
        found = ratios(frame, self.arm)
        if self.at is not None:
            found = found[found["neurons"] == self.at]
        if not len(found):
            return NOTHING
        numbers = "; ".join(_range(row) for row in found.to_dict("records"))
        if (found["high"] < self.least).any():
            return Verdict("fails", numbers)
        held = (found["low"] >= self.least).all()
        return Verdict("holds" if held else "not significant", numbers)


def _range(row: Mapping[str, float]) -> str:
    ratio, low, high = (
        "beyond all" if isinf(row[name]) else f"{row[name]:.2f}"
        for name in ("ratio", "low", "high")
    )
    return f"{row['neurons']:g} neurons: {ratio} ({low} to {high})"
