"""The Boolean task in the lab: its samples, its networks, and what is measured of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile import measure
from fissile._common.random import Draw, seeded
from fissile.bank import Bank, Data, Group, Spec
from fissile.data import Samples, dnf_task
from fissile.expansion.split import Blocks
from fissile.lab.task import Boolean
from fissile.lab.trial import Trial
from fissile.layers import SparseLinear, weight_of
from fissile.layers.mlp import first_hidden
from fissile.measure.interference import collided


class Clauses(Blocks):
    """The clause-aware split; where clauses are fewer than children, some get no input."""

    def deal(self, weight: Tensor, alpha: int, draw: Draw) -> Tensor:
        """Deal whole clauses."""
        return super().deal(weight, min(alpha, weight.shape[-1] // self.size), draw)


class Formulas:
    """The networks of Boolean trials; data sets are made once for each task and number."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, int], Data] = {}
        self.tests: dict[tuple[object, ...], tuple[Boolean, Samples]] = {}

    def spec(self, trial: Trial) -> Spec:
        """Return a trial's network for the bank."""
        task, key = trial.task, (trial.task, trial.number)
        assert isinstance(task, Boolean)
        if key not in self._made:
            train, test = dnf_task(
                task.clauses, task.size, train=task.train, test=task.test, seed=trial.number,
                negatives=task.negatives, others=task.others,
            )  # fmt: skip
            self._made[key] = data = Data(train.x, train.y, test.x, test.y)
            self.tests[data.key()] = task, test
        return Spec(
            [task.literals, trial.neurons, 1],
            self._made[key],
            seed=trial.number,
            recipe=trial.recipe,
            embedding=trial.embedding,
        )

    def measures(self, bank: Bank) -> dict[str, Tensor]:
        """Measure interference, where features are the columns of W1."""
        if any(member.spec.embedding for member in bank.members):
            return {}  # they sit behind the embedding
        columns = bank.measure(lambda group: torch.stack(self._interference(group), -1))
        return dict(zip(_NAMES, columns.unbind(-1), strict=True))

    def _interference(self, group: Group) -> list[Tensor]:
        """Measure networks of one shape, whose formulas have one shape too."""
        w1, bias, out = group.w1, group.biases[group.first], group.weights[group.first + 1]
        assert bias is not None
        clauses = self.tests[group.specs[0].data.key()][0].formula.groups
        seeds = torch.tensor([spec.seed for spec in group.specs])
        absolute = measure.cosine(w1, absolute=True)
        directed = (w1 != 0).any(-1).sum(-1).clamp(min=1)  # a neuron without weights has no angle
        collisions = []  # network by network: the test samples of all at once would not fit
        for row, spec in enumerate(group.specs):
            task, test = self.tests[spec.data.key()]
            satisfied = task.formula.satisfied(test.bits)
            usage = measure.edge_usage(w1[row], bias[row], test.x, test.bits, satisfied)
            collisions.append(torch.stack([collided(usage, share) for share in (0.5, 0.0)]))
        most, some = torch.stack(collisions, -1).unbind()
        return [
            measure.total_capacity(w1, clauses),
            measure.cosine(w1),
            absolute,
            (1 + (directed - 1) * absolute) / directed,  # each neuron compared with itself too
            most,
            *measure.recovery(w1, clauses, seeded(seeds)),
            measure.coded_clauses(w1, bias, out[..., 0, :], clauses),
            *measure.recovery(w1, clauses, seeded(seeds), rows="cosine"),
            *measure.recovery(w1, clauses, seeded(seeds), rows="unit"),
            some,
        ]

    @torch.no_grad()
    def arrays(self, bank: Bank, row: int, before: Tensor) -> dict[str, Tensor]:
        """Return the first layer of one network, NaN where a weight does not exist."""
        layer = first_hidden(bank.take(row)[0])
        weight = weight_of(layer).clone()
        if isinstance(layer, SparseLinear):
            weight[~layer.pattern()] = torch.nan
        return {"w1": weight}


_NAMES = (
    "capacity", "cosine", "absolute_cosine", "diagonal_cosine", "collisions", "agreement",
    "adjusted_rand", "coded", "cosine_agreement", "cosine_adjusted_rand", "unit_agreement",
    "unit_adjusted_rand", "any_collisions",
)  # fmt: skip
