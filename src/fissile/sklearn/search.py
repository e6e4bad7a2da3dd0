"""The recommended course: of a few plans, the one that does best on samples held out for that."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.errors import FissileError, whole
from fissile.bank.sparse import SparseNet, module_of
from fissile.bank.sparse.plan import Plan
from fissile.bank.sparse.presets import plans as recommended
from fissile.bank.sparse.train import train
from fissile.data.sets import chunks
from fissile.sklearn.samples import can_hold_out, logits, parted
from fissile.sklearn.trainer import losses

__all__ = ["Best", "Chosen", "Tried", "epochs_for", "is_best", "plans_for", "scale_of"]

Array = NDArray[Any]
#: Plans with their accuracies on what was held out.
Tried = list[tuple[Plan, float]]
#: Beyond these, weights that take the scale over would leave the range of a float.
_SMALLEST, _LARGEST = 1e-30, 1e30
#: With fewer training steps than this, plans with a high rate come first: others do not get far.
_FEW_STEPS = 3000


class Chosen(NamedTuple):
    """A trained network, the plan it follows, what else was tried, and its training loss."""

    module: SparseNet
    plan: Plan
    tried: Tried
    loss: float


@dataclass(frozen=True)
class Best:
    """How a network comes to be: plans are tried side by side, the best is trained on everything.

    >>> Best(plans, outputs=10, epochs=50, batch=64).run(x, y, seeds=[0], hold=1).module

    ``weights`` say how much each class counts, in the loss and among the samples that are held out.
    """

    plans: Sequence[Plan]
    outputs: int
    epochs: int
    batch: int
    share: float = 0.1
    weights: Array | None = None
    device: str = "cpu"
    tell: Callable[[str], object] | None = None

    def run(self, x: Array, y: Array, seeds: Sequence[int], hold: int) -> Chosen:
        """Choose a plan, train it from every seed, return the one with the smallest loss.

        ``hold`` is the seed of what is held out.
        """
        scale = scale_of(x)
        scaled = x / scale
        tried: Tried = []
        if len(self.plans) > 1 and can_hold_out(y, self.share):
            tried = self._tried(scaled, y, seeds[0], hold)
        scores = [score for _, score in tried]
        plan = tried[scores.index(max(scores))][0] if tried else self.plans[0]
        modules = self._trained([plan], seeds, scaled, y, scale)
        found = [self._loss(module, x, y) for module in modules]
        best = found.index(min(found))
        return Chosen(modules[best], plan, tried, found[best])

    def _tried(self, x: Array, y: Array, seed: int, hold: int) -> Tried:
        parts = parted(x, y, self.share, hold)
        modules = self._trained(self.plans, [seed], parts.x, parts.y)
        scores = [self._score(module, parts.x_test, parts.y_test) for module in modules]
        if self.tell is not None:
            self.tell("held-out accuracies: " + ", ".join(f"{score:.4f}" for score in scores))
        return list(zip(self.plans, scores, strict=True))

    def _trained(
        self, plans: Sequence[Plan], seeds: Sequence[int], x: Array, y: Array, scale: float = 1.0
    ) -> list[SparseNet]:
        """Train every plan from every seed side by side; the networks of a seed come together."""
        what = f"plan {self.plans.index(plans[0]) + 1}" if len(plans) == 1 else "all plans"
        stacks = train(
            plans, seeds, torch.from_numpy(x), torch.from_numpy(y),
            outputs=self.outputs, epochs=self.epochs, batch=self.batch, device=self.device,
            weights=self._sample_weights(y),
            on_epoch=lambda epoch: self._say(what, epoch),
        )  # fmt: skip
        found: dict[tuple[int, int], SparseNet] = {}
        for stack, places in stacks:
            for index in range(len(seeds) * len(places)):
                key = index // len(places), places[index % len(places)]
                found[key] = module_of(stack, index, scale)
        return [found[key] for key in sorted(found)]

    def _say(self, what: str, epoch: int) -> None:
        if self.tell is not None:
            self.tell(f"{what}, epoch {epoch} of {self.epochs}")

    def _sample_weights(self, y: Array) -> torch.Tensor | None:
        """Return how much every sample counts, 1 on average."""
        if self.weights is None:
            return None
        each = self.weights[y]
        mean = float(each.mean())
        if not 0 < mean < math.inf or bool((each < 0).any()):
            raise FissileError(
                f"class_weight comes to {self.weights.tolist()}; give finite weights, none of them "
                "negative and not all of them zero"
            )
        return torch.tensor(each / mean, dtype=torch.float32)

    def _score(self, module: SparseNet, x: Array, y: Array) -> float:
        found = logits(copy.deepcopy(module).double(), x)
        guess = found.argmax(1) if found.shape[1] > 1 else found[:, 0] > 0
        return _mean(guess == y, None if self.weights is None else self.weights[y])

    def _loss(self, module: SparseNet, x: Array, y: Array) -> float:
        found = torch.from_numpy(logits(copy.deepcopy(module).double(), x))
        each = losses(found, torch.tensor(y)).numpy()
        return _mean(each, None if self.weights is None else self.weights[y])


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


def plans_for(budget: int, inputs: int, outputs: int, tries: int, steps: int) -> list[Plan]:
    """Return as many of the recommended plans as are to be tried."""
    plans = recommended(budget, inputs, outputs)
    if steps < _FEW_STEPS:
        plans.sort(key=lambda plan: -plan.lr)
    if whole("tries", tries, least=1) > len(plans):
        raise FissileError(f"tries={tries} is more than there are plans; give 1 to {len(plans)}")
    return plans[:tries]


def epochs_for(warm_up: int, fine_tune: int) -> int:
    """Return the epochs of a network that has no phases."""
    epochs = whole("warm_up", warm_up, least=0) + whole("fine_tune", fine_tune, least=0)
    if not epochs:
        raise FissileError('recipe="best" prunes while it trains; let warm_up + fine_tune be 1')
    return epochs


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


def _mean(each: Array, weights: Array | None) -> float:
    if weights is not None and not weights.any():  # of what was held out, nothing counts
        return 0.0
    return float(np.average(each, weights=weights))
