"""Finding every place of a model whose neurons can be split.

A plain chain of layers is read off. Any other model is traced, in training and in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fissile._common.errors import FissileError
from fissile._common.progress import aligned
from fissile.discovery.follow import FROZEN, TRY
from fissile.discovery.meta_copy import meta_copy, random_numbers_apart
from fissile.discovery.module_checks import (
    Candidate,
    Kind,
    Modules,
    has_hooks,
    is_layer,
    kind_of,
    passage,
    refuse_packed,
    shape_of,
    sizes_of,
    tied,
    trouble_of,
    widens,
    wrapped_in,
)
from fissile.discovery.trace import Survey
from fissile.discovery.tryout import try_out
from fissile.layers.mlp import MLP, PLAIN_PARTS, Link, chain

#: Why a layer that is itself the model cannot be split.
_ALONE = (
    "it is the whole model, and no layer reads its neurons; give a model that holds two layers, "
    "such as nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))"
)
_DIFFERENT = "it is wired differently in training and in evaluation"
_UNSEEN = "nothing that could be traced calls it"
_MODULE = set(vars(nn.Module()))
_CONTAINERS = (nn.Sequential, MLP)
_NUMBERS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Place(Modules):
    """A place where neurons can be split: the layers that make them and the one that reads them.

    >>> place = discover(MLP([32, 8, 1])).places[0]
    >>> place.name, place.between, place.second, place.neurons
    ('layers.0', ('layers.1',), 'layers.2', 8)

    ``firsts`` has one name, or gate and up of a gated pair. In a ``"fused"`` pair one layer makes
    both halves, so it has ``2 * neurons`` rows. ``between`` are the modules the neurons pass
    through on their way to ``second``; those with something for every neuron widen with them.
    """

    inputs: int
    neurons: int
    outputs: int
    nonzeros: int

    @property
    def name(self) -> str:
        """The name of the layer whose neurons split first."""
        return self.firsts[0]


@dataclass(frozen=True)
class Refusal:
    """A layer with neurons that will not be split, and why.

    >>> discover(MLP([32, 8, 1])).refusals[0].reason
    'its output is what the model returns'
    """

    name: str
    kind: str
    shape: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """The places and refusals of a model, in the order in which data flows through it.

    >>> len(discover(MLP([32, 8, 1])))
    1
    """

    places: tuple[Place, ...]
    refusals: tuple[Refusal, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __repr__(self) -> str:
        """Show the counts; printed, it is the whole table."""
        return f"Discovery(places: {len(self.places)}, refusals: {len(self.refusals)})"

    def __str__(self) -> str:
        """Show a table: what can be split, then what cannot and why."""
        rows = [("place", "kind", "inputs → neurons → outputs", "non-zeros")]
        for place in self.places:
            sizes = f"{place.inputs} → {place.neurons} → {place.outputs}"
            rows.append((place.name, place.kind, sizes, f"{place.nonzeros:,}"))
        refused = [("refused", "kind", "shape", "why")]
        refused += [(layer.name, layer.kind, layer.shape, layer.reason) for layer in self.refusals]
        lines = aligned(rows, right=[3]) if self.places else ["no place can be split"]
        return "\n".join([*lines, "", *aligned(refused)] if self.refusals else lines)


def discover(model: nn.Module, example_inputs: Any = None) -> Discovery:
    """Find the places of any model whose neurons can be split, and why the other layers cannot.

    >>> print(discover(MLP([32, 8, 1])))
    place     kind  inputs → neurons → outputs  non-zeros
    layers.0  mlp   32 → 8 → 1                        264
    <BLANKLINE>
    refused   kind    shape  why
    layers.2  linear  8 → 1  its output is what the model returns

    The model's own forward is traced (with ``torch.fx``, in training and in evaluation mode), not
    run, and the model is left as it is. Where the trace cannot tell, the place is refused, and
    ``example_inputs`` decide. A BatchNorm1d after a linear layer is taken to normalise
    the layer's neurons, as it does for inputs of two dimensions; with sequences as long as the
    layer is wide it does something else, which only ``example_inputs`` show.

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
    trouble = {n: why for n, m in layers.items() if (why := trouble_of(m)) is not None}
    links = _plain_chain(model) if not trouble else None
    foreign = links is None or example_inputs is not None  # code that is not torch's will run
    with random_numbers_apart() if foreign else nullcontext():
        seen = _survey_both(model, trouble) if links is None else _read_off(model, links)
        _weed(seen, example_inputs)
    places = [_place(model, candidate) for candidate in seen.places]
    taken = {name for place in places for name in place.firsts}
    refusals = [
        _refusal(name, layers[name], seen.reasons.get(name, _UNSEEN))
        for name in dict.fromkeys([*seen.order, *layers])
        if name in layers and name not in taken  # a module may have other names besides
    ]
    return Discovery(tuple(places), tuple(refusals))


