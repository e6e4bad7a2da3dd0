"""Trying places out: neurons that are merely doubled must not change what a model computes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fissile.children import widened
from fissile.errors import FissileError
from fissile.layers import is_transposed
from fissile.surgery.follow import Found

__all__ = ["arguments_of", "try_out"]

_MAKES, _READS = ("out_features", "out_channels", "nf"), ("in_features", "in_channels", "nx")
_CHANGED = "widening it without splitting changes what the model computes"


def arguments_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a forward pass is called with.

    >>> arguments_of({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def try_out(model: nn.Module, found: list[Found], example_inputs: Any) -> dict[Found, str]:
    """Double the neurons of every place, in a copy and without splitting; return what fails, why.

    Args:
        model: the model; it stays as it is.
        found: the places to try.
        example_inputs: for one forward pass.
    """
    trial = _Trial(model, example_inputs)
    failed = {one: why for one in found if (why := trial.miscounted(one)) is not None}
    left = [one for one in found if one not in failed]
    while left:
        together = _apart(left)
        if not trial.holds(together):
            failed |= {one: _CHANGED for one in together if not trial.holds([one])}
        left = [one for one in left if one not in together]
    return failed


def _apart(found: list[Found]) -> list[Found]:
    """Return places that have no layer in common."""
    chosen: list[Found] = []
    spent: set[str] = set()
    for one in found:
        layers = {*one.firsts, one.second}
        if spent.isdisjoint(layers):
            chosen.append(one)
            spent |= layers
    return chosen


class _Trial:
    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.inputs = model, example_inputs
        self.calls: Counter[str] = Counter()
        plain = self._copy()
        for name, module in plain.named_modules():
            module.register_forward_hook(lambda *_, name=name: self.calls.update([name]))
        try:
            self.expected = self._run(plain)
        except Exception as error:
            raise FissileError(
                f"the model does not run with these example_inputs: {type(error).__name__}: {error}"
            ) from error

    def miscounted(self, found: Found) -> str | None:
        """Say whether a layer runs more often than what reads it, in one pass."""
        firsts, second = [self.calls[name] for name in found.firsts], self.calls[found.second]
        if any(count > second for count in firsts):
            return f"it is called more often than {found.second!r}, which reads it"
        if any(count < second for count in firsts):
            return f"{found.second!r}, which reads it, is called more often"
        if second == 0 and found.doubt is not None:
            return f"{found.doubt} (the example_inputs given do not reach it)"
        return None

    def holds(self, found: list[Found]) -> bool:
        """Tell whether the model computes the same when these places are doubled."""
        work = self._copy()
        for one in found:
            _double(work, one)
        try:
            outputs = self._run(work)
        except Exception:  # a shape that no longer fits, whatever says so
            return False
        return len(outputs) == len(self.expected) and all(
            _close(mine, theirs) for mine, theirs in zip(outputs, self.expected, strict=True)
        )

    def _copy(self) -> nn.Module:
        """Copy the model but for its parameters, which nobody changes here."""
        memo = {id(parameter): parameter for parameter in self.model.parameters()}
        new = copy.deepcopy(self.model, memo)
        new.eval()
        return new

    def _run(self, model: nn.Module) -> list[Tensor]:
        clone = lambda x: x.clone() if isinstance(x, Tensor) else x  # noqa: E731
        positional, named = arguments_of(self.inputs)
        torch.manual_seed(0)
        with torch.no_grad():
            output = model(*tree_map(clone, positional), **tree_map(clone, named))
        return [tensor.clone() for tensor in _tensors(output)]


def _tensors(output: Any) -> Iterator[Tensor]:
    """Find the tensors in whatever a model returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for one in fields(output):
            yield from _tensors(getattr(output, one.name))


def _close(one: Tensor, other: Tensor) -> bool:
    """Compare up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(other)
    if not torch.equal(finite, torch.isfinite(one)):
        return False
    room = torch.finfo(one.dtype).eps ** 0.4  # 0.002 in float32, which TensorFloat-32 needs
    one, other = one[finite].double(), other[finite].double()
    return bool(((one - other).abs() <= room * other.abs().max()).all()) if one.numel() else True


def _double(model: nn.Module, found: Found) -> None:
    """Give every neuron a twin; what reads them counts each one half."""
    for name in found.firsts:
        model.set_submodule(name, _layer(model.get_submodule(name), neurons=True))
    for name in found.between:
        new = widened(model.get_submodule(name), 2)
        if new is not None:
            model.set_submodule(name, new[0].train(False))
    model.set_submodule(found.second, _layer(model.get_submodule(found.second), neurons=False))


def _layer(layer: nn.Module, *, neurons: bool) -> nn.Module:
    """Return a layer with twice the neurons, or one that reads twice as many."""
    new = copy.deepcopy(layer)
    rows, columns = (-1, -2) if is_transposed(layer) else (-2, -1)
    if isinstance(layer, nn.Conv2d):
        rows, columns = 0, 1
    weight, bias = new.get_parameter("weight").detach(), new._parameters["bias"]
    if neurons:
        new.weight = nn.Parameter(weight.repeat_interleave(2, rows))
        if bias is not None:
            new.bias = nn.Parameter(bias.detach().repeat_interleave(2, -1))
    else:
        new.weight = nn.Parameter(weight.repeat_interleave(2, columns) / 2)
    for name in _MAKES if neurons else _READS:
        if hasattr(new, name):
            setattr(new, name, 2 * getattr(new, name))
    return new
