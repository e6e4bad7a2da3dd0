"""New modules for old: what every module of a place becomes when its neurons have children.

Each comes with how tensors of its old parameters' shapes are carried over, for the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fissile.layers import (
    DropConnectLinear,
    Geometry,
    MaskedConv2d,
    MaskedLinear,
    Pair,
    PartitionedConv2d,
    PartitionedLinear,
    SparseLayer,
    children_of,
    is_transposed,
)
from fissile.pattern import Pattern
from fissile.shapes import Float

__all__ = [
    "NORMS",
    "Carry",
    "Rebuilt",
    "copied",
    "dropconnect_first",
    "matrix_of",
    "resize",
    "sparse_first",
    "sparse_second",
    "widened",
    "width_of",
]

Carry = Callable[[Tensor], Tensor]
#: A new layer, and how tensors of each of its old parameters' shapes are carried to it.
Rebuilt = tuple[nn.Module, dict[str, Carry]]

#: Norms whose parameters belong to single neurons or channels, and are copied to the children.
NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm,
)  # fmt: skip


def matrix_of(layer: nn.Module) -> Float[Tensor, "*batch outputs columns"]:
    """Return a dense layer's weight as a matrix, one row for every neuron or filter."""
    weight = layer.get_parameter("weight").detach()
    if isinstance(layer, nn.Conv2d):
        return weight.flatten(1)
    return weight.mT if is_transposed(layer) else weight


def sparse_first(_: Tensor, layer: nn.Module, pattern: Pattern) -> Rebuilt:
    """Keep weight and owner where the split is a partition, a masked copy where it is not."""
    alpha, turn = pattern.alpha, _turn(layer)
    weight = turn(layer.get_parameter("weight").detach())
    rows, how = -weight.ndim if isinstance(layer, nn.Conv2d) else -2, _bias_to_children(alpha)
    if pattern.first is None:
        owner = pattern.owner.reshape(weight.shape)
        new = _partitioned(layer, weight, owner, alpha, _bias(layer, alpha))
        return new, how | {"weight": lambda t: torch.where(owner < 0, 0, turn(t))}
    wide = children_of(weight, alpha, rows)
    mask = pattern.first.reshape(wide.shape)
    new = _masked(layer, wide, mask, _bias(layer, alpha))
    return new, how | {"weight": lambda t: torch.where(mask, children_of(turn(t), alpha, rows), 0)}


def sparse_second(layer: nn.Module, pattern: Pattern, pair: Pair) -> Rebuilt:
    """Copy what reads a parent to all its children, under the mask of what is left."""
    alpha, turn = pattern.alpha, _turn(layer)
    weight = turn(layer.get_parameter("weight").detach())
    columns = -3 if isinstance(layer, nn.Conv2d) else -1
    wide = children_of(weight, alpha, columns)
    mask = pattern.second.reshape(wide.shape)
    new = _masked(layer, wide, mask, _bias(layer))
    new.pair = pair.alone()
    carry = lambda t: torch.where(mask, children_of(turn(t), alpha, columns), 0)  # noqa: E731
    return new, {"weight": carry}


def dropconnect_first(seed: Tensor, layer: nn.Module, pattern: Pattern) -> Rebuilt:
    """Duplicate the neurons, to be masked anew at every pass."""
    alpha, turn = pattern.alpha, _turn(layer)
    weight = children_of(turn(layer.get_parameter("weight").detach()), alpha, -2)
    new = DropConnectLinear(
        weight, pattern.first_mask().sum(-1), _bias(layer, alpha), seed,
        transposed=is_transposed(layer),
    )  # fmt: skip
    how: dict[str, Carry] = {"weight": lambda t: children_of(turn(t), alpha, -2)}
    return new, how | _bias_to_children(alpha)


def widened(module: nn.Module, alpha: int) -> Rebuilt | None:
    """Copy what belongs to single neurons, parameters and running statistics, to the children.

    None stands for a module without any, which stays as it is.
    """
    width = width_of(module)
    if width is None:
        return None
    new = copy.deepcopy(module)
    how = {
        key: lambda tensor: children_of(tensor, alpha, -1)
        for key, _ in module.named_parameters(recurse=False)
    }
    for key, value in _per_neuron(module):
        wide = children_of(value.detach(), alpha, -1)
        setattr(new, key, nn.Parameter(wide) if key in how else wide)
    resize(new, width * alpha)
    return new, how


def width_of(module: nn.Module) -> int | None:
    """Return how many neurons a norm or a slope was made for; None for anything else."""
    if not isinstance(module, (*NORMS, nn.PReLU)):
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return int(module.normalized_shape[-1])
    width = int(getattr(module, _width_name(module)))
    # One slope for all neurons stays one.
    return None if isinstance(module, nn.PReLU) and width == 1 else width


def resize(module: nn.Module, width: int) -> None:
    """Note another width in a norm or a slope; its tensors are the caller's business."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = (width,)
    else:
        setattr(module, _width_name(module), width)


def _width_name(module: nn.Module) -> str:
    if isinstance(module, nn.PReLU):
        return "num_parameters"
    return "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"


def copied(bias: Tensor | None, alpha: int = 1) -> Tensor | None:
    """Return a bias for the children of its neurons."""
    return None if bias is None else children_of(bias.detach(), alpha, -1)


def _bias(layer: nn.Module, alpha: int = 1) -> Tensor | None:
    return copied(layer._parameters["bias"], alpha)


def _per_neuron(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(key, value) for key, value in own if key != "num_batches_tracked"]


def _turn(layer: nn.Module) -> Carry:
    return (
        (lambda tensor: tensor.mT.contiguous()) if is_transposed(layer) else (lambda tensor: tensor)
    )


def _bias_to_children(alpha: int) -> dict[str, Carry]:
    return {"bias": lambda tensor: children_of(tensor, alpha, -1)}


def _partitioned(
    layer: nn.Module, weight: Tensor, owner: Tensor, alpha: int, bias: Tensor | None
) -> SparseLayer:
    if isinstance(layer, nn.Conv2d):
        return PartitionedConv2d(weight, owner, alpha, bias, Geometry.of(layer))
    return PartitionedLinear(weight, owner, alpha, bias, transposed=is_transposed(layer))


def _masked(layer: nn.Module, weight: Tensor, mask: Tensor, bias: Tensor | None) -> SparseLayer:
    if isinstance(layer, nn.Conv2d):
        return MaskedConv2d(weight, mask, bias, Geometry.of(layer))
    return MaskedLinear(weight, mask, bias, transposed=is_transposed(layer))
