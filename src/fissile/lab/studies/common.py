"""What the Boolean studies share: their arms, and how much each scale trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fissile.lab.study import Scale
from fissile.lab.trial import Arm, Boolean, Trial

__all__ = [
    "DENSE",
    "FEW",
    "FULL",
    "READING",
    "TINY",
    "Effort",
    "both",
    "cross",
    "gram",
    "names",
    "rows",
]

Number = tuple[float, float]  # a number of the paper and its spread
Row = tuple[Number, Number, Number]

DENSE = Arm()


def both(*alphas: int) -> tuple[Arm, ...]:
    """Return the arms of the Boolean studies: dense, and both splits at each alpha.

    >>> names(both(2))
    ('dense', 'clause-2', 'random-2')
    """
    return DENSE, *(Arm(split, alpha) for alpha in alphas for split in ("clause", "random"))


def gram(alpha: int) -> tuple[Arm, ...]:
    """Return the arms of the studies without known features: dense, Gram and random."""
    return DENSE, Arm("gram", alpha), Arm("random", alpha)


def names(arms: tuple[Arm, ...]) -> tuple[str, ...]:
    """Return what tables call the arms."""
    return tuple(arm.name for arm in arms)


@dataclass(frozen=True)
class Effort:
    """How much a scale trains: samples and epochs."""

    task: Boolean
    epochs: int = 25

    def trial(
        self,
        *,
        clauses: int = 8,
        neurons: int = 8,
        embedding: int | None = None,
        pictures: bool = False,
    ) -> Trial:
        """Return the setting of one cell, its arm and number left open."""
        return Trial(
            replace(self.task, clauses=clauses),
            neurons,
            embedding,
            warm_up=self.epochs,
            fine_tune=self.epochs,
            pictures=pictures,
        )


def cross(trials: int, effort: Effort, axis: Sequence[int]) -> Scale:
    """Return the two sweeps of the Boolean studies: over neurons and over clauses, around eight."""
    cells = [effort.trial(neurons=neurons) for neurons in axis]
    cells += [effort.trial(clauses=clauses) for clauses in axis if clauses != 8]
    return Scale(trials, tuple(cells))


def rows(arms: tuple[Arm, ...], values: Mapping[int, Row]) -> dict[int, dict[str, Number]]:
    """Return a table of the paper by place and arm: each number and its spread.

    >>> rows(both(4), {12: ((1.896, 0.377), (2.740, 0.114), (2.780, 0.133))})[12]["dense"]
    (1.896, 0.377)
    """
    return {place: dict(zip(names(arms), row, strict=True)) for place, row in values.items()}


#: The paper leaves open how many samples there are, and its text and its algorithm A2 differ on the
#: false ones. This reading follows the rules of docs/fidelity.md: A2 as printed, and the fewest
#: samples with which the warm-up comes within 95 % of convergence.
READING = Boolean(train=50_000, negatives="literal", others="matched")

#: Enough to see that everything runs.
TINY = Effort(replace(READING, train=256, test=128), epochs=2)
#: The paper's training; a study's smaller scale has fewer cells and trials instead.
FULL = Effort(READING)
#: A tenth of the longest.
FEW = Effort(READING, epochs=100)