def _plain_chain(model: nn.Module) -> list[Link] | None:
    """Return the modules of an nn.Sequential or MLP of well-known parts; None for other models."""
    parts = list(model.modules())
    if type(model) not in _CONTAINERS or not all(map(_is_plain, parts)):
        return None
    links = list(chain(model))
    called = {id(link.module) for link in links}
    single = [part for part in parts if type(part) not in _CONTAINERS]
    return links if len(links) == len(called) == len(single) else None  # every part runs once


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is exactly what torch or fissile made it."""
    if type(module) not in PLAIN_PARTS or has_hooks(module) or None in module._modules.values():
        return False
    if type(module) in _CONTAINERS and not module._modules:
        return False
    own = [value for key, value in vars(module).items() if key not in _MODULE]
    numbers = [n for value in own for n in (value if isinstance(value, tuple) else (value,))]
    return all(isinstance(number, _NUMBERS) for number in numbers)


def _read_off(model: nn.Module, links: list[Link]) -> Survey:
    """Survey a plain chain, whose code needs no trace."""
    seen = Survey(model, {})
    linears = [i for i, link in enumerate(links) if is_layer(link.module)]
    seen.order = [links[i].name for i in linears]
    seen.calls.update(link.name for link in links)
    for here, after in pairwise(linears):
        place = _in_a_row(links[here], links[here + 1 : after], links[after])
        if isinstance(place, Candidate):
            seen.places.append(place)
        else:
            seen.reasons[links[here].name] = place
    for last in linears[-1:]:
        why = _activated(links[last], links[last + 1 :])
        returned = "its output is what the model returns"
        seen.reasons[links[last].name] = why if isinstance(why, str) else returned
    return seen


def _guesses(seen: Survey) -> Iterator[Candidate]:
    """Guess places among children of modules that could not be traced; only a try-out can tell."""
    known = {name for place in seen.places for name in place.firsts}
    for path in seen.untraced:
        start = f"{path}." if path else ""
        links = [Link(start + n, m) for n, m in seen.model.get_submodule(path).named_children()]
        layers = [i for i, link in enumerate(links) if is_layer(link.module)]
        for here, after in pairwise(layers):
            first, second = links[here], links[after]
            if first.name in known or not seen.trouble.keys().isdisjoint((first.name, second.name)):
                continue
            place = _in_a_row(first, links[here + 1 : after], second)
            if isinstance(place, Candidate):
                doubt = seen.reasons.get(first.name, "its forward could not be traced")
                yield replace(place, doubt=doubt)


def _in_a_row(first: Link, between: list[Link], second: Link) -> Candidate | str:
    """Return the place that modules make which run one after the other, or why they make none."""
    active, conv = _activated(first, between), isinstance(first.module, nn.Conv2d)
    if isinstance(active, str):
        return active
    if isinstance(second.module, nn.Conv2d) is not conv:
        return f"{second.name!r}, a layer of another kind, reads it"
    if sizes_of(second.module)[0] != sizes_of(first.module)[1]:
        return f"{second.name!r} reads it but has another number of inputs"
    if not active:
        return f"nothing but linear layers from here to {second.name!r}"
    kind: Kind = "conv" if conv else "mlp"
    return Candidate(kind, (first.name,), tuple(link.name for link in between), second.name)


def _activated(first: Link, between: list[Link]) -> bool | str:
    """Return whether a layer's neurons pass an activation, or why they do not get through."""
    width, conv = sizes_of(first.module)[1], isinstance(first.module, nn.Conv2d)
    passages = [passage(link.module, link.name, width, conv) for link in between]
    troubles = [why for why in passages if isinstance(why, str)]
    return troubles[0] if troubles else any(passages)


