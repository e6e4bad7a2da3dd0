"""A claim, the check it is held to, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Literal, Protocol

from fissile.lab.stats import LEVEL

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["NOTHING", "Check", "Claim", "Status", "Verdict", "p_text", "plural", "signed"]

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
