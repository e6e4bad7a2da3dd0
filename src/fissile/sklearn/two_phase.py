"""The course of a training: warm-up, split, fine-tuning, each phase until its best epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sklearn.utils.parallel import Parallel, delayed

from fissile.expansion.split import Split
from fissile.sklearn.trainer import Curves, Network, Trainer, alone

__all__ = ["Course", "Outcome", "Tell", "say"]

#: Told an epoch's phase, its number there, its loss and, if anything is held out, its score.
Tell = Callable[[str, int, float, float | None], object]


@dataclass(frozen=True)
class Course:
    """How a network comes to be: the epochs of both phases, the split, and when to stop.

    >>> outcome = Course(warm_up=25, fine_tune=25, alpha=4, split=Random()).run(trainer)

    With ``patience``, a phase ends when the score of so many epochs has not been the best, and
    what is split or returned is the network of the best epoch.
    """

    warm_up: int
    fine_tune: int
    alpha: int
    split: Split
    patience: int | None = None
    tell: Tell | None = None

    def run(self, trainer: Trainer) -> Outcome:
        """Train a network from its first weights to the end."""
        outcome = Outcome()
        self._phase(trainer, "warm-up", self.warm_up, outcome)
        trainer.split(self.alpha, self.split)
        self._phase(trainer, "fine-tuning", self.fine_tune, outcome)
        outcome.network = trainer.take()
        return outcome

    def best(self, trainers: Sequence[Trainer], jobs: int | None = None) -> Outcome:
        """Train several networks, ``jobs`` at a time, and return the best."""
        found = Parallel(jobs, prefer="threads")(delayed(self.run)(one) for one in trainers)
        return max(found, key=lambda outcome: outcome.quality)  # type: ignore[no-any-return]

    def _phase(self, trainer: Trainer, name: str, epochs: int, outcome: Outcome) -> None:
        # Whoever looks at every epoch gets every epoch; otherwise one call trains them all.
        step = epochs if self.patience is None and self.tell is None else 1
        best, kept, since = -math.inf, None, 0
        for epoch in range(0, epochs, max(1, step)):
            curves = trainer.train(step)
            outcome.add(curves)
            if self.tell is not None:
                score = None if self.patience is None else curves.score[-1]
                self.tell(name, epoch + 1, curves.loss[-1], score)
            if self.patience is None:
                continue
            if curves.score[-1] > best:
                best, kept, since = curves.score[-1], trainer.take(), 0
            elif (since := since + 1) >= self.patience:
                break
        if kept is not None:
            trainer.put(kept)
            outcome.quality = best
        elif outcome.loss:
            outcome.quality = -outcome.loss[-1]


@dataclass
class Outcome:
    """A trained network and how it came to be; of two, the one of higher quality is kept."""

    loss: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    quality: float = -math.inf
    diverged: bool = False
    network: Network = None  # type: ignore[assignment]  # there at the end

    def add(self, curves: Curves) -> None:
        """Add the epochs a network has finished; a diverged one has finished none."""
        finished = [math.isfinite(loss) for loss in curves.loss]
        self.diverged |= not all(finished)
        self.loss += [loss for loss, done in zip(curves.loss, finished, strict=True) if done]
        self.score += [score for score, done in zip(curves.score, finished, strict=True) if done]


def say(phase: str, epoch: int, loss: float, score: float | None) -> None:
    """Print an epoch."""
    held_out = "" if score is None else f", held-out accuracy {score:.4f}"
    with alone:
        print(f"{phase} epoch {epoch}: loss {loss:.4f}{held_out}")
