"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check looks at a table of results (see :mod:`fissile.lab.frame`) and returns a verdict: it holds,
it fails, it is not significant, or there is no data to judge it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, hypot, inf, isinf, isnan, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from fissile.lab.frame import paired, pick
from fissile.lab.stats import LEVEL, Array, Line, interval, line, ratios

if TYPE_CHECKING:
    from pandas import DataFrame

Status = Literal["holds", "not significant", "fails", "no data"]


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
    own: bool = False  # ours, not the paper's: it is not counted among those

    def __post_init__(self) -> None:
        if self.own and not self.text.startswith("Ours: "):
            object.__setattr__(self, "text", f"Ours: {self.text}")


_NOTHING = Verdict("no data", "no finished trials to judge it by")


def _verdict(fails: bool, holds: bool, numbers: str) -> Verdict:
    return Verdict("fails" if fails else "holds" if holds else "not significant", numbers)


def _signed(value: float, p: float) -> Status:
    """Judge a number that should be positive."""
    significant = p < LEVEL  # which NaN is not
    return "not significant" if not significant else "holds" if value > 0 else "fails"


def _p_text(p: float) -> str:
    if isnan(p):
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _cells_text(count: int) -> str:
    return f"{count} {'cell' if count == 1 else 'cells'}"


def _words(where: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in where.items())


def _both(cell: DataFrame, arm: str, over: str, measure: str = "accuracy") -> list[Array] | None:
    """Return the values of two arms in the trials that both have, if there are three."""
    table = cell.pivot(index="trial", columns="arm", values=measure).dropna()
    if len(table) < 3 or not {arm, over} <= set(table.columns):
        return None  # two trials may agree by chance, and their interval would be a point
    return [table[name].to_numpy() for name in (arm, over)]


# --- arms compared cell by cell and trial by trial


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
        return f"{self.gain:+.3g} ({_p_text(self.p)})"


def _counted(found: Sequence[_Cell]) -> tuple[int, int, _Cell]:
    """Return how many cells are significantly better, how many worse, and the weakest."""
    better = sum(cell.gain > 0 and cell.p < LEVEL for cell in found)
    worse = sum(cell.gain < 0 and cell.p < LEVEL for cell in found)
    return better, worse, min(found, key=lambda cell: cell.evidence)


@dataclass(frozen=True)
class Beats:
    """One arm is better than another in every cell, each tested trial by trial.

    >>> Beats("clause-4", "dense", along=("neurons",), where={"clauses": 8})

    It holds if every cell is better with p < 0.05, and fails if some cell is significantly worse.
    Anything between is not significant.
    """

    arm: str
    over: str = "dense"
    measure: str = "accuracy"
    along: Sequence[str] = ("neurons",)
    where: Mapping[str, object] = field(default_factory=dict)
    lower: bool = False

    def __call__(self, frame: DataFrame) -> Verdict:
        return Together((self,))(frame)

    def _compared(self, frame: DataFrame) -> Iterator[_Cell]:
        """Compare the arms trial by trial in every cell that has both."""
        for place, cell in self._cells(frame):
            found = paired(cell, self.arm, self.over, self.measure)
            if found is not None:
                yield _Cell(found.difference * (-1 if self.lower else 1), found.p, place)

    def _cells(self, frame: DataFrame) -> Iterator[tuple[str, DataFrame]]:
        part = pick(frame, self.where, [self.arm, self.over])
        if len(part) and self.measure in part:
            for values, cell in part.groupby(list(self.along), sort=True):
                yield _words(dict(zip(self.along, values, strict=True))), cell


@dataclass(frozen=True)
class Together:
    """Several comparisons that a sentence makes at once.

    ``spare`` cells of all of them are excepted, where there are more than twice as many.
    """

    checks: tuple[Beats, ...]
    spare: int = 0

    def __call__(self, frame: DataFrame) -> Verdict:
        found = [
            cell._replace(place=f"{cell.place}, {check.arm}") if len(self.checks) > 1 else cell
            for check in self.checks
            for cell in check._compared(frame)
        ]
        if not found:
            return _NOTHING
        better, worse, weakest = _counted(found)
        up, down = ("lower", "higher") if self.checks[0].lower else ("higher", "lower")
        numbers = (
            f"{better} of {_cells_text(len(found))} significantly {up}, "
            f"{worse} significantly {down}; weakest: {weakest.text} at {weakest.place}"
        )
        # A few cells that are mostly spared would prove nothing.
        enough = better >= len(found) - self.spare and len(found) > 2 * self.spare
        return _verdict(worse > self.spare, enough, numbers)