def _survey_both(model: nn.Module, trouble: dict[str, str]) -> Survey:
    """Look at the model in both modes, and keep what holds in both."""
    try:
        hollow, asked = meta_copy(model)
    except Exception as error:
        raise FissileError(
            f"the model cannot be copied ({type(error).__name__}: {error}); take out of it what "
            "copy.deepcopy does not copy"
        ) from error
    training, seen = Survey(model, trouble), Survey(model, trouble)
    training.visit(hollow.train(), "", _ALONE, None)
    seen.visit(hollow.eval(), "", _ALONE, None)
    seen.reads |= training.reads
    seen.calls |= training.calls
    seen.untraced = list(dict.fromkeys([*seen.untraced, *training.untraced]))
    here, there = (
        {(place.kind, place.firsts, place.second): place for place in mode.places}
        for mode in (seen, training)
    )
    for name in (name for _, firsts, _ in here.keys() ^ there.keys() for name in firsts):
        frozen = training.reasons.get(name) == FROZEN
        seen.reasons[name] = FROZEN if frozen else _DIFFERENT
    seen.places = [_both(place, there[key], asked) for key, place in here.items() if key in there]
    return seen


def _both(place: Candidate, other: Candidate, asked: set[str]) -> Candidate:
    """Join what was seen of a place in both modes."""
    between = tuple(dict.fromkeys((*place.between, *other.between)))
    doubts = [place.doubt, other.doubt]
    for name in (*place.firsts, *between, place.second):
        if name in asked:
            doubts.append(f"the code asks for the width of {name!r}; {TRY}")
    return replace(place, between=between, doubt=next(filter(None, doubts), None))


def _weed(seen: Survey, example_inputs: Any) -> None:
    """Refuse places with parts that are used elsewhere, and those that fail when tried out."""
    if example_inputs is not None:
        seen.places += _guesses(seen)
    ties = tied(seen.model)
    failed = {place: why for place in seen.places if (why := _shared(place, seen, ties))}
    left = [place for place in seen.places if place not in failed]
    if example_inputs is None:
        failed |= {place: place.doubt for place in left if place.doubt is not None}
    else:
        failed |= try_out(seen.model, left, example_inputs)
    for place, why in failed.items():
        seen.reasons |= dict.fromkeys(place.firsts, why)
    position = {name: i for i, name in reversed(list(enumerate(seen.order)))}
    left = [place for place in seen.places if place not in failed]
    seen.places = sorted(left, key=lambda place: position.get(place.firsts[0], len(position)))


def _shared(place: Candidate, seen: Survey, ties: dict[int, str]) -> str | None:
    """Return which part of a place has another use beside it."""
    for name in (*place.firsts, *place.between, place.second):
        module = seen.model.get_submodule(name)
        it = "it" if (name,) == place.firsts else repr(name)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in ties:
                return f"{ties[id(parameter)]} are one tied parameter; expansion would untie it"
            if f"{name}.{key}" in seen.reads:
                return f"{name}.{key} is read directly by the forward code"
        if id(module) in ties:
            return f"{ties[id(module)]} are one module; give each its own"
        learns = any(True for _ in module.parameters())
        if (learns or widens(module)) and seen.calls[name] > 1:
            return f"{it} is called {seen.calls[name]} times"
    return None


def _place(model: nn.Module, candidate: Candidate) -> Place:
    layers = [model.get_submodule(name) for name in (*candidate.firsts, candidate.second)]
    inputs, rows = sizes_of(layers[0])
    nonzeros = 0
    for layer in layers:
        assert isinstance(layer.weight, torch.Tensor)
        nonzeros += int(torch.count_nonzero(layer.weight.detach()))
    neurons = rows // 2 if candidate.kind == "fused" else rows
    outputs = sizes_of(layers[-1])[1]
    names = candidate.firsts, candidate.between, candidate.second
    return Place(candidate.kind, *names, inputs, neurons, outputs, nonzeros)


def _refusal(name: str, layer: nn.Module, reason: str) -> Refusal:
    return Refusal(name or "(model)", kind_of(layer), shape_of(layer), reason)
