"""The paper's case study: eight clauses of four literals, eight neurons, each split in two.

Every trial warms up one dense network and goes on from it in three arms: the dense network itself,
split at random, and split by clause. All arms see the same batches in the same order, and all
trials are trained together in one bank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fissile import measure
from fissile.bank import Arm, Bank, Data, Dense, Expand, Progress, Spec
from fissile.budget import nonzeros
from fissile.data import Formula, Samples, dnf_task
from fissile.layers import weight_of
from fissile.split import Groups

__all__ = ["PAPER", "CaseStudy", "Outcome", "run"]

#: Test accuracy in the paper's section 4.1, after 1000 + 1000 epochs.
PAPER = {"dense": 0.787, "random": 0.887, "clause": 0.994}


@dataclass(frozen=True)
class CaseStudy:
    """The settings, those of the paper; it leaves the numbers of samples open."""

    clauses: int = 8
    size: int = 4
    neurons: int = 8
    alpha: int = 2
    train: int = 10_000
    test: int = 2_000
    warm_up: int = 1000
    fine_tune: int = 1000
    trials: int = 10

    @property
    def formula(self) -> Formula:
        """The formula to learn."""
        return Formula(self.clauses, self.size)

    def arms(self) -> dict[str, Arm]:
        """Return what each arm does at the split."""
        by_clause = Groups(self.formula.groups)
        return {
            "dense": Dense(),
            "random": Expand(self.alpha),
            "clause": Expand(self.alpha, by_clause),
        }


@dataclass(frozen=True)
class Outcome:
    """What one arm of one trial came to."""

    arm: str
    trial: int
    accuracy: float
    nonzeros: int
    capacity: float
    cosine: float
    collisions: float
    model: nn.Module


def run(study: CaseStudy, progress: Progress | None = None) -> list[list[Outcome]]:
    """Run all trials: warm up, branch into the arms, fine-tune, measure.

    >>> trials = run(CaseStudy(warm_up=1, fine_tune=1, trials=2))
    >>> [outcome.arm for outcome in trials[0]]
    ['dense', 'random', 'clause']
    """
    tasks = [
        dnf_task(study.clauses, study.size, train=study.train, test=study.test, seed=trial)
        for trial in range(study.trials)
    ]
    sizes = [study.formula.literals, study.neurons, 1]
    bank = Bank(
        [
            Spec(sizes, Data(train.x, train.y, test.x, test.y), seed=trial)
            for trial, (train, test) in enumerate(tasks)
        ]
    )
    bank.train(until=study.warm_up, progress=progress or False)
    arms = bank.branch(study.arms())
    arms.train(until=study.warm_up + study.fine_tune, progress=progress or False)
    outcomes = [
        _measured(study, arms, index, tasks[index // len(study.arms())][1])
        for index in range(len(arms))
    ]
    width = len(study.arms())
    return [outcomes[i : i + width] for i in range(0, len(outcomes), width)]


@torch.no_grad()
def _measured(study: CaseStudy, bank: Bank, index: int, test: Samples) -> Outcome:
    model, member = bank.take(index)[0], bank.members[index]
    layer = model.get_submodule("layers.0")
    weight, groups = weight_of(layer), study.formula.groups
    satisfied = study.formula.satisfied(test.bits)
    assert member.origin is not None
    return Outcome(
        arm=member.name,
        trial=member.origin,
        accuracy=float(bank.last[index]),
        nonzeros=nonzeros(model).weights,
        capacity=float(measure.total_capacity(weight, groups)),
        cosine=float(measure.cosine(weight, absolute=True)),
        collisions=float(
            measure.collisions(weight, layer.get_parameter("bias"), test.x, test.bits, satisfied)
        ),
        model=model,
    )
