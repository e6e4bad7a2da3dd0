"""Putting new modules into a model, with the optimizer coming along."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn
from torch.optim import Optimizer

from fissile.children import Carry
from fissile.errors import FissileError
from fissile.optim import Move, carried
from fissile.surgery.facts import marks_of, refuse_packed

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
    refuse_packed(model)
    if inplace and any(not new.name for new in replacements):
        raise FissileError("the model is itself the layer to replace; leave out inplace=True")
    for new in replacements:
        _dress(new.module, model.get_submodule(new.name))
    built = model if inplace else copy.deepcopy(model)
    # Everything is worked out before the first change: an error leaves the model as it was.
    moves = _moves(model, built, replacements)
    gradients = _gradients(moves) if inplace else []
    change = None if optimizer is None else carried(optimizer, moves)
    for new in replacements:
        if new.name:
            built.set_submodule(new.name, new.module)
        else:
            built = new.module
    without_fast_path(built, [new.name for new in replacements])
    for parameter, gradient in gradients:
        parameter.grad = gradient
    if change is not None:
        change()
    return built


def _moves(model: nn.Module, built: nn.Module, replacements: list[Replacement]) -> list[Move]:
    """Return what becomes of every parameter that will be another one."""
    news = dict(built.named_parameters())
    how: dict[str, Carry] = {}
    for new in replacements:
        prefix = f"{new.name}." if new.name else ""
        for key, _ in model.get_submodule(new.name).named_parameters():
            news.pop(prefix + key, None)
        news |= {prefix + key: parameter for key, parameter in new.module.named_parameters()}
        how |= {prefix + key: carry for key, carry in new.how.items()}
    moves = []
    for name, old in model.named_parameters():
        if name not in news:
            raise FissileError(f"{name!r} has no place in the new layer; remove it first")
        if news[name] is not old:
            moves.append(Move(old, news[name], how.get(name, lambda tensor: tensor)))
    return moves


def _gradients(moves: list[Move]) -> list[tuple[nn.Parameter, Tensor]]:
    """Carry what accumulated so far, where training goes on in the same model."""
    return [
        (move.new, move.how(move.old.grad).clone()) for move in moves if move.old.grad is not None
    ]


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
    """Take over the mode, what learns, and what was noted on the layer."""
    new.train(old.training)
    for key, value in marks_of(old).items():
        if not hasattr(new, key):
            setattr(new, key, value)
    for key, parameter in new.named_parameters(recurse=False):
        parameter.requires_grad_(old.get_parameter(key).requires_grad)
