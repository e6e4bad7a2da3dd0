"""Putting new modules into a model, with the optimizer coming along."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from torch.optim import Optimizer

from fissile.children import Carry
from fissile.errors import FissileError
from fissile.optim import Move, carry

__all__ = ["Replacement", "assemble", "without_fast_path"]


@dataclass(frozen=True)
class Replacement:
    """A module to put at a name, and how its old parameters' tensors are carried over."""

    name: str
    module: nn.Module
    how: dict[str, Carry]


def assemble(
    model: nn.Module,
    replacements: list[Replacement],
    optimizer: Optimizer | None,
    *,
    inplace: bool = False,
) -> nn.Module:
    """Put the new modules in their places, in a copy or in the model, and move the optimizer."""
    if inplace and any(not new.name for new in replacements):
        raise FissileError("the model is itself the layer to replace; leave out inplace=True")
    olds = dict(model.named_parameters())
    how: dict[str, Carry] = {}
    for new in replacements:
        _dress(new.module, model.get_submodule(new.name))
        prefix = f"{new.name}." if new.name else ""
        how |= {prefix + key: carry_one for key, carry_one in new.how.items()}
    built = model if inplace else copy.deepcopy(model)
    for new in replacements:
        if new.name:
            built.set_submodule(new.name, new.module)
        else:
            built = new.module
    without_fast_path(built, [new.name for new in replacements])
    if optimizer is not None:
        news = dict(built.named_parameters())
        moves = [Move(old, news[name], how.get(name, lambda t: t)) for name, old in olds.items()]
        carry(optimizer, [move for move in moves if move.new is not move.old])
    return built


def without_fast_path(model: nn.Module, changed: list[str]) -> None:
    """Switch off torch's fused inference of transformer layers that hold one of the changed ones.

    It reads the weights of ``linear1`` and ``linear2`` past their forward.
    """
    above = {name for layer in changed for name in _above(layer)}
    for name, module in model.named_modules():
        if name not in above:
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False


def _above(name: str) -> list[str]:
    """Name the modules that hold this one, the model itself first."""
    return ["", *accumulate(name.split(".")[:-1], lambda one, other: f"{one}.{other}")]


def _dress(new: nn.Module, old: nn.Module) -> None:
    """Take over the mode and what learns."""
    new.train(old.training)
    for key, parameter in new.named_parameters(recurse=False):
        parameter.requires_grad_(old.get_parameter(key).requires_grad)
