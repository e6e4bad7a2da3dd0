"""The recommended recipe: of a few plans, the one that does best on held-out samples.

The budget counts everything that learns, biases too.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import Float, Int
from fissile.bank.sparse import SparseNet, module_of
from fissile.bank.sparse.plan import Plan
from fissile.bank.sparse.plan import recommended_plans as recommended
from fissile.bank.sparse.train import train
from fissile.bank.step import guess, network_losses
from fissile.data.sets import Labelled, chunks

Array = NDArray[Any]
#: Plans with their held-out accuracies.
Tried = list[tuple[Plan, float]]
#: Beyond these, weights that take the scale over would leave the range of a float.
_SMALLEST, _LARGEST = 1e-30, 1e30
#: With fewer training steps than this, plans with a high rate come first: others do not get far.
_FEW_STEPS = 3000
#: The epochs of a phase, and the steps that it has at least where its epochs are not given.
EPOCHS, STEPS = 25, 500
#: A loss that falls by more than this in the last tenth of its epochs has not converged.
_STILL_FALLS = 0.01
#: Plans are tried in a course of this share of the epochs, of at least ``STEPS`` steps. In shorter
#: ones, plans win that learn fast and later overfit.
_TRIED_SHARE = 0.5
#: More hidden neurons than this would take memory and time, and no data here wants them.
_MOST_HIDDEN = 1 << 14
#: Samples that go through a network at once when it predicts.
_ROWS = 1 << 14


#: For each recipe the other one, and the parameters that only the other one uses.
USED_ONLY_BY = {
    "best": ("paper", ("alpha", "split", "lr", "l1", "l2", "patience", "n_jobs")),
    "paper": ("best", ("tries",)),
}


# --- what is trained


def is_best(recipe: str | None, nonzeros: int | None, early_stopping: bool) -> bool:
    """Decide between the recipes.

    >>> is_best(None, nonzeros=5_000, early_stopping=False)
    True
    """
    if recipe not in ("best", "paper", None):
        raise FissileError(f'unknown recipe {recipe!r}; use "best", "paper" or None')
    if recipe == "best" and early_stopping:
        raise FissileError(
            'recipe="best" knows no early_stopping, it tries plans on held-out samples; leave '
            'early_stopping=False or use recipe="paper"'
        )
    wanted = nonzeros is not None and not early_stopping
    return wanted if recipe is None else recipe == "best"


def outputs_for(classes: int) -> int:
    """Return the outputs of a classifier: one for two classes, else one for each."""
    return 1 if classes == 2 else classes


def dense_size(inputs: int, hidden: int, outputs: int) -> int:
    """Return the number of parameters of ``MLP([inputs, hidden, outputs])``, biases included.

    >>> dense_size(64, 25, 10)
    1885
    """
    return hidden * (inputs + 1) + outputs * (hidden + 1)


def check_converged(steps: int, losses: Sequence[float] = ()) -> None:
    """Warn if a plan had few steps, or if a loss still fell in the last tenth of its epochs."""
    last = losses[-1 - max(1, len(losses) // 10) :]
    if steps < STEPS:  # a plan's rate falls to nothing, so its loss cannot tell
        reason = f"the network trained for {steps} steps, fewer than {STEPS}"
    elif len(last) > 1 and last[0] - last[-1] > _STILL_FALLS:
        reason = f"the loss still fell, from {last[0]:.4f} to {last[-1]:.4f} in the last epochs"
    else:
        return
    advice = "so training may not have converged; let warm_up and fine_tune be None or larger"
    warnings.warn(f"{reason}, {advice}", ConvergenceWarning, stacklevel=3)


def sensible(name: str, value: int, inputs: int, outputs: int) -> int:
    """Return a budget or a width, and refuse one that no sensible network has.

    >>> sensible("nonzeros", 5_000, inputs=64, outputs=10)
    5000
    """
    size = whole(name, value, least=1)
    most = dense_size(inputs, _MOST_HIDDEN, outputs) if name == "nonzeros" else _MOST_HIDDEN
    if size > most:
        raise FissileError(
            f"{name}={size} is more than a network of {inputs} inputs and {outputs} outputs can "
            f"use; give at most {most}"
        )
    return size


def budget_for(nonzeros: int | None, hidden: int | None, inputs: int, outputs: int) -> int:
    """Return the budget: as given, or what a dense network of that width takes.

    >>> budget_for(None, 25, inputs=64, outputs=10)
    1885
    """
    if hidden is not None:
        return dense_size(inputs, sensible("hidden", hidden, inputs, outputs), outputs)
    if nonzeros is None:
        raise FissileError('recipe="best" spends a budget; give one, such as nonzeros=5_000')
    budget = sensible("nonzeros", nonzeros, inputs, outputs)
    if budget <= outputs:
        raise FissileError(
            f"nonzeros={budget} is too small a budget: the biases of the outputs take {outputs}, "
            f"and there must be a weight; give at least {outputs + 1}"
        )
    return budget


def plans_for(budget: int, inputs: int, outputs: int, tries: int, steps: int) -> list[Plan]:
    """Return as many of the recommended plans as are to be tried."""
    plans = recommended(budget, inputs, outputs)
    if steps < _FEW_STEPS:
        plans.sort(key=lambda plan: -plan.lr)
    if whole("tries", tries, least=1) > len(plans):
        raise FissileError(f"tries={tries} is more than there are plans; give 1 to {len(plans)}")
    return plans[:tries]


def scale_of(x: Array) -> float:
    """Return the standard deviation of all numbers: what inputs are divided by.

    >>> scale_of(np.array([[-3.0, 3.0]]))
    3.0

    Where all numbers are the same, but for rounding, it is their size, and 1 if they are zero.
    """
    largest = max(float(x.max()), -float(x.min()))
    mean = float(x.mean(dtype=np.float64))
    squares = sum(float(np.square(part.astype(np.float64) - mean).sum()) for part in chunks(x))
    scale = math.sqrt(squares / x.size)
    if scale < 1e-6 * largest:
        scale = largest
    return min(max(scale, _SMALLEST), _LARGEST) if scale else 1.0


def can_hold_out(y: Array, share: float) -> bool:
    """Return whether every class has enough samples to be held out, and to be learned from."""
    _check_share(share)
    least = int(np.bincount(y).min())
    return least * min(share, 1 - share) >= 1


def held_out(x: Array, y: Array, share: float, seed: int) -> Labelled:
    """Return samples to train on and, from every class alike, a share to test on."""
    _check_share(share)
    return Labelled(x, y, x[:1], y[:1]).held_out(float(share), seed)


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise FissileError(f"validation_fraction={share!r} is no share; give one such as 0.1")


# --- the search


class SearchResult(NamedTuple):
    """A trained network, its plan, the plans that were tried, and its training loss."""

    module: SparseNet
    plan: Plan
    tried: Tried
    loss: float


@dataclass(frozen=True)
class PlanSearch:
    """Plans that are tried side by side; the best is trained on all samples.

    >>> PlanSearch(plans, outputs=10, epochs=50, batch=64).run(x, y, seeds=[0], hold=1).module

    ``weights`` has a number for each class: how much it counts in losses and accuracies.
    """

    plans: Sequence[Plan]
    outputs: int
    epochs: int
    batch: int
    share: float = 0.1
    weights: Array | None = None
    device: str = "cpu"
    verbose: bool = False

    def run(self, x: Array, y: Array, seeds: Sequence[int], hold: int) -> SearchResult:
        """Choose a plan, train it from every seed, return the network with the smallest loss.

        ``hold`` is the seed that decides which samples are held out.
        """
        scale = scale_of(x)
        scaled = x / scale
        tried: Tried = []
        plan = self.plans[0]
        if len(self.plans) > 1 and can_hold_out(y, self.share):
            plan, tried = self._tried(scaled, y, seeds[0], hold)
        modules = self._trained([plan], seeds, scaled, y, scale)
        labels = torch.tensor(y)
        ends = [self._mean(losses(logits(m, x), labels).numpy(), y) for m in modules]
        best = ends.index(min(ends))
        return SearchResult(modules[best], plan, tried, ends[best])

    def _tried(self, x: Array, y: Array, seed: int, hold: int) -> tuple[Plan, Tried]:
        """Return the plan to take, and all with their held-out accuracies."""
        parts = held_out(x, y, self.share, hold)
        steps = max(1, len(parts.x) // self.batch)
        fewest = max(math.ceil(_TRIED_SHARE * self.epochs), -(-STEPS // steps))
        few = replace(self, epochs=min(self.epochs, fewest))
        modules = few._trained(self.plans, [seed], parts.x, parts.y)
        scores = [self._score(module, parts.x_test, parts.y_test) for module in modules]
        if self.verbose:
            print("held-out accuracies:", ", ".join(f"{score:.4f}" for score in scores))
        return self.plans[scores.index(max(scores))], list(zip(self.plans, scores, strict=True))

    def _trained(
        self, plans: Sequence[Plan], seeds: Sequence[int], x: Array, y: Array, scale: float = 1.0
    ) -> list[SparseNet]:
        """Train every plan from every seed side by side; the networks of a seed come together."""
        what = f"plan {self.plans.index(plans[0]) + 1}" if len(plans) == 1 else "all plans"

        def show(epoch: int) -> None:
            if self.verbose:
                print(f"{what}, epoch {epoch} of {self.epochs}")

        stacks = train(
            plans, seeds, torch.from_numpy(x), torch.from_numpy(y),
            outputs=self.outputs, epochs=self.epochs, batch=self.batch, device=self.device,
            weights=self._sample_weights(y), on_epoch=show,
        )  # fmt: skip
        modules: dict[tuple[int, int], SparseNet] = {}
        for stack, places in stacks:
            for index in range(len(seeds) * len(places)):
                key = index // len(places), places[index % len(places)]
                modules[key] = module_of(stack, index, scale)
        return [modules[key] for key in sorted(modules)]

    def _sample_weights(self, y: Array) -> torch.Tensor | None:
        """Return how much every sample counts, 1 on average."""
        if self.weights is None:
            return None
        each = self.weights[y]
        check_weights(each)
        return torch.tensor(each / float(each.mean()), dtype=torch.float32)

    def _score(self, module: nn.Module, x: Array, y: Array) -> float:
        return self._mean(guess(logits(module, x)).numpy() == y, y)

    def _mean(self, each: Array, y: Array) -> float:
        weights = None if self.weights is None else self.weights[y]
        if weights is not None and not weights.any():  # nothing that was held out counts
            return 0.0
        return float(np.average(each, weights=weights))


def check_weights(weights: Array) -> None:
    """Refuse weights of classes that nothing can be learned by."""
    if not 0 < float(weights.mean()) < math.inf or bool((weights < 0).any()):
        raise FissileError(
            f"class_weight comes to {np.unique(weights).tolist()}; give finite weights, none of "
            "them negative and not all of them zero"
        )


@torch.no_grad()
def logits(model: nn.Module, x: Array) -> Float[Tensor, "samples outputs"]:
    """Return a network's logits, in double precision: no sample depends on its neighbours."""
    model = copy.deepcopy(model).double()
    return torch.cat(
        [model(torch.tensor(x[i : i + _ROWS]).double()) for i in range(0, len(x), _ROWS)]
    )


def losses(
    logits: Float[Tensor, "batch outputs"], y: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return the cross-entropy of every sample; one output separates two classes."""
    return network_losses(logits.unsqueeze(1), y.unsqueeze(1))
