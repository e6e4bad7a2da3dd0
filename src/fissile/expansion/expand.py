"""Fixed parameter expansion of a model: more neurons, the same number of non-zero weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, chain
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile._common.errors import FissileError, whole
from fissile._common.random import Draw, hash32, seeded
from fissile.discovery.module_checks import disjoint, has_hooks, wrapped_in
from fissile.discovery.search import Discovery, Place, Refusal, discover
from fissile.expansion.budget import (
    Allocation,
    Budget,
    Magnitude,
    Squares,
    check_budget,
    resolve_allocation,
)
from fissile.expansion.optimizer import Moments, check_optimizer
from fissile.expansion.pattern import Form, Pattern, check_alpha, split_pair
from fissile.expansion.replace import (
    Replacement,
    assemble,
    dropconnect_first,
    masked_like,
    matrix_of,
    sparse_first,
    sparse_second,
)
from fissile.expansion.saving import make_savable
from fissile.expansion.split import Split, resolve_split
from fissile.expansion.structure import widen_config
from fissile.layers import (
    Pair,
    Partitioned,
    Rebuilt,
    SparseConv2d,
    SparseLayer,
    children_of,
    copied,
    widened,
)

#: A name, a glob such as ``"encoder.*.mlp"``, several of those, or a function of the place.
Where = str | Sequence[str] | Callable[[Place], bool]

#: How many reasons an error gives.
_SHOWN = 3
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def expand(
    model: nn.Module,
    alpha: int,
    split: str | Split | Sequence[str | Split] = "random",
    *,
    where: Where | None = None,
    seed: int | Tensor = 0,
    budget: Budget = "weights",
    allocation: str | Allocation = "magnitude",
    optimizer: Optimizer | Moments | None = None,
    example_inputs: Any = None,
    inplace: bool = False,
) -> nn.Module:
    """Split each neuron into ``alpha`` sparse children at the same number of non-zero weights.

    >>> wide = expand(MLP([32, 8, 1]), alpha=2)  # 16 hidden neurons, 264 weights as before
    >>> nonzeros(wide).weights
    264
    >>> wide = expand(bert, 4, where="encoder.layer.*")  # MLPs, gated MLPs, convolutions

    Args:
        model: a trained model; it is left untouched unless ``inplace``.
        alpha: children per neuron.
        split: who inherits which input: a name, a :class:`fissile.Split`, or one for each
            widened layer.
        where: which places to expand: a name or glob of a layer or of a module above it, a list
            of those, or a function of a :class:`fissile.Place`; all that :func:`fissile.discover`
            finds by default.
        seed: of the split's randomness; for a stack of networks (:mod:`fissile.bank`), one each.
        budget: ``"weights"`` counts weights, as the paper does. Biases and norms come besides, for
            every child its own: with BatchNorm and ``alpha=4`` a 64-6-10 network goes from 472
            non-zero parameters to 526. ``"all"`` counts them too, and stays at 472.
        allocation: how both layers share the budget: ``"magnitude"`` as in the paper, ``"layer"``,
            ``"erdos-renyi"``, ``"saliency"`` (by gradients, which come from the optimizer or from
            the last ``backward()``), or an :class:`Allocation`.
        optimizer: an SGD, Adam or AdamW that shall continue on the new model, in place.
        example_inputs: what the model is called with; places that its code alone does not show
            are then found by trying.
        inplace: change the given model instead of a copy, gradients that it has accumulated too; a
            config that it shares with a model around it is then changed for both.

    Returns:
        The expanded model. Of layers in a row 1, 3, 5, ... are widened, the head never. A warning
        says how many children get no input.
    """
    _refuse_wrapped(model)
    places = choose(discover(model, example_inputs), where)
    splits = _splits_for(places, split)
    if optimizer is not None:
        optimizer = check_optimizer(optimizer, model)
    rule = resolve_allocation(allocation)
    plan = _Plan(alpha, sparse_first, check_budget(budget), rule, optimizer)
    made = _replacements(model, places, splits, seed, plan)
    wide = assemble(model, made, optimizer, inplace=inplace)
    if hasattr(wide, "config"):
        widen_config(wide, {place.neurons for place in places}, index(alpha))
        make_savable(wide)
    return wide


def dropconnect(
    model: nn.Module,
    alpha: int,
    *,
    seed: int | Tensor = 0,
    optimizer: Optimizer | Moments | None = None,
) -> nn.Module:
    """Duplicate each neuron ``alpha`` times and draw a fresh mask at every training pass.

    >>> control = dropconnect(MLP([32, 8, 1]), alpha=2)

    The control of the paper: as many active weights per pass as :func:`expand` leaves, but dense,
    scaled weights in evaluation. It is a regulariser, and keeps no budget at test time.
    """
    _refuse_wrapped(model)
    places = choose(discover(model), None)
    for place in places:
        if place.kind != "mlp":
            raise FissileError(
                f"dropconnect is a control for plain pairs of linear layers; {place.name!r} is of "
                f"the kind {place.kind!r}"
            )
    splits = _splits_for(places, "random")
    if optimizer is not None:
        optimizer = check_optimizer(optimizer, model)
    made = _replacements(model, places, splits, seed, _Plan(alpha, dropconnect_first))
    control = assemble(model, made, optimizer)
    make_savable(control)
    return control


def choose(discovery: Discovery, where: Where | None) -> list[Place]:
    """Return the places to expand, in the order data flows, none with a layer of another."""
    if not discovery.places:
        reasons = _reasons(discovery.refusals)
        reasons = reasons or ": the model has no linear layer and no convolution"
        raise FissileError(f"nothing to expand{reasons}")
    return disjoint(discovery.places if where is None else _named(discovery, where))


def _named(discovery: Discovery, where: Where) -> list[Place]:
    places = discovery.places
    if callable(where):
        named = [place for place in places if where(place)]
        if not named:
            raise FissileError(f"where chose none of {_names(places)}")
        return named
    patterns = [where] if isinstance(where, str) else where
    listed = isinstance(patterns, Sequence) and all(isinstance(name, str) for name in patterns)
    if not listed or not patterns:
        raise FissileError(f"where={where!r} is neither a name, a list of names nor a function")
    named = []
    for pattern in patterns:
        matching = [place for place in places if _matches(place.firsts, pattern)]
        if not matching:
            refused = [layer for layer in discovery.refusals if _matches([layer.name], pattern)]
            raise FissileError(
                f"where={pattern!r} matches no place that can be expanded{_reasons(refused)}; "
                f"there are {_names(places)}"
            )
        named += matching
    return [place for place in places if place in named]


def _matches(names: Iterable[str], pattern: str) -> bool:
    """Return whether a pattern names one of the layers or a module above one."""
    paths = [accumulate(name.split("."), "{}.{}".format) for name in names]
    return any(fnmatchcase(path, pattern) for path in chain.from_iterable(paths))


def _names(places: Sequence[Place]) -> str:
    names, most = [repr(place.name) for place in places], 2 * _SHOWN
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def _reasons(refusals: Sequence[Refusal]) -> str:
    """Return why the first few layers were refused."""
    shown = [f"{layer.name!r}: {layer.reason}" for layer in refusals[:_SHOWN]]
    more = [f"and {len(refusals) - _SHOWN} more"] if len(refusals) > _SHOWN else []
    return f" ({'; '.join(shown + more)})" if shown else ""


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is spread over processes or compiled: its wrapper holds its tensors."""
    if not isinstance(model, nn.Module):
        raise FissileError(f"a model is an nn.Module, not a {type(model).__name__}")
    if why := wrapped_in(model):
        raise FissileError(f"{why}, then wrap the expanded model")


