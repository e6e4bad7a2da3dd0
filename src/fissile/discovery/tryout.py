"""Trying places out: neurons that are merely doubled must not change what a model computes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fissile._common.errors import FissileError
from fissile.discovery.meta_copy import as_it_is, copied_with, in_double, reseed
from fissile.discovery.module_checks import Candidate, disjoint
from fissile.layers import children_of, copied, is_transposed, widened

_MAKES, _READS = ("out_features", "out_channels", "nf"), ("in_features", "in_channels", "nx")
#: The largest model that is copied in 64 bits, a gigabyte.
_LARGEST = 2**27
_CHANGED = "widening it without splitting changes what the model computes"


def try_out(model: nn.Module, places: list[Candidate], example_inputs: Any) -> dict[Candidate, str]:
    """Double the neurons of every place in a copy, without splitting; return what fails, why."""
    trial = _Trial(model, {place.second for place in places}, example_inputs)
    failed = {place: why for place in places if (why := trial.miscounted(place)) is not None}
    left = [place for place in places if place not in failed]
    while left:
        together = disjoint(left)
        if trial.trouble(together) is not None:
            alone = {place: trial.trouble([place]) for place in together}
            failed |= {place: why for place, why in alone.items() if why is not None}
        left = [place for place in left if place not in together]
    return failed


@dataclass
class _Pass:
    """What one forward pass has shown."""

    calls: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)  # the model's has no name


class _Trial:
    def __init__(self, model: nn.Module, seconds: set[str], example_inputs: Any) -> None:
        self.model, self.seconds, self.inputs = model, seconds, example_inputs
        self.copy_tensor: Callable[[Tensor], Tensor | None] = as_it_is
        try:
            self.plain = self._run(self._copy())
        except Exception as error:
            raise FissileError(
                f"the model does not run with these example_inputs: {type(error).__name__}: {error}"
            ) from error
        if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
            return
        # Numbers of 64 bits tell a small change from rounding.
        self.copy_tensor = in_double
        with suppress(Exception):  # code that insists on its own dtype
            plain = self._run(self._copy())
            if plain.calls == self.plain.calls:
                self.plain = plain
                return
        self.copy_tensor = as_it_is

    def miscounted(self, place: Candidate) -> str | None:
        """Return whether a layer and its reader run unequally often in one pass; None if alike."""
        calls = self.plain.calls
        firsts, second = {calls[name] for name in place.firsts}, calls[place.second]
        if max(firsts) > second:
            return f"it is called more often than {place.second!r}, which reads it"
        if min(firsts) < second:
            return f"{place.second!r}, which reads it, is called more often"
        if second == 0 and place.doubt is not None:
            return f"{place.doubt} (the example_inputs given do not reach it)"
        return None

    def trouble(self, places: list[Candidate]) -> str | None:
        """Return how the model goes wrong when these places are doubled; None if it does not."""
        work = self._copy()
        for place in places:
            _double(work, place)
        try:
            wide = self._run(work)
        except Exception:  # a shape that no longer fits, whatever says so
            return _CHANGED
        layers = [name for place in places for name in place.layers]
        if any(wide.calls[name] != self.plain.calls[name] for name in layers):
            return "the model goes on calling the old layer, past its name"
        # A branch that counts for little shows in its own layer, hardly in what the model returns.
        for name in ("", *(place.second for place in places)):
            mine, theirs = (run.outputs.get(name, []) for run in (wide, self.plain))
            if len(mine) != len(theirs) or not all(map(_close, mine, theirs)):
                return _CHANGED
        return None

    def _copy(self) -> nn.Module:
        return copied_with(self.model, self.copy_tensor).eval()

    def _run(self, model: nn.Module) -> _Pass:
        seen = _Pass()

        def note(name: str, output: Any) -> None:
            seen.calls[name] += 1
            if name in self.seconds or not name:
                leaves = tree_leaves(vars(output) if is_dataclass(output) else output)
                tensors = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
                seen.outputs.setdefault(name, []).extend(tensors)

        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                module.register_forward_hook(lambda *args, name=name: note(name, args[-1]))
        args, named = self.inputs, {}
        if isinstance(self.inputs, Mapping):
            args, named = (), dict(self.inputs)
        elif not isinstance(self.inputs, list | tuple):
            args = (self.inputs,)
        args, named = tree_map(self._input, (tuple(args), named))
        reseed()
        with torch.no_grad():
            model(*args, **named)
        return seen

    def _input(self, x: Any) -> Any:
        new = self.copy_tensor(x) if isinstance(x, Tensor) else None
        return copy.copy(x) if new is None else new


def _close(x: Tensor, y: Tensor) -> bool:
    """Compare up to rounding."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    finite = y[torch.isfinite(y)].abs()
    room = torch.finfo(x.dtype).eps ** 0.4  # 0.002 in float32, which TensorFloat-32 needs
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(x, y, rtol=0, atol=room * largest, equal_nan=True)


def _double(model: nn.Module, place: Candidate) -> None:
    """Give every neuron a twin; what reads them counts each one half."""
    for name in place.firsts:
        model.set_submodule(name, _layer(model.get_submodule(name), neurons=True))
    for name in place.between:
        new = widened(model.get_submodule(name), 2)
        if new is not None:
            model.set_submodule(name, new[0].train(False))
    model.set_submodule(place.second, _layer(model.get_submodule(place.second), neurons=False))


def _layer(layer: nn.Module, *, neurons: bool) -> nn.Module:
    """Return a layer with twice the neurons, or one that reads twice as many."""
    new = copy.deepcopy(layer)
    rows, columns = (-1, -2) if is_transposed(layer) else (-2, -1)
    if isinstance(layer, nn.Conv2d):
        rows, columns = 0, 1
    wide = children_of(layer.get_parameter("weight").detach(), 2, rows if neurons else columns)
    new.weight = nn.Parameter(wide if neurons else wide / 2)
    bias = copied(layer._parameters["bias"], 2 if neurons else 1)
    if bias is not None:
        new.bias = nn.Parameter(bias)
    for name in _MAKES if neurons else _READS:
        if hasattr(new, name):
            setattr(new, name, 2 * getattr(new, name))
    return new
