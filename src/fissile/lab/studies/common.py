"""What the Boolean studies share: their arms, and how much each scale trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fissile.lab.trial import Arm, Boolean, Trial

__all__ = ["DENSE", "FEW", "FULL", "READING", "TINY", "Effort", "both", "gram", "names"]

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


#: The paper leaves open how many samples there are, and its text and its algorithm A2 differ on the
#: false ones. This reading fits its tables best, all together: see docs/fidelity.md.
READING = Boolean(train=10_000, negatives="literal", others="arbitrary")

#: Enough to see that everything runs.
TINY = Effort(replace(READING, train=256, test=128), epochs=2)
#: The paper's training; a study's smaller scale has fewer cells and trials instead.
FULL = Effort(READING)
#: A tenth of the longest.
FEW = Effort(READING, epochs=100)