@dataclass(frozen=True)
class _Plan:
    """How every place is split: what its first layer becomes, and which weights stay."""

    alpha: int
    make_first: Callable[[Tensor, nn.Module, Pattern], Rebuilt]  # with a seed of its own
    budget: Budget = "weights"
    allocation: Allocation = field(default_factory=Magnitude)
    optimizer: Optimizer | Moments | None = None


def _replacements(
    model: nn.Module, places: list[Place], splits: list[Split], seed: int | Tensor, plan: _Plan
) -> list[Replacement]:
    """Split every place; the model is only read."""
    if not isinstance(seed, Tensor) and whole("seed", seed, least=0) >= 2**63:
        raise FissileError(f"seed={seed} needs more than 63 bits; give a smaller one")
    for place in places:
        _check_values(model, place.layers)
    draw, stream = seeded(seed), 0
    made: dict[str, Replacement] = {}
    idle: list[str] = []
    for place, split in zip(places, splits, strict=True):
        try:
            new, without = _split_place(model, place, split, draw, hash32(seed, stream), plan)
        except FissileError as error:
            raise FissileError(f"layer {place.name!r}: {error}") from None
        made |= new
        if count := int(without.sum()):
            idle.append(f"{count} of {without.numel()} children of {place.name!r}")
        stream += len(place.between) + 2
    if idle and not isinstance(seed, Tensor):  # in a stack, single networks are nobody's worry
        warnings.warn(
            f"no input is left for {', '.join(idle)}: they are constant; use a smaller alpha, or "
            "a split that deals every child more inputs",
            stacklevel=3,
        )
    return list(made.values())


