"""Replace the layers of a model by their expanded ones, and carry the optimizer over.

Every new module comes with a function that carries tensors of its old parameters' shapes over.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError
from fissile._common.shapes import Float
from fissile.discovery.module_checks import marks_of, refuse_packed
from fissile.expansion.optimizer import Moments, Move, carried
from fissile.expansion.pattern import Pattern
from fissile.layers import (
    Carry,
    DropConnectLinear,
    Geometry,
    MaskedConv2d,
    MaskedLinear,
    Pair,
    PartitionedConv2d,
    PartitionedLinear,
    Rebuilt,
    SparseConv2d,
    SparseLayer,
    SparseLinear,
    children_of,
    copied,
    is_transposed,
)


def matrix_of(
    layer: nn.Module, tensor: Tensor | None = None
) -> Float[Tensor, "*batch outputs columns"]:
    """Return a dense layer's weight, or a tensor of its shape, with a row for every neuron."""
    if tensor is None:
        tensor = layer.get_parameter("weight").detach()
    if isinstance(layer, nn.Conv2d):
        return tensor.flatten(1)
    return tensor.mT if is_transposed(layer) else tensor


def sparse_first(_: Tensor, layer: nn.Module, pattern: Pattern) -> Rebuilt:
    """Keep weight and owner where the split is a partition, a masked copy where it is not."""
    alpha, weight = pattern.alpha, layer.get_parameter("weight").detach()
    turn, bias = _turn(layer), copied(layer._parameters["bias"], alpha)
    if pattern.first is None:
        owner = pattern.owner.reshape(turn(weight).shape)
        new = partitioned_like(layer, turn(weight), owner, alpha, bias)
        return new, _carries(alpha, lambda t: torch.where(owner < 0, 0, turn(t)))
    rows = -weight.ndim if isinstance(layer, nn.Conv2d) else -2
    wide = children_of(turn(weight), alpha, rows)
    mask = pattern.first.reshape(wide.shape)
    new = masked_like(layer, wide, mask, bias)
    return new, _carries(alpha, lambda t: torch.where(mask, children_of(turn(t), alpha, rows), 0))


def sparse_second(layer: nn.Module, pattern: Pattern, pair: Pair) -> Rebuilt:
    """Copy what reads a parent to all its children, under the mask of what is left."""
    alpha, turn = pattern.alpha, _turn(layer)
    columns = -3 if isinstance(layer, nn.Conv2d) else -1
    wide = children_of(turn(layer.get_parameter("weight").detach()), alpha, columns)
    mask = pattern.second.reshape(wide.shape)
    new = masked_like(layer, wide, mask, copied(layer._parameters["bias"]))
    new.pair = pair.alone()
    carry = lambda t: torch.where(mask, children_of(turn(t), alpha, columns), 0)  # noqa: E731
    return new, {"weight": carry}


def dropconnect_first(seed: Tensor, layer: nn.Module, pattern: Pattern) -> Rebuilt:
    """Duplicate the neurons, to be masked anew at every pass."""
    alpha, turn = pattern.alpha, _turn(layer)
    how = _carries(alpha, lambda t: children_of(turn(t), alpha, -2))
    weight, bias = layer.get_parameter("weight").detach(), copied(layer._parameters["bias"], alpha)
    new = DropConnectLinear(
        how["weight"](weight), pattern.first_mask().sum(-1), bias, seed,
        transposed=is_transposed(layer),
    )  # fmt: skip
    return new, how


def _turn(layer: nn.Module) -> Carry:
    return (lambda t: t.mT.contiguous()) if is_transposed(layer) else (lambda t: t)


def _carries(alpha: int, weight: Carry) -> dict[str, Carry]:
    return {"weight": weight, "bias": lambda tensor: children_of(tensor, alpha, -1)}


def partitioned_like(
    layer: nn.Module, weight: Tensor, owner: Tensor, alpha: int, bias: Tensor | None
) -> SparseLayer:
    """Return a partitioned layer of the same sort as a given one, dense or expanded."""
    if isinstance(layer, nn.Conv2d | SparseConv2d):
        return PartitionedConv2d(weight, owner, alpha, bias, Geometry.of(layer))
    return PartitionedLinear(weight, owner, alpha, bias, transposed=is_turned(layer))


def masked_like(layer: nn.Module, weight: Tensor, mask: Tensor, bias: Tensor | None) -> SparseLayer:
    """Return a masked layer of the same sort as a given one, dense or expanded."""
    if isinstance(layer, nn.Conv2d | SparseConv2d):
        return MaskedConv2d(weight, mask, bias, Geometry.of(layer))
    return MaskedLinear(weight, mask, bias, transposed=is_turned(layer))


def is_turned(layer: nn.Module) -> bool:
    """Return whether a layer is a ``Conv1D`` of transformers, or stands for one."""
    return is_transposed(layer) or (isinstance(layer, SparseLinear) and layer.transposed)


@dataclass(frozen=True)
class Replacement:
    """A module to put at a name, and how its old parameters' tensors are carried over."""

    name: str
    module: nn.Module
    how: dict[str, Carry]


def assemble(
    model: nn.Module,
    replacements: list[Replacement],
    optimizer: Optimizer | Moments | None,
    *,
    inplace: bool = False,
) -> nn.Module:
    """Put the new modules in their places, in a copy or in the model, and move the optimizer."""
    refuse_packed(model)
    if inplace and any(not new.name for new in replacements):
        raise FissileError("the model is itself the layer to replace; leave out inplace=True")
    for new in replacements:
        dress(new.module, model.get_submodule(new.name))
    built = model if inplace else copy.deepcopy(model)
    # Everything is worked out before the first change: an error leaves the model as it was.
    moves = _moves(model, built, replacements)
    accumulated = [(move, move.old.grad) for move in moves if inplace and move.old.grad is not None]
    gradients = [(move.new, move.how(gradient).clone()) for move, gradient in accumulated]
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


def without_fast_path(model: nn.Module, changed: list[str]) -> None:
    """Switch off torch's fused inference of transformer layers that hold one of the changed ones.

    It reads the weights of ``linear1`` and ``linear2`` past their forward.
    """
    for name, module in model.named_modules():
        if not any(f".{layer}".startswith(f".{name}." if name else "") for layer in changed):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False


def dress(new: nn.Module, old: nn.Module) -> None:
    """Take over the mode, what learns, and what was noted on the layer."""
    new.train(old.training)
    for key, value in marks_of(old).items():
        if not hasattr(new, key):
            setattr(new, key, value)
    for key, parameter in new.named_parameters(recurse=False):
        parameter.requires_grad_(old.get_parameter(key).requires_grad)
