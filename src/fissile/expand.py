"""Fixed parameter expansion of a model: more neurons, the same number of non-zero weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile.budget import Budget, check_budget
from fissile.chain import NORMS, Pair, check_layers, pairs_of
from fissile.draw import seeded
from fissile.errors import FissileError, whole
from fissile.layers import (
    DropConnectLinear,
    MaskedLinear,
    PartitionedLinear,
    SparseLinear,
    children_of,
)
from fissile.optim import Move, carry, check_optimizer
from fissile.order import hash32
from fissile.pattern import Pattern, check_alpha, split_pair
from fissile.split import Split, resolve_split

__all__ = ["dropconnect", "expand", "to_dense", "to_masked"]

Carry = Callable[[Tensor], Tensor]
#: A new layer, and how tensors of each of its old parameters' shapes are carried to it.
Rebuilt = tuple[nn.Module, dict[str, Carry]]


def expand(
    model: nn.Module,
    alpha: int,
    split: str | Split | Sequence[str | Split] = "random",
    *,
    seed: int | Tensor = 0,
    budget: Budget = "weights",
    optimizer: Optimizer | None = None,
) -> nn.Module:
    """Split each neuron into ``alpha`` sparse children at the same number of non-zero weights.

    >>> wide = expand(MLP([32, 8, 1]), alpha=2)  # 16 hidden neurons, 264 weights as before
    >>> nonzeros(wide).weights
    264

    Args:
        model: a trained MLP, as ``nn.Sequential`` or ``fissile.MLP``; it is left untouched.
        alpha: children per neuron.
        split: who inherits which input: a name, a :class:`fissile.Split`, or one for each
            widened layer.
        seed: of the split's randomness; for a stack of networks (:mod:`fissile.bank`), one each.
        budget: ``"weights"`` counts weights as the paper does, ``"all"`` biases and norms too.
        optimizer: an SGD, Adam or AdamW that shall continue on the new model, in place.

    Returns:
        A new model. Hidden layers 1, 3, 5, ... are widened, the head never.
    """
    pairs = pairs_of(model)
    splits = _splits_for(pairs, split)
    return _transform(model, pairs, alpha, splits, seed, budget, optimizer, _sparse_first)


def dropconnect(
    model: nn.Module,
    alpha: int,
    *,
    seed: int | Tensor = 0,
    optimizer: Optimizer | None = None,
) -> nn.Module:
    """Duplicate each neuron ``alpha`` times and draw a fresh mask at every training pass.

    >>> control = dropconnect(MLP([32, 8, 1]), alpha=2)

    The control of the paper: as many active weights per pass as :func:`expand` leaves, but dense,
    scaled weights in evaluation. It is a regulariser, and keeps no budget at test time.
    """
    pairs = pairs_of(model)
    splits = _splits_for(pairs, "random")
    return _transform(model, pairs, alpha, splits, seed, "weights", optimizer, _dropconnect_first)


def to_masked(model: nn.Module, *, optimizer: Optimizer | None = None) -> nn.Module:
    """Rewrite partitioned layers as masked ones, the same function; dynamic masks need it.

    >>> masked = to_masked(expand(model, 2))
    """

    def masked(layer: SparseLinear) -> Rebuilt:
        if not isinstance(layer, PartitionedLinear):
            return copy.deepcopy(layer), {}
        alpha, mask = layer.alpha, layer.pattern()
        new = MaskedLinear(layer.dense_weight(), mask, _copied(layer.bias))
        return new, {"weight": lambda t: torch.where(mask, children_of(t, alpha, -2), 0)}

    return _rewrite(model, masked, optimizer)


def to_dense(model: nn.Module) -> nn.Module:
    """Write an expanded model out in plain ``nn.Linear`` layers, with zeros for removed weights.

    >>> plain = to_dense(expand(model, 2))  # for export and inspection; training revives zeros
    """

    def dense(layer: SparseLinear) -> Rebuilt:
        new = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        new.weight = nn.Parameter(layer.dense_weight().detach().clone())
        if layer.bias is not None:
            new.bias = nn.Parameter(layer.bias.detach().clone())
        return new, {}

    return _rewrite(model, dense, None)


@dataclass(frozen=True)
class _Place:
    """A module to put at a name, and how its old parameters' tensors are carried over."""

    name: str
    module: nn.Module
    how: dict[str, Carry]


def _transform(
    model: nn.Module,
    pairs: list[Pair],
    alpha: int,
    splits: list[Split],
    seed: int | Tensor,
    budget: str,
    optimizer: Optimizer | None,
    make_first: Callable[[nn.Linear, Pattern, Tensor], Rebuilt],
) -> nn.Module:
    """Split every pair, then build the new model; nothing is changed before all is checked."""
    known = check_budget(budget)
    if not isinstance(seed, Tensor) and whole("seed", seed, least=0) >= 2**63:
        raise FissileError(f"seed={seed} needs more than 63 bits; give a smaller one")
    check_layers(model, pairs)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    draw = seeded(seed)
    places: list[_Place] = []
    for pair, split in zip(pairs, splits, strict=True):
        first, second = _linear(model, pair.first), _linear(model, pair.second)
        try:
            count = check_alpha(alpha, first.in_features)
            between = [_Place(link.name, *_widen(link.module, count)) for link in pair.between]
            extra = _extra(model, first, between, count) if known == "all" else 0
            weights = first.weight.detach(), second.weight.detach()
            pattern = split_pair(*weights, count, split, draw, extra=extra)
        except FissileError as error:
            raise FissileError(f"layer {pair.first!r}: {error}") from None
        stream = hash32(seed, len(places))
        places.append(_Place(pair.first, *make_first(first, pattern, stream)))
        places.extend(between)
        places.append(_Place(pair.second, *_masked_second(second, pattern)))
    return _assemble(model, places, optimizer)


