"""A network on its way through the warm-up or one arm, and who carries it a step further."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch.optim import Adam

from fissile._common.errors import FissileError
from fissile.bank.loop import Recipe
from fissile.bank.spec import Arm, Dense, Expand
from fissile.bank.vision.backbone import ConvNet
from fissile.expansion.expand import expand

__all__ = ["Job", "Outcome", "Runner", "make_adam"]


@dataclass(frozen=True)
class Outcome:
    """What an epoch came to."""

    loss: float  # the mean of the task's loss over the training samples
    accuracy: float  # on the test set, after the epoch


class Runner(Protocol):
    """A job at work on a device."""

    def steps(self, epoch: int) -> Iterator[None]:
        """Train one epoch, stopping after each step so that others can go on beside it."""

    def outcome(self) -> Outcome | None:
        """Return what the epoch came to; if it was not finite, go back to its start: None."""

    def close(self) -> None:
        """Bring weights and moments home to the job's model and Adam, on the CPU."""


@dataclass
class Job:
    """A model and its Adam, at home on the CPU, and what is left to do."""

    number: int  # of the network
    arm: str | None  # None for the warm-up
    seed: int
    model: ConvNet
    adam: Adam
    epoch: int
    until: int
    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    diverged: bool = False

    @property
    def done(self) -> bool:
        """Tell whether nothing is left to do."""
        return self.epoch >= self.until

    def record(self, outcome: Outcome | None) -> None:
        """Take an epoch's outcome; a network that diverged stays as it is, and is done."""
        self.diverged = outcome is None
        rest = self.until - self.epoch if outcome is None else 1
        self.accuracy += [float("nan") if outcome is None else outcome.accuracy] * rest
        self.loss += [float("nan") if outcome is None else outcome.loss] * rest
        self.epoch += rest

    def branch(self, name: str, arm: Arm, until: int, recipe: Recipe) -> Job:
        """Return a copy of this network as the arm makes it; this one stays as it is."""
        model, adam = copy.deepcopy((self.model, self.adam))
        if isinstance(arm, Expand) and not self.diverged:
            how = {"seed": self.seed, "budget": arm.budget, "optimizer": adam}
            model.head = expand(model.head, arm.alpha, arm.split, **how)  # type: ignore[arg-type]
            if arm.moments == "fresh":
                adam = make_adam(model, recipe)
        return replace(
            self, arm=name, model=model, adam=adam, until=until,
            accuracy=list(self.accuracy), loss=list(self.loss),
        )  # fmt: skip


def check_arm(name: str, arm: Arm) -> None:
    """Refuse the arms that only the bank can train."""
    if not isinstance(arm, Dense | Expand):
        raise FissileError(
            f"arm {name!r}: {type(arm).__name__} cannot be trained with a backbone; "
            "use Dense or Expand"
        )


def make_adam(model: ConvNet, recipe: Recipe) -> Adam:
    """Return the recipe's Adam; its L2 term is exactly this coupled weight decay."""
    return Adam(model.parameters(), recipe.lr, weight_decay=2 * recipe.l2)
