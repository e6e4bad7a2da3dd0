"""The paper's case study: eight clauses of four literals, eight neurons, each split in two.

Every trial warms up one dense network and goes on from it in three arms: the dense network itself,
split by clause, and split at random. All arms see the same batches in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fissile import measure
from fissile.budget import nonzeros
from fissile.data import Formula, Samples, dnf_task
from fissile.expand import expand
from fissile.layers import weight_of
from fissile.network import MLP
from fissile.split import Groups, Random, Split
from fissile.train import Recipe, accuracy, fit

__all__ = ["PAPER", "CaseStudy", "Outcome", "run_trial"]

#: Test accuracy in the paper's section 4.1, after 1000 + 1000 epochs.
PAPER = {"dense": 0.787, "random": 0.887, "clause": 0.994}


@dataclass(frozen=True)
class CaseStudy:
    """The settings; those the paper leaves open are the sample counts."""

    clauses: int = 8
    size: int = 4
    neurons: int = 8
    alpha: int = 2
    train: int = 10_000
    test: int = 2_000
    warm_up: int = 25
    fine_tune: int = 25

    @property
    def formula(self) -> Formula:
        """The formula to learn."""
        return Formula(self.clauses, self.size)

    def arms(self) -> dict[str, Split | None]:
        """Return the split of each arm, None for the dense one."""
        return {"dense": None, "random": Random(), "clause": Groups(self.formula.groups)}


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


def run_trial(
    study: CaseStudy, trial: int, on_epoch: Callable[[], object] | None = None
) -> list[Outcome]:
    """Run one trial: warm up, branch into the arms, fine-tune, measure.

    >>> [outcome.arm for outcome in run_trial(CaseStudy(warm_up=1, fine_tune=1), trial=0)]
    ['dense', 'random', 'clause']
    """
    train, test = dnf_task(
        study.clauses, study.size, train=study.train, test=study.test, seed=trial
    )
    torch.manual_seed(trial)
    recipe = Recipe()
    warm = MLP([study.formula.literals, study.neurons, 1])
    adam = torch.optim.Adam(warm.parameters(), recipe.lr)
    fit(
        warm, adam, train.x, train.y,
        epochs=study.warm_up, seed=trial, recipe=recipe, after_epoch=on_epoch,
    )  # fmt: skip
    outcomes = []
    for arm, split in study.arms().items():
        model: nn.Module
        model, optimizer = copy.deepcopy((warm, adam))
        if split is not None:
            model = expand(model, study.alpha, split, seed=trial, optimizer=optimizer)
        fit(
            model, optimizer, train.x, train.y,
            epochs=study.fine_tune, seed=trial, start=study.warm_up, recipe=recipe,
            after_epoch=on_epoch,
        )  # fmt: skip
        outcomes.append(_measured(study, arm, trial, model, test))
    return outcomes


@torch.no_grad()
def _measured(study: CaseStudy, arm: str, trial: int, model: nn.Module, test: Samples) -> Outcome:
    layer = model.get_submodule("layers.0")
    weight, groups = weight_of(layer), study.formula.groups
    satisfied = study.formula.satisfied(test.bits)
    return Outcome(
        arm=arm,
        trial=trial,
        accuracy=accuracy(model, test.x, test.y),
        nonzeros=nonzeros(model).weights,
        capacity=float(measure.total_capacity(weight, groups)),
        cosine=float(measure.cosine(weight, absolute=True)),
        collisions=float(
            measure.collisions(weight, layer.get_parameter("bias"), test.x, test.bits, satisfied)
        ),
        model=model,
    )
