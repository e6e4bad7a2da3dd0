"""What a claim is, what may become of it, and what the checks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from fissile.lab.stats import ENOUGH, LEVEL, Array

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

        Fewer than three trials prove nothing. Where a setting was changed that the claim is about,
        the verdict on the claim is that it was not tested.
        """
        found, about = self.check(frame), _about(self.check)
        if told := ", ".join(f"{k}={v}" for k, v in (changed or {}).items() if k in about):
            there = "" if found.status == "no data" else f"; there: {found.numbers}"
            return Verdict("not tested here", f"run with {told}{there}")
        trials = 0
        if len(frame) and "trial" in frame:
            trials = frame.loc[frame["arm"] != "converged", "trial"].nunique()
        if found.status != "no data" and 0 < trials < getattr(self.check, "least_trials", ENOUGH):
            few = "one trial proves" if trials == 1 else f"{trials} trials prove"
            return Verdict("not significant", f"{few} nothing, it takes {ENOUGH}: {found.numbers}")
        return found


def _about(check: Check) -> set[str]:
    """Return the settings that a claim is about: the axes of studies, and what its check names."""
    names = set(getattr(check, "axes", (*AXES, "size", "literals")))
    for one in getattr(check, "checks", (check,)):
        along = getattr(one, "along", ())
        names |= {along} if isinstance(along, str) else set(along)
        names |= set(getattr(one, "where", ())) | set(getattr(one, "settings", ()))
    return names


def counts(verdicts: Iterable[Verdict]) -> dict[Status, int]:
    """Return how many claims came to each status, ours among them.

    >>> counts([Verdict("holds", ""), Verdict("holds", "")])["holds"]
    2
    """
    found = Counter(one.status for one in verdicts)
    return {status: found[status] for status in get_args(Status)}


NOTHING = Verdict("no data", "no finished trials to judge it by")


def verdict(fails: bool, holds: bool, numbers: str) -> Verdict:
    """Return a verdict; what fails does not hold."""
    return Verdict("fails" if fails else "holds" if holds else "not significant", numbers)


def signed(value: float, p: float) -> Status:
    """Judge a number that should be positive."""
    significant = p < LEVEL  # which NaN is not
    return "not significant" if not significant else "holds" if value > 0 else "fails"


def p_text(p: float) -> str:
    """Return a p-value as text."""
    if isnan(p):
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def cells_text(count: int) -> str:
    """Return a number of cells as text."""
    return f"{count} {'cell' if count == 1 else 'cells'}"


def words(where: Mapping[str, object]) -> str:
    """Return settings as text."""
    return ", ".join(f"{name} = {value:g}" for name, value in where.items())


def both_arms(
    cell: DataFrame, arm: str, over: str, measure: str = "accuracy"
) -> list[Array] | None:
    """Return the values of two arms in the trials that both have, if there are three."""
    table = cell.pivot(index="trial", columns="arm", values=measure).dropna()
    if len(table) < ENOUGH or not {arm, over} <= set(table.columns):
        return None  # two trials may agree by chance, and their interval would be a point
    return [table[name].to_numpy() for name in (arm, over)]
