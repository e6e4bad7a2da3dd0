"""Dynamic masks: every so many steps some removed weights return, and as many small ones go.

The budget holds at every moment: a layer has after each update exactly as many weights as before.
A returning weight starts at zero with fresh moments, and cannot be the one that goes in the same
update. Growth is random, as in the paper, or by the size of the gradient, as in RigL (Evci et
al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError, whole
from fissile._common.random import hash32, noise
from fissile._common.shapes import Bool, Float, Int
from fissile.expansion.budget import keep_largest
from fissile.expansion.optimizer import Moments, check_optimizer
from fissile.layers import DropConnectLinear, Masked, Partitioned

_Numbers = Float[Tensor, "*batch outputs inputs"]
_Mask = Bool[Tensor, "*batch outputs inputs"]


def rewired(
    weight: _Numbers, mask: _Mask, score: _Numbers, count: int | Int[Tensor, "*batch"]
) -> _Mask:
    """Return the mask after ``count`` removed weights came back and the smallest as many went.

    Those with the largest ``score`` come back. No more can move than are removed, or are there,
    and none where a weight or a score is not finite.
    """
    flat, present, score = weight.flatten(-2).abs(), mask.flatten(-2), score.flatten(-2)
    there = present.sum(-1)
    count = torch.as_tensor(count, device=mask.device).minimum(there)
    count = count.minimum(present.shape[-1] - there)
    grown = keep_largest(torch.where(present, -torch.inf, score), count) & ~present
    stays = keep_largest(torch.where(present, flat, -1.0), there - count) & present
    # Numbers that cannot be ranked (one overflow is enough) must not cost any weight.
    sound = (torch.isfinite(flat) & torch.isfinite(score)).all(-1, keepdim=True)
    after = torch.where(sound, stays | grown, present)
    return after.reshape(mask.shape)


class Rewire:
    """Rewires a masked model while it trains: call :meth:`step` after each optimizer step.

    >>> model = to_masked(expand(dense, 2, optimizer=adam), optimizer=adam)
    >>> rewire = Rewire(model, adam, every=100, fraction=0.1)
    >>> for x, y in batches:
    ...     loss(model(x), y).backward()
    ...     adam.step(); rewire.step(); adam.zero_grad()

    Args:
        model: an expanded model with masked layers (``fissile.to_masked``).
        optimizer: its optimizer, whose moments are cleared where a weight comes or goes.
        every: steps between updates.
        fraction: share of a layer's weights that move in one update.
        grow: ``"random"``, or ``"gradient"`` for the largest gradients among removed weights.
        until: the fraction falls to zero at this step, along a cosine; None keeps it constant.
        seed: of the random growth.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Moments | None = None,
        *,
        every: int = 100,
        fraction: float = 0.1,
        grow: Literal["random", "gradient"] = "random",
        until: int | None = None,
        seed: int | Int[Tensor, " networks"] = 0,
    ) -> None:
        whole("every", every, least=1)
        if until is not None:
            whole("until", until, least=1)
        if not 0 < fraction <= 1:
            raise FissileError(f"fraction must be above 0 and at most 1, not {fraction!r}")
        if grow not in ("random", "gradient"):
            raise FissileError(f'grow must be "random" or "gradient", not {grow!r}')
        self.layers = _masked_layers(model)
        self.optimizer = None if optimizer is None else check_optimizer(optimizer, model)
        self.every, self.fraction = every, fraction
        self.grow, self.until, self.steps, self.seed = grow, until, 0, seed
        self._gradient: dict[int, Tensor] = {}
        if grow == "gradient":
            for layer in self.layers:
                layer.observer = self._listen(layer)

    def step(self) -> bool:
        """Count one training step; rewire when it is due. Returns whether it was."""
        self.steps += 1
        due = self.steps % self.every == 0 and (self.until is None or self.steps < self.until)
        if due:
            for index, layer in enumerate(self.layers):
                self._update(index, layer)
        self._gradient.clear()
        return due

    def close(self) -> None:
        """Stop listening to gradients; the model is an ordinary masked model again."""
        for layer in self.layers:
            layer.observer = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model's and the optimizer's state."""
        return {"steps": self.steps, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved run stopped."""
        self.steps, self.seed = int(state["steps"]), state["seed"]

    @torch.no_grad()
    def _update(self, index: int, layer: Masked) -> None:
        weight, mask = layer.rows(layer.weight), layer.rows(layer.mask)
        count = (self._fraction() * mask.sum((-2, -1))).floor().long()
        new = rewired(weight, mask, self._score(index, layer), count).reshape(layer.mask.shape)
        moved = new != layer.mask
        layer.mask.copy_(new)
        layer.weight.masked_fill_(moved, 0)
        if self.optimizer is None:
            return
        for value in self.optimizer.state.get(layer.weight, {}).values():
            if isinstance(value, Tensor) and value.shape == moved.shape:
                value.masked_fill_(moved, 0)

    def _fraction(self) -> float:
        if self.until is None:
            return self.fraction
        return self.fraction * (1 + math.cos(math.pi * self.steps / self.until)) / 2

    def _score(self, index: int, layer: Masked) -> Tensor:
        if self.grow == "random":
            stream = hash32(self.seed, index).to(layer.weight.device)
            return noise(stream, self.steps, *layer.rows(layer.mask).shape[-2:])
        if id(layer) not in self._gradient:
            raise FissileError("no gradient was seen: run backward() before rewire.step()")
        return layer.rows(self._gradient[id(layer)].abs())

    def _listen(self, layer: Masked) -> Callable[[Tensor], None]:
        def listen(gradient: Tensor) -> None:
            # Summed over the micro-batches of an accumulated step, like the gradient itself.
            seen = self._gradient.get(id(layer))
            self._gradient[id(layer)] = gradient.detach() if seen is None else seen + gradient

        return listen


def _masked_layers(model: nn.Module) -> list[Masked]:
    for name, module in model.named_modules():
        if isinstance(module, Partitioned | DropConnectLinear):
            raise FissileError(
                f"layer {name!r} is a {type(module).__name__}, whose pattern cannot move; "
                "pass fissile.to_masked(fissile.expand(model, alpha))"
            )
    layers = [module for module in model.modules() if isinstance(module, Masked)]
    if not layers:
        raise FissileError("the model has no masked layers; expand it first")
    return layers
