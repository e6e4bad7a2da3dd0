"""A stack's layers as plain matrices with their moments: what the fast engines work on.

A partitioned layer is written out as its children's rows and collected again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float
from fissile.bank.stack import Stack
from fissile.layers import DropConnectLinear, PartitionedLinear, SparseLinear, gathered, spread
from fissile.layers.mlp import first_hidden

__all__ = ["WideLayer", "first_index", "linear_layers", "read", "relus", "stages", "write"]


Vectors = tuple[Float[Tensor, "networks outputs"], ...]


@dataclass(frozen=True)
class WideLayer:
    """One linear layer of every network: its values and both of Adam's moments, as matrices."""

    weight: tuple[Float[Tensor, "networks outputs inputs"], ...]
    bias: tuple[Float[Tensor, "networks outputs"], ...] | None
    mask: Bool[Tensor, "networks outputs inputs"] | None  # None: every weight exists
    norm: tuple[Vectors, Vectors] | None = None  # scale and shift of a LayerNorm behind it


def linear_layers(module: nn.Module) -> list[nn.Linear | SparseLinear]:
    """Return the linear layers of a network, from the input on."""
    return [m for m in module.modules() if isinstance(m, nn.Linear | SparseLinear)]


@dataclass
class Stage:
    """What stands behind a linear layer."""

    norm: nn.LayerNorm | None = None
    relu: bool = False


def stages(module: nn.Module) -> list[Stage] | None:
    """Tell what stands behind each linear layer: LayerNorm, ReLU; None if it is anything else."""
    layers = module.get_submodule("layers")._modules.values()
    found = [Stage()] if getattr(module, "embedding", None) is not None else []
    for layer in layers:
        if isinstance(layer, DropConnectLinear):
            return None
        if isinstance(layer, nn.Linear | SparseLinear):
            found.append(Stage())
        elif type(layer) is nn.LayerNorm and found[-1] == Stage():
            found[-1].norm = layer
        elif type(layer) is nn.ReLU:
            found[-1].relu = True
        else:
            return None
    return found


def relus(module: nn.Module) -> list[bool] | None:
    """Tell after which linear layers a ReLU stands; None if anything else stands there."""
    found = stages(module)
    if found is None or any(stage.norm is not None for stage in found):
        return None
    return [stage.relu for stage in found]


def first_index(module: nn.Module) -> int:
    """Return which linear layer the paper calls W1."""
    return linear_layers(module).index(first_hidden(module))  # type: ignore[arg-type]


@torch.no_grad()
def read(stack: Stack) -> list[WideLayer]:
    """Write the layers of a stack out as matrices."""
    layers = []
    behind = stages(stack.module) or []
    for layer, stage in zip(linear_layers(stack.module), behind, strict=True):
        widen = _widen(layer)
        weight = tuple(widen(t).contiguous() for t in _states(stack, layer.weight))
        bias = None if layer.bias is None else tuple(_states(stack, layer.bias))
        mask = layer.pattern() if isinstance(layer, SparseLinear) else None
        layers.append(WideLayer(weight, bias, mask, _vectors(stack, stage.norm)))
    return layers


@torch.no_grad()
def write(stack: Stack, layers: list[WideLayer]) -> None:
    """Take the matrices back into the stack."""
    behind = stages(stack.module) or []
    for layer, stage, wide in zip(linear_layers(stack.module), behind, layers, strict=True):
        narrow = _narrow(layer)
        for target, tensor in zip(_states(stack, layer.weight), wide.weight, strict=True):
            target.copy_(narrow(tensor.to(target.device)))
        if layer.bias is not None and wide.bias is not None:
            for target, tensor in zip(_states(stack, layer.bias), wide.bias, strict=True):
                target.copy_(tensor)
        held = _vectors(stack, stage.norm)
        if held is not None and wide.norm is not None:
            for targets, tensors in zip(held, wide.norm, strict=True):
                for target, tensor in zip(targets, tensors, strict=True):
                    target.copy_(tensor)


def _vectors(stack: Stack, norm: nn.LayerNorm | None) -> tuple[Vectors, Vectors] | None:
    """Return the scale and the shift of a LayerNorm, each with its moments."""
    if norm is None:
        return None
    return tuple(_states(stack, norm.weight)), tuple(_states(stack, norm.bias))


def _states(stack: Stack, parameter: Tensor) -> list[Tensor]:
    state = stack.adam.state[parameter]
    return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]


def _widen(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, PartitionedLinear):
        return lambda tensor: spread(tensor, layer.owner, layer.alpha)
    return lambda tensor: tensor


def _narrow(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, PartitionedLinear):
        return lambda tensor: gathered(tensor, layer.owner, layer.alpha)
    return lambda tensor: tensor
