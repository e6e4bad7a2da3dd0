"""An expansion in the middle of a run: what the callbacks of all trainers share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import Bool
from fissile.discovery.search import discover
from fissile.expansion.budget import Budget, check_budget, nonzeros
from fissile.expansion.expand import Where, choose, expand
from fissile.expansion.optimizer import Moments
from fissile.expansion.pattern import check_alpha
from fissile.expansion.split import Split, resolve_split
from fissile.expansion.structure import pairs_in
from fissile.layers import SparseLayer

__all__ = ["ScheduledExpansion", "check_places", "describe"]


class ScheduledExpansion:
    """When to expand, and how; a callback is this and its library's own base class."""

    def __init__(
        self,
        alpha: int,
        *,
        epoch: int | None = None,
        step: int | None = None,
        split: str | Split = "random",
        where: Where | None = None,
        seed: int = 0,
        budget: Budget = "weights",
    ) -> None:
        super().__init__()
        if (epoch is None) == (step is None):
            raise FissileError("give ExpandAt either epoch= or step=, to say when to split")
        self.alpha = whole("alpha", alpha, least=1)
        self.epoch = None if epoch is None else whole("epoch", epoch, least=0)
        self.step = None if step is None else whole("step", step, least=0)
        self.split, self.where = resolve_split(split), where
        self.seed, self.budget = whole("seed", seed, least=0), check_budget(budget)

    def _when(self) -> str:
        return f"step {self.step}" if self.step is not None else f"epoch {self.epoch}"

    def _since(self, epoch: float, step: int) -> float:
        """Return how many steps or epochs ago the expansion was due; negative if it is to come."""
        if self.step is not None:
            return step - self.step
        assert self.epoch is not None
        return epoch - self.epoch

    def _expand(self, model: nn.Module, optimizer: Optimizer | Moments | None) -> None:
        expand(
            model,
            self.alpha,
            self.split,
            where=self.where,
            seed=self.seed,
            budget=self.budget,
            optimizer=optimizer,
            inplace=True,
        )


def check_places(model: nn.Module, alpha: int, where: Where | None) -> None:
    """Refuse now what :func:`fissile.expand` would refuse hours later.

    >>> check_places(MLP([32, 8, 1]), 64, None)
    Traceback (most recent call last):
    fissile._common.errors.FissileError: layer 'layers.0': alpha=64 is larger than the fan-in...
    """
    for place in choose(discover(model), where):
        try:
            check_alpha(alpha, place.inputs)
        except FissileError as error:
            raise FissileError(f"layer {place.name!r}: {error}") from None


def describe(model: nn.Module) -> dict[str, float]:
    """Return the numbers of a model's expansion that are worth logging.

    >>> describe(fissile.expand(fissile.MLP([32, 8, 1]), 2))
    {'nonzeros': 264, 'neurons': 16, 'dead': 0.0, 'density/layers.0': ..., 'density/layers.2': ...}

    ``dead`` is the share of children without inputs or without outputs. It and ``neurons`` are left
    out where layers were placed by hand and do not know their pairs.
    """
    numbers: dict[str, float] = {"nonzeros": nonzeros(model).weights}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLayer)}
    alive = [
        _alive([layers[name] for name in pair.firsts], layers[pair.second])
        for pair in pairs_in(model) or ()
    ]
    if alive:
        children = torch.cat(alive)
        numbers["neurons"] = children.numel()
        numbers["dead"] = 1 - int(children.sum()) / children.numel()
    for name, layer in layers.items():
        numbers[f"density/{name or '(model)'}"] = layer.nonzeros() / layer.pattern().numel()
    return numbers


def _alive(firsts: list[SparseLayer], second: SparseLayer) -> Bool[Tensor, " children"]:
    """Mark the children that have an input through one of the firsts, and an output."""
    children = second.inputs  # a layer that makes gate and up in one has two rows for each
    inputs = [first.pattern().flatten(1).any(1).view(-1, children) for first in firsts]
    outputs = second.pattern().transpose(0, 1).flatten(1).any(1)
    return (torch.cat(inputs).any(0) & outputs).cpu()
