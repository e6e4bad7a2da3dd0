"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check looks at a table of results (see :mod:`fissile.lab.frame`) and returns a verdict: it holds,
it fails, it is not significant, or there is no data to judge it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, hypot, inf, isnan, sqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fissile.lab.frame import cells, paired, pick
from fissile.lab.stats import LEVEL, Comparison, line

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "Beats",
    "Check",
    "Claim",
    "Explains",
    "Levels",
    "Near",
    "Often",
    "Status",
    "Together",
    "Trend",
    "Verdict",
]

Status = Literal["holds", "not significant", "fails", "no data"]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and the numbers that say so."""

    status: Status
    numbers: str


class Check(Protocol):
    """Judges a claim by a table of results."""

    def __call__(self, frame: DataFrame) -> Verdict:
        """Return the verdict."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the check it is held to."""

    text: str
    source: str
    check: Check


_NOTHING = Verdict("no data", "no finished trials to judge it by")


@dataclass(frozen=True)
class Beats:
    """One arm is better than another in every cell, each tested trial by trial.

    >>> Beats("clause-4", "dense", along=("neurons",), where={"clauses": 8})

    It holds if every cell is better with p < 0.05 (``spare`` cells excepted, where there are more
    than twice as many), and fails if more cells than are spared are significantly worse. Anything
    between is not significant.
    """

    arm: str
    over: str = "dense"
    measure: str = "accuracy"
    along: Sequence[str] = ("neurons",)
    where: Mapping[str, object] = field(default_factory=dict)
    lower: bool = False
    spare: int = 0

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the arms in every cell."""
        return Together((self,), self.spare)(frame)

    def cells(self, frame: DataFrame) -> Iterator[tuple[str, Comparison]]:
        """Compare the arms trial by trial in every cell that has both."""
        part = pick(frame, self.where, [self.arm, self.over])
        if not len(part) or self.measure not in part:
            return
        for values, cell in part.groupby(list(self.along), sort=True):
            found = paired(cell, self.arm, self.over, self.measure)
            if found is not None:
                named = zip(self.along, values, strict=True)
                yield ", ".join(f"{name} = {value:g}" for name, value in named), found

    def gain(self, found: Comparison) -> float:
        """Return how much better a cell is, the measure's direction considered."""
        return -found.difference if self.lower else found.difference


@dataclass(frozen=True)
class Together:
    """Several comparisons that a sentence makes at once; ``spare`` counts over all of them."""

    checks: tuple[Beats, ...]
    spare: int = 0

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare the arms in every cell of every comparison."""
        found = [
            (check.gain(one), one, f"{place}, {check.arm}" if len(self.checks) > 1 else place)
            for check in self.checks
            for place, one in check.cells(frame)
        ]
        if not found:
            return _NOTHING
        better = sum(gain > 0 and one.significant for gain, one, _ in found)
        worse = sum(gain < 0 and one.significant for gain, one, _ in found)
        gain, weakest, place = min(found, key=lambda one: _evidence(one[0], one[1].p))
        up, down = ("lower", "higher") if self.checks[0].lower else ("higher", "lower")
        numbers = (
            f"{better} of {len(found)} {_plural('cell', len(found))} significantly {up}, "
            f"{worse} significantly {down}; weakest: {gain:+.3g} ({_p(weakest.p)}) at {place}"
        )
        if worse > self.spare:
            return Verdict("fails", numbers)
        # A few cells that are mostly spared would prove nothing.
        enough = better >= len(found) - self.spare and len(found) > 2 * self.spare
        return Verdict("holds" if enough else "not significant", numbers)


@dataclass(frozen=True)
class Often(Beats):
    """One arm is better than another in more than half of the cells.

    It holds if more than half are significantly better. It fails if less than half are better at
    all, and more are significantly worse than better.
    """

    def __call__(self, frame: DataFrame) -> Verdict:
        """Count the cells."""
        found = [(self.gain(one), one.significant) for _, one in self.cells(frame)]
        if not found:
            return _NOTHING
        higher = sum(gain > 0 for gain, _ in found)
        better = sum(gain > 0 and sure for gain, sure in found)
        worse = sum(gain < 0 and sure for gain, sure in found)
        numbers = (
            f"better in {higher} of {len(found)} cells, significantly in {better}; "
            f"significantly worse in {worse}"
        )
        if 2 * higher < len(found) and worse > better:
            return Verdict("fails", numbers)
        return Verdict("holds" if 2 * better > len(found) else "not significant", numbers)


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
            return _NOTHING
        fit = line(part[self.along], part[self.measure])
        numbers = f"slope {fit.slope:+.3g} per unit of {self.along} ({_p(fit.p)}, n = {fit.count})"
        return Verdict(_signed(fit.slope if self.rises else -fit.slope, fit.p), numbers)


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
            return _NOTHING
        before, after = (line(side[self.along], side[self.measure]) for side in sides)
        drop, error = before.slope - after.slope, hypot(before.error, after.error)
        p = erfc(abs(drop) / error / sqrt(2)) if error else float(drop == 0)
        numbers = (
            f"slope {before.slope:+.3g} up to {self.beyond:g} {self.along}, "
            f"{after.slope:+.3g} beyond ({_p(p)})"
        )
        return Verdict(_signed(drop, p), numbers)


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
            return _NOTHING
        for arm in self.arms:
            part = pick(frame, self.where, ["dense", arm])
            if not len(part[part["arm"] == arm]):
                continue
            xs, ys = (_means(part, name, self.along, arm) for name in (self.x, self.y))
            fits[arm] = line(xs, ys)
        fits = {arm: fit for arm, fit in fits.items() if fit.count > 2}
        if not fits:
            return _NOTHING
        numbers = "; ".join(
            f"{arm}: R² = {fit.r2:.2f}, slope {fit.slope:+.3g} ({_p(fit.p)})"
            for arm, fit in fits.items()
        )
        each = [_signed(f.slope if self.rises else -f.slope, f.p) for f in fits.values()]
        if "fails" in each:
            return Verdict("fails", numbers)
        strong = all(fit.r2 >= self.least for fit in fits.values())
        sure = all(status == "holds" for status in each)
        return Verdict("holds" if strong and sure else "not significant", numbers)


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
            return _NOTHING
        if self.error is not None:
            off = ((part[self.measure] - part[self.target]) / part[self.error]).abs()
            numbers = f"{len(part)} rows, the furthest off by {off.max():.2g} standard errors"
            return Verdict("holds" if off.max() <= self.errors else "fails", numbers)
        ratio = part[self.measure] / part[self.target]
        numbers = f"{len(part)} rows, between {ratio.min():.3g} and {ratio.max():.3g} times"
        near = 1 / self.factor <= ratio.min() and ratio.max() <= self.factor
        return Verdict("holds" if near else "fails", numbers)


def _evidence(gain: float, p: float) -> float:
    """Return how much a cell speaks for a claim, from -1 to 1."""
    return 0.0 if isnan(p) else (1 - p) * (1 if gain > 0 else -1)


def _means(frame: DataFrame, measure: str, along: Sequence[str], arm: str) -> Any:
    found = cells(frame, measure, along)
    return found[found["arm"] == arm]["mean"].to_numpy()


def _signed(value: float, p: float) -> Status:
    """Judge a number that should be positive."""
    if isnan(p) or p >= LEVEL:
        return "not significant"
    return "holds" if value > 0 else "fails"


def _p(p: float) -> str:
    if isnan(p):
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
