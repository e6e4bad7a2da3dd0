"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check takes a table of results (see :mod:`fissile.lab.frame`) and returns a verdict. Those here
compare arms; those in :mod:`fissile.lab.trends` judge trends and single numbers. The p-values of
the cells that a claim tests are corrected for their number by Holm's method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from fissile._common.progress import number_of
from fissile.lab.frame import paired, pick
from fissile.lab.stats import ENOUGH, LEVEL, Array, holm, interval

if TYPE_CHECKING:
    from pandas import DataFrame

Status = Literal["holds", "not significant", "fails", "not tested here", "no data"]
#: What tells the cells of a study apart.
AXES = ("clauses", "classes", "depth", "neurons")


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and the numbers that say so."""

    status: Status
    numbers: str


#: Judges a claim by a table of results.
Check: TypeAlias = Callable[["DataFrame"], Verdict]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the check it is held to."""

    text: str
    source: str
    check: Check
    own: bool = False  # ours, not the paper's

    def __post_init__(self) -> None:
        if self.own and not self.text.startswith("Ours: "):
            object.__setattr__(self, "text", f"Ours: {self.text}")

    def judge(self, frame: DataFrame, changed: Mapping[str, object] | None = None) -> Verdict:
        """Return what became of the claim, where the user changed these settings.

        >>> claim.judge(results.frame, {"neurons": 16}).status
        'not tested here'

        Fewer than three trials prove nothing. Nothing is tested of a setting that was changed.
        """
        found, about = self.check(frame), _about(self.check)
        if not isinstance(found, Verdict):
            raise TypeError(f"its check returned {found!r}, and no Verdict")
        if told := ", ".join(f"{k}={v}" for k, v in (changed or {}).items() if k in about):
            there = "" if found.status == "no data" else f"; there: {found.numbers}"
            return Verdict("not tested here", f"run with {told}{there}")
        trials = 0
        if len(frame) and "trial" in frame:
            trials = frame.loc[frame["arm"] != "converged", "trial"].nunique()
        if found.status != "no data" and 0 < trials < getattr(self.check, "least_trials", ENOUGH):
            few = f"{number_of(trials, 'trial')} {'proves' if trials == 1 else 'prove'}"
            return Verdict("not significant", f"{few} nothing, it takes {ENOUGH}: {found.numbers}")
        return found


def _about(check: Check) -> set[str]:
    """Return the settings that a claim is about: the axes of studies, and what its check names."""
    names = set(getattr(check, "axes", (*AXES, "size", "literals")))
    for part in getattr(check, "checks", (check,)):
        along = getattr(part, "along", ())
        names |= {along} if isinstance(along, str) else set(along)
        names |= {*getattr(part, "where", ()), *getattr(part, "settings", ())}
    return names


def counts(verdicts: Iterable[Verdict]) -> dict[Status, int]:
    """Return how many claims came to each status, ours among them."""
    count = Counter(verdict.status for verdict in verdicts)
    return {status: count[status] for status in get_args(Status)}


NOTHING = Verdict("no data", "no finished trials to judge it by")


def verdict(fails: bool, holds: bool, numbers: str) -> Verdict:
    """Return a verdict; what fails does not hold."""
    return Verdict("fails" if fails else "holds" if holds else "not significant", numbers)


def signed(value: float, p: float) -> Status:
    """Judge a number that should be positive; without a p-value (NaN) it is not significant."""
    return verdict(p < LEVEL and value <= 0, p < LEVEL, "").status


def p_text(p: float) -> str:
    """Return a p-value as text."""
    return "no p-value" if isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def words(where: Mapping[str, object]) -> str:
    """Return settings as text."""
    return ", ".join(
        f"{name} = {value}" if isinstance(value, str) else f"{name} = {value:g}"
        for name, value in where.items()
    )


def pairs(cell: DataFrame, arm: str, over: str, measure: str = "accuracy") -> list[Array] | None:
    """Return the values of two arms in the trials that both have, if there are three."""
    table = cell.pivot(index="trial", columns="arm", values=measure).dropna()
    if len(table) < ENOUGH or not {arm, over} <= set(table.columns):
        return None  # two trials may agree by chance, and their interval would be a point
    return [table[name].to_numpy() for name in (arm, over)]


class _Cell(NamedTuple):
    """How much better an arm is in a cell, the p-value of that, and where it is."""

    gain: float
    p: float
    place: str

    @property
    def evidence(self) -> float:
        """How much the cell speaks for a claim, from -1 to 1."""
        return 0.0 if isnan(self.p) else (1 - self.p) * (1 if self.gain > 0 else -1)

    @property
    def text(self) -> str:
        return f"{self.gain:+.3g} ({p_text(self.p)})"


def _counted(cells: Sequence[_Cell]) -> tuple[int, int, _Cell]:
    """Return how many cells are significantly better, how many worse, and the weakest, by Holm."""
    corrected = holm([cell.p for cell in cells])
    cells = [cell._replace(p=p) for cell, p in zip(cells, corrected, strict=True)]
    better = sum(cell.gain > 0 and cell.p < LEVEL for cell in cells)
    worse = sum(cell.gain < 0 and cell.p < LEVEL for cell in cells)
    return better, worse, min(cells, key=lambda cell: (cell.evidence, cell.gain))


