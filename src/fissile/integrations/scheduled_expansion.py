"""An expansion that lies ahead, in the middle of a run: what the callbacks have in common."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError, whole
from fissile.discovery.search import discover
from fissile.expansion.budget import Budget, check_budget
from fissile.expansion.expand import Where, choose, expand
from fissile.expansion.pattern import check_alpha
from fissile.expansion.split import Split, resolve_split

__all__ = ["Ahead", "check_places"]


class Ahead:
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

    def _expand(self, model: nn.Module, optimizer: Optimizer | None) -> None:
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
