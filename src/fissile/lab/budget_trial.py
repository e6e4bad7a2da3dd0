"""A trial of the frontier: one way to spend a budget of non-zeros, on one data set, once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from fissile._common.errors import FissileError, whole
from fissile.bank.sparse import Plan
from fissile.lab import cost
from fissile.lab.budget_methods import METHODS, SETTINGS
from fissile.lab.keys import key_of
from fissile.lab.task import Features

__all__ = ["SEARCHED", "Contender"]

#: The seeds that settings are searched with; no trial has one of these.
SEARCHED = (1_000_000, 1_000_001)


@dataclass(frozen=True)
class Contender:
    """A method, the budget of a dense network so wide, and the trial's number.

    >>> Contender(Features("clinc150-minilm"), neurons=8, method="gradual").budget
    4430

    Its six settings are tried on held-out training samples; the best is trained on all of them,
    and tested once. Trials of a cell share that search. On a processor it is the same whenever it
    is done; on a GPU sums depend on what is trained beside, and close settings may change places.
    """

    kind: ClassVar[str] = "contender"

    task: Features
    neurons: int = 8
    method: str = "dense"
    epochs: int = 50
    batch: int = 64
    number: int = 0

    def __post_init__(self) -> None:
        for name in ("neurons", "epochs", "batch"):
            whole(name, getattr(self, name), least=1)
        if whole("number", self.number, least=0) >= SEARCHED[0]:
            raise FissileError(f"number={self.number} is kept for searching; give a smaller one")
        if self.method not in METHODS:
            raise FissileError(
                f"there is no method {self.method!r}; there are {', '.join(METHODS)}"
            )

    @property
    def key(self) -> str:
        """The name of the result; whoever changes a method's plans gets new results."""
        return key_of(self, plans=repr(self.plans))

    @property
    def plans(self) -> list[Plan]:
        """The settings that the method may choose from."""
        return METHODS[self.method](self.budget, self.inputs, self.task.outputs)

    @property
    def inputs(self) -> int:
        """How many numbers a sample has."""
        return prod(self.task.entry.shape)

    @property
    def budget(self) -> int:
        """The parameters of a dense network with so many neurons, biases included."""
        outputs = self.task.outputs
        return self.neurons * (self.inputs + 1 + outputs) + outputs

    def network(self) -> Contender:
        """Return the cell, whose trials are computed together: they share its search."""
        return replace(self, number=0)

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be trained side by side."""
        return self.kind, self.task, self.epochs, self.batch

    @property
    def steps(self) -> int:
        """Count the training steps, a share of the search among them."""
        return self.epochs * -(-self.task.samples // self.batch) * (1 + SETTINGS // 3)

    @property
    def cost(self) -> float:
        """Estimate the cost; see :mod:`fissile.lab.cost`."""
        weights = max(plan.weights(self.inputs, self.task.outputs) for plan in self.plans)
        return self.steps * (1e-4 + weights * (5e-9 + 1.5e-10 * self.batch))

    @property
    def memory(self) -> int:
        """Estimate the bytes on a device.

        Two seeds of every setting are searched, once for all trials of a cell: they count for the
        first trial, and each other trial for the largest network that it could be.
        """
        each = [cost.plan_bytes(self, plan) for plan in self.plans]
        return 2 * sum(each) if self.number == 0 else max(each)

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table."""
        return {
            **self.task.columns(),
            "neurons": self.neurons,
            "budget": self.budget,
            "epochs": self.epochs,
            "arm": self.method,
            "trial": self.number,
        }