def _splits_for(pairs: list[Pair], split: str | Split | Sequence[str | Split]) -> list[Split]:
    if isinstance(split, str | Split):
        return [resolve_split(split)] * len(pairs)
    if not isinstance(split, Sequence):
        return [resolve_split(split)]  # which says what a split is
    if len(split) != len(pairs):
        raise FissileError(f"{len(split)} splits were given for {len(pairs)} widened layers")
    return [resolve_split(one) for one in split]


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def _extra(model: nn.Module, first: nn.Linear, between: list[_Place], alpha: int) -> int:
    """Count the parameters that the children add besides weights: biases, norms, slopes."""
    added = 0 if first.bias is None else (alpha - 1) * first.out_features
    for place in between:
        old = model.get_submodule(place.name)
        added += sum(p.shape[-1] for p in place.module.parameters())
        added -= sum(p.shape[-1] for p in old.parameters())
    return added


def _sparse_first(layer: nn.Linear, pattern: Pattern, _: Tensor) -> Rebuilt:
    """Keep weight and owner where the split is a partition, a masked copy where it is not."""
    alpha, how = pattern.alpha, {"bias": _to_children(pattern.alpha, -1)}
    bias = _copied(layer.bias, alpha)
    if pattern.first is None:
        owner = pattern.owner
        new: nn.Module = PartitionedLinear(layer.weight, owner, alpha, bias)
        return new, how | {"weight": lambda t: torch.where(owner < 0, 0, t)}
    mask = pattern.first
    new = MaskedLinear(children_of(layer.weight, alpha, -2), mask, bias)
    return new, how | {"weight": lambda t: torch.where(mask, children_of(t, alpha, -2), 0)}


def _dropconnect_first(layer: nn.Linear, pattern: Pattern, seed: Tensor) -> Rebuilt:
    alpha = pattern.alpha
    degree = pattern.first_mask().sum(-1)
    weight = children_of(layer.weight, alpha, -2)
    how = {"weight": _to_children(alpha, -2), "bias": _to_children(alpha, -1)}
    return DropConnectLinear(weight, degree, _copied(layer.bias, alpha), seed), how


def _masked_second(layer: nn.Linear, pattern: Pattern) -> Rebuilt:
    alpha, mask = pattern.alpha, pattern.second
    new = MaskedLinear(children_of(layer.weight, alpha, -1), mask, _copied(layer.bias))
    return new, {"weight": lambda t: torch.where(mask, children_of(t, alpha, -1), 0)}


def _widen(module: nn.Module, alpha: int) -> Rebuilt:
    """Copy what belongs to single neurons, parameters and running statistics, to the children."""
    new, how = copy.deepcopy(module), {}
    if not isinstance(module, (*NORMS, nn.PReLU)):
        return new, {}
    if isinstance(new, nn.LayerNorm | nn.RMSNorm):
        new.normalized_shape = (new.normalized_shape[0] * alpha,)
    elif isinstance(new, nn.BatchNorm1d):
        new.num_features *= alpha
        for key in ("running_mean", "running_var"):
            buffer = getattr(new, key)
            setattr(new, key, None if buffer is None else children_of(buffer, alpha, -1))
    elif isinstance(new, nn.PReLU):
        if new.num_parameters == 1:  # one slope for all neurons stays one
            return new, {}
        new.num_parameters *= alpha
    for key, parameter in list(new.named_parameters(recurse=False)):
        setattr(new, key, nn.Parameter(children_of(parameter.detach(), alpha, -1)))
        how[key] = _to_children(alpha, -1)
    return new, how


def _to_children(alpha: int, dim: int) -> Carry:
    return lambda tensor: children_of(tensor, alpha, dim)


def _copied(bias: Tensor | None, alpha: int = 1) -> Tensor | None:
    return None if bias is None else children_of(bias.detach(), alpha, -1)


def _rewrite(
    model: nn.Module, rebuild: Callable[[SparseLinear], Rebuilt], optimizer: Optimizer | None
) -> nn.Module:
    if optimizer is not None:
        check_optimizer(optimizer, model)
    places = [
        _Place(name, *rebuild(module))
        for name, module in model.named_modules()
        if isinstance(module, SparseLinear)
    ]
    return _assemble(model, places, optimizer)


def _assemble(model: nn.Module, places: list[_Place], optimizer: Optimizer | None) -> nn.Module:
    """Copy the model, put the new modules in their places and take the optimizer along."""
    new = copy.deepcopy(model)
    how: dict[str, Carry] = {}
    for place in places:
        old = model.get_submodule(place.name)
        place.module.train(old.training)
        for key, parameter in place.module.named_parameters(recurse=False):
            parameter.requires_grad_(old.get_parameter(key).requires_grad)
        if not place.name:
            new = place.module
        else:
            new.set_submodule(place.name, place.module)
        prefix = f"{place.name}." if place.name else ""
        how |= {prefix + key: carry_one for key, carry_one in place.how.items()}
    if optimizer is not None:
        parameters = dict(new.named_parameters())
        carry(
            optimizer,
            [
                Move(old, parameters[name], how.get(name, lambda tensor: tensor))
                for name, old in model.named_parameters()
            ],
        )
    return new