@dataclass(frozen=True)
class Beats:
    """One arm is better than another in every cell, each tested trial by trial.

    >>> Beats("clause-4", "dense", along=("neurons",), where={"clauses": 8})

    It holds if every cell is better with p < 0.05, by Holm's correction, and fails if some cell is
    significantly worse. Anything between is not significant.
    """

    arm: str
    over: str = "dense"
    measure: str = "accuracy"
    along: Sequence[str] = ("neurons",)
    where: Mapping[str, object] = field(default_factory=dict)
    lower: bool = False

    def __call__(self, frame: DataFrame) -> Verdict:
        return Together((self,))(frame)

    def compared(self, frame: DataFrame) -> Iterator[_Cell]:
        """Compare the arms trial by trial in every cell that has both."""
        for place, cell in self.cells(frame):
            found = paired(cell, self.arm, self.over, self.measure)
            if found is not None:
                yield _Cell(found.difference * (-1 if self.lower else 1), found.p, place)

    def cells(self, frame: DataFrame) -> Iterator[tuple[str, DataFrame]]:
        """Yield every cell, and the words for its place."""
        part = pick(frame, self.where, [self.arm, self.over])
        if len(part) and self.measure in part:
            for values, cell in part.groupby(list(self.along), sort=True):
                yield words(dict(zip(self.along, values, strict=True))), cell


@dataclass(frozen=True)
class Together:
    """Several comparisons that a sentence makes at once; it may except ``spare`` of their cells."""

    checks: tuple[Beats, ...]
    spare: int = 0

    def __call__(self, frame: DataFrame) -> Verdict:
        cells = [
            cell._replace(place=f"{cell.place}, {check.arm}") if len(self.checks) > 1 else cell
            for check in self.checks
            for cell in check.compared(frame)
        ]
        if not cells:
            return NOTHING
        better, worse, weakest = _counted(cells)
        up, down = ("lower", "higher") if self.checks[0].lower else ("higher", "lower")
        numbers = (
            f"{better} of {number_of(len(cells), 'cell')} significantly {up}, "
            f"{worse} significantly {down}; weakest: {weakest.text} at {weakest.place}"
        )
        # A few cells that are mostly spared would prove nothing.
        enough = better >= len(cells) - self.spare and len(cells) > 2 * self.spare
        return verdict(worse > self.spare, enough, numbers)


@dataclass(frozen=True)
class Often(Beats):
    """One arm is significantly better than another in more than half of the cells.

    It fails if less than half are better at all, and more are significantly worse than better.
    """

    def __call__(self, frame: DataFrame) -> Verdict:
        cells = list(self.compared(frame))
        if not cells:
            return NOTHING
        higher = sum(cell.gain > 0 for cell in cells)
        better, worse, _ = _counted(cells)
        numbers = (
            f"better in {higher} of {number_of(len(cells), 'cell')}, significantly in {better}; "
            f"significantly worse in {worse}"
        )
        fails = 2 * higher < len(cells) and worse > better
        return verdict(fails, 2 * better > len(cells), numbers)


@dataclass(frozen=True)
class Leads:
    """In every cell an arm is at least level with whichever other has the highest mean there.

    >>> Leads("recipe", ("dense", "fpe-4", "l1"))

    It holds if no cell is significantly worse and at least half are significantly better; it fails
    if some cell is worse. As the best is chosen afterwards, it is stricter than one comparison.
    """

    arm: str
    others: tuple[str, ...]

    def __call__(self, frame: DataFrame) -> Verdict:
        cells = []
        part = pick(frame, {}, [self.arm, *self.others]) if len(frame) else frame
        for at, cell in part.groupby("neurons", sort=True) if len(part) else ():
            means = cell.groupby("arm")["accuracy"].mean()
            if self.arm in means and len(means) > 1:
                other = str(means.drop(self.arm).idxmax())
                found = paired(cell, self.arm, other, "accuracy")
                if found is not None:
                    cells.append(_Cell(*found, f"{other} at neurons = {at:g}"))
        if not cells:
            return NOTHING
        better, worse, weakest = _counted(cells)
        numbers = (
            f"better than the best other in {better} of {number_of(len(cells), 'cell')}, "
            f"worse in {worse}; weakest: {weakest.text} against {weakest.place}"
        )
        return verdict(worse > 0, 2 * better >= len(cells), numbers)


@dataclass(frozen=True)
class Alike(Beats):
    """Two arms are level: in every cell they differ by no more than a margin.

    >>> Alike("gram-4", "random-4", within=1.0)  # points of accuracy

    It holds if the 95 % interval of every difference lies within the margin, and fails if one lies
    outside it.
    """

    within: float = 1.0

    def __call__(self, frame: DataFrame) -> Verdict:
        intervals = []
        for place, cell in self.cells(frame):
            if sides := pairs(cell, self.arm, self.over, self.measure):
                intervals.append((*interval(sides[0] - sides[1]), place))
        if not intervals:
            return NOTHING
        low, high, place = max(intervals, key=lambda found: max(abs(found[0]), abs(found[1])))
        numbers = (
            f"the furthest apart at {place}: difference between {low:+.2f} and {high:+.2f} with "
            f"95 % confidence, {number_of(len(intervals), 'cell')}, margin {self.within:g}"
        )
        apart = any(low > self.within or high < -self.within for low, high, _ in intervals)
        level = all(-self.within <= low and high <= self.within for low, high, _ in intervals)
        return verdict(apart, level, numbers)
