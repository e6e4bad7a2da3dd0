"""Copies of a model for looking at: with tensors that have no values, or numbers of 64 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, float64, nn
from torch.nn.parameter import is_lazy

from fissile.discovery.module_checks import widens

__all__ = ["WIDTHS", "Width", "as_it_is", "copied_with", "hollow_copy", "in_double"]

WIDTHS = (
    "in_features", "out_features", "in_channels", "out_channels", "nx", "nf",
    "num_features", "num_channels",
)  # fmt: skip


class Width(int):
    """A width that knows whose it is, so that a tracer sees code which reads it."""

    owner: str


def hollow_copy(model: nn.Module) -> nn.Module:
    """Copy a model with tensors that have a shape but no values, so that nothing can be harmed.

    Layers and norms are new objects under their names: code that calls them in another way, as
    from a helper that holds them, calls something that is not in the model, as it would after
    expansion.
    """
    hollow = copied_with(model, _hollow)
    fresh: dict[int, nn.Module] = {}
    for path, module in list(hollow.named_modules(remove_duplicate=False)):
        above, _, name = path.rpartition(".")
        if path and widens(module):
            if id(module) not in fresh:
                fresh[id(module)] = _anew(module, path)
            hollow.get_submodule(above)._modules[name] = fresh[id(module)]
    return hollow


def _anew(module: nn.Module, path: str) -> nn.Module:
    """Return another object with all a layer has, its widths where a tracer sees them asked for."""
    new = nn.Module.__new__(type(module))
    vars(new).update(vars(module))
    new._buffers = dict(module._buffers)
    for key in WIDTHS:
        value = vars(new).get(key)
        if isinstance(value, int):
            width = Width(value)
            width.owner = path
            del vars(new)[key]
            new._buffers[key] = width  # type: ignore[assignment]
    return new


def copied_with(model: nn.Module, make: Callable[[Tensor], Tensor | None]) -> nn.Module:
    """Copy a model, with other tensors where its modules hold some; None leaves one to deepcopy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = (module._parameters, module._buffers, vars(module))
        for tensor in (value for values in held for value in values.values()):
            if isinstance(tensor, Tensor) and (new := make(tensor)) is not None:
                memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def _hollow(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        return tensor
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def as_it_is(tensor: Tensor) -> Tensor | None:
    """Copy a plain tensor."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return _like(tensor, tensor.detach().clone()) if plain else None


def in_double(tensor: Tensor) -> Tensor | None:
    """Copy a plain tensor, real numbers as float64."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
    return _like(tensor, tensor.detach().to(float64, copy=True)) if plain else as_it_is(tensor)


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data
