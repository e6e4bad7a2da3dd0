"""Finding every place of a model whose neurons can be split."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fissile._common.errors import FissileError
from fissile.discovery.follow import FROZEN, Found
from fissile.discovery.isolate import quietly
from fissile.discovery.meta_copy import hollow_copy
from fissile.discovery.module_checks import (
    has_hooks,
    held_aside,
    is_layer,
    kind_of,
    refuse_packed,
    shape_of,
    sizes_of,
    tied,
    trouble_of,
    widens,
    wrapped_in,
)
from fissile.discovery.place import Discovery, Place, Refusal
from fissile.discovery.scopes import Survey, survey
from fissile.discovery.structure import guesses
from fissile.discovery.trace import closed_leaves
from fissile.discovery.tryout import arguments_of, try_out

__all__ = ["discover"]

_DIFFERENT = "it is wired differently in training and in evaluation"
_UNSEEN = "nothing that could be traced calls it"


def discover(model: nn.Module, example_inputs: Any = None) -> Discovery:
    """Find the places of any model whose neurons can be split, and say why the rest cannot.

    The model's own forward is read (with ``torch.fx``, in training and in evaluation mode), not
    run, and the model is left as it is. A BatchNorm1d after a linear layer is taken to normalise
    the layer's neurons, as it does for inputs of two dimensions; with sequences as long as the
    layer is wide it does something else, which only ``example_inputs`` show.

    >>> print(discover(MLP([32, 8, 1])))
    place     kind  inputs → neurons → outputs  non-zeros
    layers.0  mlp   32 → 8 → 1                        264
    <BLANKLINE>
    refused   kind    shape  why
    layers.2  linear  8 → 1  its output is what the model returns

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments for one
            forward pass. With them every place is tried out, and places are found also where the
            forward cannot be traced.
    """
    refuse_packed(model)
    layers = {name: module for name, module in model.named_modules() if is_layer(module)}
    wrapped = wrapped_in(model)
    if wrapped is not None:
        return Discovery((), tuple(_refusal(n, m, wrapped) for n, m in layers.items()))
    aside = held_aside(model)
    trouble = {
        name: why
        for name, layer in layers.items()
        if (why := trouble_of(layer) or aside.get(id(layer))) is not None
    }
    with quietly():
        seen = _survey_both(model, trouble, example_inputs)
        _weed(model, seen, trouble, aside, example_inputs)
    places = [_place(model, one) for one in seen.found]
    taken = {name for place in places for name in place.firsts}
    refusals = [
        _refusal(name, layers[name], seen.reasons.get(name, _UNSEEN))
        for name in dict.fromkeys([*seen.order, *layers])
        if name in layers and name not in taken  # a module may have other names besides
    ]
    return Discovery(tuple(places), tuple(refusals))


def _survey_both(model: nn.Module, trouble: dict[str, str], example_inputs: Any) -> Survey:
    """Look at the model in both modes, and keep what holds in both."""
    try:
        hollow = hollow_copy(model)
    except Exception as error:
        raise FissileError(
            f"the model cannot be copied ({type(error).__name__}: {error}); take out of it what "
            "copy.deepcopy does not copy"
        ) from error
    closed, given = closed_leaves(model), _given(model, example_inputs)
    hollow.train()
    training = survey(hollow, closed, trouble, given)
    hollow.eval()
    seen = survey(hollow, closed, trouble, given)
    seen.reads |= training.reads
    seen.calls |= training.calls
    seen.untraced = list(dict.fromkeys([*seen.untraced, *training.untraced]))
    here, there = ({_key(one): one for one in both.found} for both in (seen, training))
    for key in here.keys() ^ there.keys():
        for name in key[1]:
            frozen = training.reasons.get(name) == FROZEN
            seen.reasons[name] = FROZEN if frozen else _DIFFERENT
    seen.found = [_both(one, there[key]) for key, one in here.items() if key in there]
    return seen


def _both(one: Found, other: Found) -> Found:
    """Join what was seen of a place in both modes."""
    between = tuple(dict.fromkeys((*one.between, *other.between)))
    return replace(one, between=between, doubt=one.doubt or other.doubt)


def _given(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Return the arguments of the model's forward by name."""
    if example_inputs is None:
        return {}
    positional, named = arguments_of(example_inputs)
    try:
        return inspect.signature(model.forward).bind(*positional, **named).arguments
    except TypeError as error:
        raise FissileError(f"the model does not take these example_inputs: {error}") from None


def _weed(
    model: nn.Module,
    seen: Survey,
    trouble: dict[str, str],
    aside: dict[int, str],
    example_inputs: Any,
) -> None:
    """Refuse places with parts that are used elsewhere, and those that fail when tried out."""
    if example_inputs is not None:
        known = {name for one in seen.found for name in one.firsts}
        more = guesses(model, seen.untraced, trouble, seen.reasons)
        seen.found += [one for one in more if one.firsts[0] not in known]
    ties = tied(model)
    failed = {one: why for one in seen.found if (why := _shared(model, one, seen, ties, aside))}
    left = [one for one in seen.found if one not in failed]
    if example_inputs is None:
        failed |= {one: one.doubt for one in left if one.doubt is not None}
    else:
        failed |= try_out(model, left, example_inputs)
    for one, why in failed.items():
        seen.reasons |= dict.fromkeys(one.firsts, why)
    position = {name: i for i, name in reversed(list(enumerate(seen.order)))}
    left = [one for one in seen.found if one not in failed]
    seen.found = sorted(left, key=lambda one: position.get(one.firsts[0], len(position)))


def _key(found: Found) -> tuple[Any, ...]:
    return found.kind, found.firsts, found.second


def _shared(
    model: nn.Module, found: Found, seen: Survey, ties: dict[int, str], aside: dict[int, str]
) -> str | None:
    """Say which part of a place has another use beside it."""
    for name in (*found.firsts, *found.between, found.second):
        module = model.get_submodule(name)
        mine = name in found.firsts
        it = "it" if mine and len(found.firsts) == 1 else repr(name)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in ties:
                return f"{ties[id(parameter)]} are one tied parameter; expansion would untie it"
            if f"{name}.{key}" in seen.reads:
                return f"{name}.{key} is read directly by the forward code"
        if has_hooks(module):  # also of parameters, which a hollow copy does not have
            return f"{name!r} has hooks, which a new one would lose; remove them"
        if id(module) in ties:
            return f"{ties[id(module)]} are one module; give each its own"
        learns = any(True for _ in module.parameters())
        if (learns or widens(module)) and seen.calls[name] > 1:
            return f"{it} is called {seen.calls[name]} times"
        if id(module) in aside and widens(module):
            return f"{name!r}: {aside[id(module)]}"
    return None


def _place(model: nn.Module, found: Found) -> Place:
    layers = [model.get_submodule(name) for name in (*found.firsts, found.second)]
    inputs, rows = sizes_of(layers[0])
    nonzeros = 0
    for layer in layers:
        assert isinstance(layer.weight, torch.Tensor)
        nonzeros += int(torch.count_nonzero(layer.weight.detach()))
    return Place(
        kind=found.kind,
        firsts=found.firsts,
        between=found.between,
        second=found.second,
        inputs=inputs,
        neurons=rows // 2 if found.kind == "fused" else rows,
        outputs=sizes_of(layers[-1])[1],
        nonzeros=nonzeros,
    )


def _refusal(name: str, layer: nn.Module, reason: str) -> Refusal:
    return Refusal(name or "(model)", kind_of(layer), shape_of(layer), reason)