def _split_place(
    model: nn.Module, place: Place, split: Split, draw: Draw, seed: Tensor, plan: _Plan
) -> tuple[dict[str, Replacement], Tensor]:
    """Return what every module of a place becomes, by name, and which children get no input."""
    layers = [model.get_submodule(name) for name in place.layers]
    *firsts, second = layers
    count = check_alpha(plan.alpha, place.inputs)
    between = {
        name: Replacement(name, *new)
        for name in place.between
        if (new := widened(model.get_submodule(name), count)) is not None
    }
    form = _form(place, firsts[0], second)
    pattern = split_pair(
        torch.cat([matrix_of(layer) for layer in firsts], -2),
        matrix_of(second),
        count,
        split,
        draw,
        form=form,
        extra=_extra(model, firsts, between, count) if plan.budget == "all" else 0,
        allocation=plan.allocation,
        squares=_squares(layers, plan.optimizer) if plan.allocation.uses_gradients else None,
    )
    made = {
        name: Replacement(name, *plan.make_first(seed, layer, part))
        for name, layer, part in zip(place.firsts, firsts, pattern.parts(len(firsts)), strict=True)
    }
    pair = Pair(place.firsts, tuple(between), place.second)
    reader = Replacement(place.second, *sparse_second(second, pattern, pair))
    return made | between | {place.second: reader}, pattern.idle(form.parts)


def _form(place: Place, first: nn.Module, second: nn.Module) -> Form:
    """Read off how the place's neurons lie in its matrices."""
    if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d):
        return Form(1, *(layer.weight[0, 0].numel() for layer in (first, second)))
    return Form(2 if place.kind in ("gated", "fused") else 1)


def _extra(model: nn.Module, firsts: list[nn.Module], between: Iterable[str], alpha: int) -> int:
    """Count the parameters that the children add besides weights: biases, norms, slopes."""
    widths = [layer.bias.shape[-1] for layer in firsts if isinstance(layer.bias, Tensor)]
    for name in between:  # whose parameters all belong to single neurons
        widths += [p.shape[-1] for p in model.get_submodule(name).parameters()]
    return (alpha - 1) * sum(widths)


def _squares(layers: list[nn.Module], optimizer: Optimizer | Moments | None) -> Squares | None:
    """Return the squares of the gradients, laid out as the weights; None where there are none.

    All are Adam's or all are of the last gradient: a mean and a sample are not compared.
    """
    for source in (partial(_moment, optimizer), _squared_gradient):
        squares = [source(layer.get_parameter("weight")) for layer in layers]
        if not any(square is None for square in squares):
            *of_firsts, of_second = map(matrix_of, layers, squares)
            return torch.cat(of_firsts, -2), of_second
    return None


def _moment(optimizer: Optimizer | Moments | None, weight: nn.Parameter) -> Tensor | None:
    """Return Adam's running mean of the squares, uncorrected: layers learn for equally long."""
    if optimizer is None or weight not in optimizer.state:
        return None
    moment = optimizer.state[weight].get("exp_avg_sq")
    return moment.to(weight.device) if isinstance(moment, Tensor) else None


def _squared_gradient(weight: nn.Parameter) -> Tensor | None:
    if (gradient := weight.grad) is None:
        return None
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).square()


def _splits_for(places: list[Place], split: str | Split | Sequence[str | Split]) -> list[Split]:
    if isinstance(split, str | Split) or not isinstance(split, Sequence):
        return [resolve_split(split)] * len(places)
    if len(split) != len(places):
        raise FissileError(f"{len(split)} splits were given for {len(places)} widened layers")
    return [resolve_split(each) for each in split]


def _check_values(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse weights that no ranking by magnitude can order; the layers are known to be fit."""
    for name in names:
        layer = model.get_submodule(name)
        for key, parameter in layer.named_parameters():
            if parameter.dtype not in _DTYPES or not torch.isfinite(parameter).all():
                raise FissileError(
                    f"{name}.{key} ({parameter.dtype}) holds NaN, infinite or odd values; "
                    "expansion ranks weights by magnitude and needs finite numbers of 16 bits "
                    "or more"
                )
        weight = layer.get_parameter("weight")
        dims = (-2, -1) if weight.ndim == 3 else None  # of a stack, every network counts
        if not torch.count_nonzero(weight, dims).all():
            raise FissileError(
                f"every weight of {name!r} is zero, so there is nothing to keep; "
                "train the model before expanding it"
            )


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
    alpha, mask, rows = layer.alpha, layer.pattern(), -4 if isinstance(layer, SparseConv2d) else -2
    new = masked_like(layer, layer.dense_weight(), mask, copied(layer.bias))
    return new, {"weight": lambda t: torch.where(mask, children_of(t, alpha, rows), 0)}


def _rewrite(
    model: nn.Module,
    rebuild: Callable[[SparseLayer], Rebuilt | None],
    optimizer: Optimizer | Moments | None,
) -> nn.Module:
    """Put other layers in place of the expanded ones in a copy; None leaves one as it is."""
    if optimizer is not None:
        optimizer = check_optimizer(optimizer, model)
    made = []
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer) and (new := rebuild(layer)) is not None:
            if has_hooks(layer):
                raise FissileError(f"{name!r} has hooks, which a new layer would lose; remove them")
            made.append(Replacement(name, *new))
    rewritten = assemble(model, made, optimizer)
    make_savable(rewritten)
    return rewritten
