"""From trials to numbers: train them side by side, then measure everything the studies ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fissile import measure
from fissile.bank import Arm as BankArm
from fissile.bank import Bank, Data, Dense, Expand, Group, Spec
from fissile.bank.progress import quiet
from fissile.chain import first_hidden
from fissile.data import Samples, dnf_task
from fissile.draw import Draw, seeded
from fissile.errors import FissileError
from fissile.lab.trial import Arm, Boolean, Sampling, Trial, Work
from fissile.layers import SparseLinear, weight_of
from fissile.split import Blocks, Gram, Split, resolve_split
from fissile.theory import required_width

__all__ = ["Outcome", "compute"]

OnSteps = Callable[[float], None]


@dataclass(frozen=True)
class Outcome:
    """What one trial came to."""

    work: Work
    measures: dict[str, float]
    seconds: float
    arrays: dict[str, Tensor] = field(default_factory=dict)


def compute(
    works: Sequence[Work], device: str = "cpu", on_steps: OnSteps | None = None
) -> list[Outcome]:
    """Run trials that can go side by side (see ``batch_key``) and return what each came to.

    >>> compute([Trial(warm_up=1, fine_tune=1)])[0].measures["accuracy"]

    It depends on nothing but its arguments, so any executor may run it anywhere. ``on_steps`` is
    told the share of the training that is done.
    """
    begin = time.perf_counter()
    if isinstance(works[0], Sampling):
        found = [Outcome(work, _sampled(work), 0.0) for work in works if isinstance(work, Sampling)]
    else:
        found = _trained([work for work in works if isinstance(work, Trial)], device, on_steps)
    # Side by side, nobody has seconds of their own: the time is shared out by estimated cost.
    per_cost = (time.perf_counter() - begin) / sum(one.work.cost for one in found)
    return [replace(one, seconds=per_cost * one.work.cost) for one in found]


# --- networks


def _trained(trials: Sequence[Trial], device: str, on_steps: OnSteps | None) -> list[Outcome]:
    networks = list(dict.fromkeys(trial.network() for trial in trials))
    arms = list(dict.fromkeys(trial.arm for trial in trials))
    if len(networks) * len(arms) != len(trials):
        raise FissileError("trials that are computed together must have the same arms")
    tasks = _Tasks()
    bank = Bank([_spec(network, tasks) for network in networks], device=device)
    warm_up, fine_tune = networks[0].warm_up, networks[0].fine_tune
    share = _Share(on_steps, len(networks) * warm_up + len(trials) * fine_tune)
    bank.train(until=warm_up, progress=share)
    warm = bank.last if warm_up else torch.full((len(networks),), torch.nan)
    branched = bank.branch({repr(arm): _bank_arm(arm, networks[0].task.size) for arm in arms})
    branched.train(until=warm_up + fine_tune, progress=share)
    table = _measured(branched, tasks)
    table["warm"] = warm.repeat_interleave(len(arms))
    place = {
        (network, arm): i * len(arms) + a
        for i, network in enumerate(networks)
        for a, arm in enumerate(arms)
    }
    lost = set(branched.diverged)
    outcomes = []
    for trial in trials:
        row = place[trial.network(), trial.arm]
        measures = {name: float(column[row]) for name, column in table.items()}
        measures["diverged"] = float(row in lost)
        arrays = _pictures(branched, row) if trial.pictures else {}
        outcomes.append(Outcome(trial, measures, 0.0, arrays))
    return outcomes


class _Share(quiet):
    """Turns a bank's progress into the share of a batch that is done."""

    def __init__(self, on_steps: OnSteps | None, epochs: int) -> None:
        self._tell, self._epochs, self._done = on_steps, epochs, 0

    def advance(self, epochs: int, steps: int) -> None:
        """Count the epochs, of all networks together."""
        self._done += epochs
        if self._tell is not None:
            self._tell(self._done / self._epochs)


class _Tasks:
    """Data sets by task and trial, made once and found again from the bank's side."""

    def __init__(self) -> None:
        self._made: dict[tuple[Boolean, int], tuple[Data, Samples]] = {}
        self.tests: dict[tuple[object, ...], tuple[Boolean, Samples]] = {}

    def __call__(self, task: Boolean, number: int) -> Data:
        if (task, number) not in self._made:
            train, test = dnf_task(
                task.clauses, task.size, train=task.train, test=task.test, seed=number,
                negatives=task.negatives, others=task.others,
            )  # fmt: skip
            data = Data(train.x, train.y, test.x, test.y)
            self._made[task, number] = data, test
            self.tests[data.key()] = task, test
        return self._made[task, number][0]