@dataclass(frozen=True)
class Often(Beats):
    """One arm is better than another in more than half of the cells.

    It holds if more than half are significantly better. It fails if less than half are better at
    all, and more are significantly worse than better.
    """

    def __call__(self, frame: DataFrame) -> Verdict:
        found = list(self._compared(frame))
        if not found:
            return _NOTHING
        higher = sum(cell.gain > 0 for cell in found)
        better, worse, _ = _counted(found)
        numbers = (
            f"better in {higher} of {len(found)} cells, significantly in {better}; "
            f"significantly worse in {worse}"
        )
        fails = 2 * higher < len(found) and worse > better
        return _verdict(fails, 2 * better > len(found), numbers)


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

    def __call__(self, frame: DataFrame) -> Verdict:
        found = list(self._compared(frame))
        if not found:
            return _NOTHING
        better, worse, weakest = _counted(found)
        numbers = (
            f"better than the best other in {better} of {len(found)} cells, worse in {worse}; "
            f"weakest: {weakest.text} against {weakest.place}"
        )
        return _verdict(worse > 0, 2 * better >= len(found), numbers)

    def _compared(self, frame: DataFrame) -> Iterator[_Cell]:
        if not len(frame):
            return
        for at, cell in pick(frame, {}, [self.arm, *self.others]).groupby("neurons", sort=True):
            means = cell.groupby("arm")["accuracy"].mean()
            if self.arm in means and len(means) > 1:
                other = str(means.drop(self.arm).idxmax())
                found = paired(cell, self.arm, other, "accuracy")
                if found is not None:
                    yield _Cell(found.difference, found.p, f"{other} at neurons = {at:g}")


@dataclass(frozen=True)
class Alike(Beats):
    """Two arms are level: in every cell they differ by no more than a margin.

    >>> Alike("gram-4", "random-4", within=1.0)  # points of accuracy

    It holds if the 95 % interval of every cell's difference lies within the margin, and fails if
    some cell's lies outside it.
    """

    within: float = 1.0

    def __call__(self, frame: DataFrame) -> Verdict:
        sides = [
            (place, _both(cell, self.arm, self.over, self.measure))
            for place, cell in self._cells(frame)
        ]
        found = [(place, *interval(both[0] - both[1])) for place, both in sides if both]
        if not found:
            return _NOTHING
        place, low, high = max(found, key=lambda one: max(abs(one[1]), abs(one[2])))
        numbers = (
            f"the furthest apart at {place}: difference between {low:+.2f} and {high:+.2f} with "
            f"95 % confidence, {_cells_text(len(found))}, margin {self.within:g}"
        )
        apart = any(low > self.within or high < -self.within for _, low, high in found)
        level = all(-self.within <= low and high <= self.within for _, low, high in found)
        return _verdict(apart, level, numbers)


# --- trends along an axis, and single numbers


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
            return _NOTHING
        fit = fits[0]
        numbers = (
            f"slope {fit.slope:+.3g} per unit of {self.along} ({_p_text(fit.p)}, n = {fit.count})"
        )
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
            f"where {_words(where)}": pick(frame, where, [self.arm])
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
        return _NOTHING
    first, second = fits
    more, error = first.slope - second.slope, hypot(first.error, second.error)
    p = erfc(abs(more) / error / sqrt(2)) if error else float(more == 0)
    slopes = [f"{fit.slope:+.3g} {place}" for place, fit in zip(sides, fits, strict=True)]
    return Verdict(_signed(more, p), f"slope {', '.join(slopes)} ({_p_text(p)})")


