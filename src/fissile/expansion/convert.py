"""An expanded model in other layers, the same function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError
from fissile.discovery.module_checks import has_hooks
from fissile.expansion.optimizer import Moments, check_optimizer
from fissile.expansion.replace import Replacement, assemble
from fissile.expansion.structure import note
from fissile.layers import (
    MaskedConv2d,
    MaskedLinear,
    Partitioned,
    PartitionedConv2d,
    PartitionedLinear,
    SparseLayer,
    children_of,
)
from fissile.layers.norms import Rebuilt, copied

__all__ = ["to_dense", "to_masked"]


def to_masked(model: nn.Module, *, optimizer: Optimizer | Moments | None = None) -> nn.Module:
    """Rewrite partitioned layers as masked ones, the same function; dynamic masks need it.

    >>> masked = to_masked(expand(model, 2))
    """
    return _rewrite(model, _as_masked, optimizer)


def to_dense(model: nn.Module) -> nn.Module:
    """Write an expanded model out in plain layers, with zeros for removed weights.

    >>> plain = to_dense(expand(model, 2))  # for export and inspection; training revives zeros
    """
    return _rewrite(model, lambda layer: (layer.written_out(), {}), None)


def _as_masked(layer: SparseLayer) -> Rebuilt | None:
    if not isinstance(layer, Partitioned):
        return None
    alpha, mask, bias = layer.alpha, layer.pattern(), copied(layer.bias)
    if isinstance(layer, PartitionedConv2d):
        new: nn.Module = MaskedConv2d(layer.dense_weight(), mask, bias, layer.geometry)
    else:
        assert isinstance(layer, PartitionedLinear)
        new = MaskedLinear(layer.dense_weight(), mask, bias, transposed=layer.transposed)
    rows = -4 if isinstance(layer, PartitionedConv2d) else -2
    return new, {"weight": lambda t: torch.where(mask, children_of(t, alpha, rows), 0)}


def _rewrite(
    model: nn.Module,
    rebuild: Callable[[SparseLayer], Rebuilt | None],
    optimizer: Optimizer | Moments | None,
) -> nn.Module:
    """Put other layers in place of the expanded ones in a copy; None leaves one as it is."""
    if optimizer is not None:
        optimizer = check_optimizer(optimizer, model)
    replacements = []
    for name, layer in model.named_modules():
        if not isinstance(layer, SparseLayer) or (new := rebuild(layer)) is None:
            continue
        if has_hooks(layer):
            raise FissileError(f"{name!r} has hooks, which a new layer would lose; remove them")
        replacements.append(Replacement(name, *new))
    rewritten = assemble(model, replacements, optimizer)
    note(rewritten)
    return rewritten