def _spec(trial: Trial, tasks: _Tasks) -> Spec:
    return Spec(
        [trial.task.literals, trial.neurons, 1],
        tasks(trial.task, trial.number),
        seed=trial.number,
        recipe=trial.recipe,
        embedding=trial.embedding,
    )


def _bank_arm(arm: Arm, size: int) -> BankArm:
    if arm.split == "dense":
        return Dense()
    return Expand(arm.alpha, _split(arm, size), moments=arm.moments)


def _split(arm: Arm, size: int) -> Split:
    if arm.split == "clause":
        return _Clauses(size)
    return Gram(arm.clusters) if arm.split == "gram" else resolve_split(arm.split)


class _Clauses(Blocks):
    """The clause-aware split; where clauses are fewer than children, some get no input."""

    def deal(self, weight: Tensor, alpha: int, draw: Draw) -> Tensor:
        """Deal whole clauses."""
        return super().deal(weight, min(alpha, weight.shape[-1] // self.size), draw)


# --- measures

_NAMES = (
    "capacity", "cosine", "absolute_cosine", "diagonal_cosine", "collisions", "agreement",
    "adjusted_rand", "coded",
)  # fmt: skip


def _measured(bank: Bank, tasks: _Tasks) -> dict[str, Tensor]:
    table = {"accuracy": bank.last, "best": bank.best, "nonzeros": bank.nonzeros}
    if any(member.spec.embedding for member in bank.members):
        return table  # the features sit behind the embedding, not in the columns of W1
    columns = bank.measure(lambda group: torch.stack(_interference(group, tasks), -1))
    return table | dict(zip(_NAMES, columns.unbind(-1), strict=True))


def _interference(group: Group, tasks: _Tasks) -> list[Tensor]:
    """Measure networks of one shape, whose formulas have one shape too."""
    bias, out = group.biases[group.first], group.weights[group.first + 1][..., 0, :]
    assert bias is not None
    clauses = tasks.tests[group.specs[0].data.key()][0].formula.groups
    seeds = torch.tensor([spec.seed for spec in group.specs])
    recovered = measure.recovery(group.w1, clauses, seeded(seeds))
    absolute = measure.cosine(group.w1, absolute=True)
    directed = (group.w1 != 0).any(-1).sum(-1).clamp(min=1)  # a neuron without weights has no angle
    return [
        measure.total_capacity(group.w1, clauses),
        measure.cosine(group.w1),
        absolute,
        (1 + (directed - 1) * absolute) / directed,  # each neuron compared with itself too
        _collisions(group, bias, tasks),
        recovered.agreement,
        recovered.adjusted_rand,
        measure.coded_clauses(group.w1, bias, out, clauses),
    ]


def _collisions(group: Group, bias: Tensor, tasks: _Tasks) -> Tensor:
    """Count collisions network by network: the test samples of all at once would not fit."""
    found = []
    for row, spec in enumerate(group.specs):
        task, test = tasks.tests[spec.data.key()]
        satisfied = task.formula.satisfied(test.bits)
        found.append(measure.collisions(group.w1[row], bias[row], test.x, test.bits, satisfied))
    return torch.stack(found)


@torch.no_grad()
def _pictures(bank: Bank, row: int) -> dict[str, Tensor]:
    """Return the first layer of one network, NaN where a weight does not exist."""
    layer = first_hidden(bank.take(row)[0])
    weight = weight_of(layer).clone()
    if isinstance(layer, SparseLinear):
        weight[~layer.pattern()] = torch.nan
    return {"w1": weight}


# --- theory


def _sampled(work: Sampling) -> dict[str, float]:
    net = work.formula
    seen = net.simulate(work.networks, seed=work.number)
    measures = {
        "coverage": net.coverage,
        "coverage_bound": net.coverage_bound,
        "coverage_approx": net.coverage_approx,
        "coverage_simulated": seen.coverage,
        "coverage_error": seen.coverage_error,
        "collision_ratio": net.collision_ratio,
        "collision_ratio_approx": net.collision_ratio_approx,
        "collision_ratio_simulated": seen.collisions / net.collisions_dense,
        "collision_ratio_error": seen.collisions_error / net.collisions_dense,
    }
    width = required_width(work.eps, work.literals, work.size, work.alpha)
    return measures | {
        "width": width.exact,
        "width_bound": width.bound,
        "width_approx": width.approx,
    }