@dataclass(frozen=True)
class Explains:
    """One measure goes with another over widths: a line through the means has an R² of 0.5."""

    y: str
    x: str
    arms: Sequence[str]
    where: Mapping[str, object] = field(default_factory=dict)
    rises: bool = True

    def __call__(self, frame: DataFrame) -> Verdict:
        if not {self.x, self.y} <= set(frame.columns):
            return _NOTHING
        fits = {}
        for arm in self.arms:
            part = pick(frame, self.where, [arm])
            means = part.groupby("neurons")[[self.x, self.y]].mean()
            fit = line(means[self.x], means[self.y])
            if fit.count > 2:
                fits[arm] = fit
        if not fits:
            return _NOTHING
        numbers = "; ".join(
            f"{arm}: R² = {fit.r2:.2f}, slope {fit.slope:+.3g} ({_p_text(fit.p)})"
            for arm, fit in fits.items()
        )
        each = [_signed(f.slope if self.rises else -f.slope, f.p) for f in fits.values()]
        strong = all(fit.r2 >= 0.5 for fit in fits.values())
        return _verdict("fails" in each, strong and set(each) == {"holds"}, numbers)


@dataclass(frozen=True)
class Near:
    """One column comes close to another: within four of its errors, or within a factor.

    >>> Near("coverage_simulated", "coverage", error="coverage_error")
    >>> Near("collision_ratio", "collision_ratio_approx", factor=2, where={"literals": 128})
    """

    measure: str
    target: str
    error: str | None = None
    factor: float = 1.0
    where: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, self.where)
        if not len(part) or self.measure not in part:
            return _NOTHING
        if self.error is not None:
            off = ((part[self.measure] - part[self.target]) / part[self.error]).abs()
            numbers = f"{len(part)} rows, the furthest off by {off.max():.2g} standard errors"
            return Verdict("holds" if off.max() <= 4 else "fails", numbers)
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

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, {}, [self.arm, "dense"])
        found = []
        for at, cell in part.groupby("neurons"):
            both = _both(cell, self.arm, "dense")
            if both:
                found.append((*_improvement(*both), at))
        if not found:
            return _NOTHING
        mean, low, high, at = max(found)
        numbers = (
            f"most: {mean:.3g} % ({low:.3g} to {high:.3g}) at neurons = {at:g}; "
            f"asked: {self.least:g} %"
        )
        reached = max(low for _, low, _, _ in found) >= self.least
        below = max(high for _, _, high, _ in found) < self.least
        return _verdict(below, reached, numbers)


def _improvement(own: Array, dense: Array) -> tuple[float, float, float]:
    """Return by how many percent an arm's mean is above dense's, and the interval of that."""
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
        part = pick(frame, {}, [self.arm])
        if not len(part) or self.measure not in part:
            return _NOTHING
        table = part.pivot_table(
            index=["neurons", "trial"], columns=list(self.settings), values=self.measure
        ).dropna()
        means, ours = table.mean(), tuple(self.settings.values())
        if not len(table) or ours not in means.index or len(means) < 2:
            return _NOTHING
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
        found = ratios(frame, self.arm)
        if self.at is not None:
            found = found[found["neurons"] == self.at]
        low = found[["low", "bound"]].min(axis=1)
        told = found[~(np.isinf(found["low"].astype(float)) & (found["bound"] < self.least))]
        if not len(told):
            return _NOTHING
        numbers = "; ".join(_range(row) for row in found.to_dict("records"))
        held = (low[told.index] >= self.least).all()
        return _verdict((told["high"] < self.least).any(), held, numbers)


@dataclass(frozen=True)
class WarmedUp:
    """At the split, the dense network has a share of the accuracy that it converges to.

    >>> WarmedUp(0.95)

    One network of each cell trains until it has converged (see :mod:`fissile.lab.task`). The
    claim holds if every one had the share at the split, and fails if some had less.
    """

    least: float

    def __call__(self, frame: DataFrame) -> Verdict:
        part = pick(frame, {}, ["converged"])
        if not len(part) or "warm" not in part:
            return _NOTHING
        share = (part["warm"] / part["accuracy"]).fillna(0.0)  # a network that diverged has nothing
        below, worst = int((share < self.least).sum()), part.loc[share.idxmin()]
        axes = [name for name in _AXES if name in part and part[name].nunique() > 1]
        where = _words({name: worst[name] for name in axes})
        numbers = (
            f"{share.min():.3f} to {share.max():.3f} of the converged accuracy, "
            f"mean {share.mean():.3f}; below {self.least:g} in {below} of "
            f"{_cells_text(len(part))}{f'; lowest at {where}' if where else ''}"
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
