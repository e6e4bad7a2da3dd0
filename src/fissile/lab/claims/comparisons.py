"""A claim, its verdict, and checks that compare arms cell by cell and trial by trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Literal, Protocol

from fissile.lab.frame import paired, pick
from fissile.lab.stats import LEVEL, Comparison, interval

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "NOTHING",
    "Alike",
    "Beats",
    "Check",
    "Claim",
    "Leads",
    "Often",
    "Status",
    "Together",
    "Verdict",
    "p_text",
    "plural",
    "signed",
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
    own: bool = False  # ours, not the paper's: it is not counted among those

    def __post_init__(self) -> None:
        if self.own and not self.text.startswith("Ours: "):
            object.__setattr__(self, "text", f"Ours: {self.text}")


NOTHING = Verdict("no data", "no finished trials to judge it by")


def signed(value: float, p: float) -> Status:
    """Judge a number that should be positive."""
    if isnan(p) or p >= LEVEL:
        return "not significant"
    return "holds" if value > 0 else "fails"


def p_text(p: float) -> str:
    """Return a p-value as verdicts show it."""
    if isnan(p):
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def plural(word: str, count: int) -> str:
    """Return a word for one or several."""
    return word if count == 1 else word + "s"


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
        for place, cell in self._cells(frame):
            found = paired(cell, self.arm, self.over, self.measure)
            if found is not None:
                yield place, found

    def _cells(self, frame: DataFrame) -> Iterator[tuple[str, DataFrame]]:
        part = pick(frame, self.where, [self.arm, self.over])
        if not len(part) or self.measure not in part:
            return
        for values, cell in part.groupby(list(self.along), sort=True):
            named = zip(self.along, values, strict=True)
            yield ", ".join(f"{name} = {value:g}" for name, value in named), cell

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
            return NOTHING
        better = sum(gain > 0 and one.significant for gain, one, _ in found)
        worse = sum(gain < 0 and one.significant for gain, one, _ in found)
        gain, weakest, place = min(found, key=lambda one: _evidence(one[0], one[1].p))
        up, down = ("lower", "higher") if self.checks[0].lower else ("higher", "lower")
        numbers = (
            f"{better} of {len(found)} {plural('cell', len(found))} significantly {up}, "
            f"{worse} significantly {down}; weakest: {gain:+.3g} ({p_text(weakest.p)}) at {place}"
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
            return NOTHING
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
class Leads:
    """In every cell an arm is at least level with whichever other has the highest mean there.

    >>> Leads("recipe", ("dense", "fpe-4", "l1"))

    It holds if no cell is significantly worse and at least half are significantly better; it fails
    if some cell is worse. That the best is chosen after the fact makes this stricter than any
    single comparison.
    """

    arm: str
    others: tuple[str, ...]
    measure: str = "accuracy"
    along: str = "neurons"

    def __call__(self, frame: DataFrame) -> Verdict:
        """Compare with the best other arm, cell by cell."""
        found = list(self.cells(frame))
        if not found:
            return NOTHING
        better = sum(one.difference > 0 and one.significant for _, _, one in found)
        worse = [place for place, _, one in found if one.difference < 0 and one.significant]
        at, other, weakest = min(found, key=lambda one: _evidence(one[2].difference, one[2].p))
        numbers = (
            f"better than the best other in {better} of {len(found)} cells, worse in {len(worse)}; "
            f"weakest: {weakest.difference:+.3g} ({p_text(weakest.p)}) against {other} at "
            f"{self.along} = {at:g}"
        )
        if worse:
            return Verdict("fails", numbers)
        return Verdict("holds" if 2 * better >= len(found) else "not significant", numbers)

    def cells(self, frame: DataFrame) -> Iterator[tuple[float, str, Comparison]]:
        """Yield every cell that has the arm: where it is, its best other arm, and how they compare.

        >>> for neurons, other, found in Leads("recipe", others).cells(frame): ...
        """
        if not len(frame) or self.measure not in frame:
            return
        for at, cell in pick(frame, {}, [self.arm, *self.others]).groupby(self.along, sort=True):
            means = cell.groupby("arm")[self.measure].mean()
            if self.arm not in means or len(means) < 2:
                continue
            other = str(means.drop(self.arm).idxmax())
            found = paired(cell, self.arm, other, self.measure)
            if found is not None:
                yield float(at), other, found


@dataclass(frozen=True)
class Alike(Beats):
    """Two arms are level: in every cell they differ by no more than a margin.

    >>> Alike("gram-4", "random-4", within=1.0)  # points of accuracy

    It holds if the 95 % interval of every cell's difference lies within the margin, and fails if
    some cell's lies outside it.
    """

    within: float = 1.0

    def __call__(self, frame: DataFrame) -> Verdict:
        """Look at the interval of every cell."""
        found = [(place, *self._interval(cell)) for place, cell in self._cells(frame)]
        found = [one for one in found if not isnan(one[1])]
        if not found:
            return NOTHING
        place, low, high = max(found, key=lambda one: max(abs(one[1]), abs(one[2])))
        numbers = (
            f"the furthest apart at {place}: difference between {low:+.2f} and {high:+.2f} with "
            f"95 % confidence, {len(found)} {plural('cell', len(found))}, margin {self.within:g}"
        )
        if any(low > self.within or high < -self.within for _, low, high in found):
            return Verdict("fails", numbers)
        level = all(-self.within <= low and high <= self.within for _, low, high in found)
        return Verdict("holds" if level else "not significant", numbers)

    def _interval(self, cell: DataFrame) -> tuple[float, float]:
        sides = [
            cell[cell["arm"] == name].set_index("trial")[self.measure].dropna()
            for name in (self.arm, self.over)
        ]
        both = sides[0].index.intersection(sides[1].index)
        # Two trials may agree by chance, and their interval would be a point.
        return interval(sides[0][both] - sides[1][both]) if len(both) > 2 else (nan, nan)


def _evidence(gain: float, p: float) -> float:
    """Return how much a cell speaks for a claim, from -1 to 1."""
    return 0.0 if isnan(p) else (1 - p) * (1 if gain > 0 else -1)
