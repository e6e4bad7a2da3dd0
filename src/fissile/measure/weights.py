"""What a measure takes for weights: a tensor, an array, a layer, or a model and a place in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile.discovery import Place
from fissile.expansion.replace import matrix_of
from fissile.layers import SparseLayer, is_transposed

Result = TypeVar("Result")


def on_weights(measure: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function of a weight tensor take whatever holds weights; ``place`` names a layer.

    >>> on_weights(lambda weight: weight.sum())(np.ones((2, 3)))
    tensor(6., dtype=torch.float64)
    """

    @wraps(measure)
    def measured(weight: Any, *args: Any, place: Any = None, **options: Any) -> Any:
        if place is not None and not isinstance(weight, nn.Module):
            raise FissileError("place= names a layer of a model; leave it out for bare weights")
        matrix = _of_module(weight, place) if isinstance(weight, nn.Module) else _tensor(weight)
        if not isinstance(matrix, Tensor) or matrix.ndim < 2 or not matrix.is_floating_point():
            shape, kind = getattr(matrix, "shape", ""), getattr(matrix, "dtype", type(weight))
            raise FissileError(
                f"weights cannot be {kind} {list(shape)}; give floating point numbers, a row for "
                "every neuron, [neurons, inputs]: a tensor, array or layer, or a model with place="
            )
        options = {name: _tensor(value, matrix) for name, value in options.items()}
        return measure(matrix, *(_tensor(value, matrix) for value in args), **options)

    signature = inspect.signature(measure)
    place = inspect.Parameter("place", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), place]
    measured.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return measured


def _tensor(value: Any, like: Tensor | None = None) -> Any:
    """Turn an array or a list into a tensor, beside the weights and of their type if it can be."""
    if not isinstance(value, np.ndarray | list):
        return value
    tensor = torch.tensor(value)
    return (
        tensor if like is None else tensor.to(like if tensor.is_floating_point() else like.device)
    )


def _of_module(model: nn.Module, place: str | Place | None) -> Tensor:
    """Return the weights of a layer, or of those that make the neurons of a place, as one."""
    names = place.firsts if isinstance(place, Place) else (place or "",)
    kinds = nn.Linear | nn.Conv2d | SparseLayer
    found = {n: m for n, m in model.named_modules() if isinstance(m, kinds) or is_transposed(m)}
    if not found.keys() >= {*names}:
        there = ", ".join(map(repr, found)) or "none"
        raise FissileError(f"place={place!r} is no layer with weights; there are {there}")
    return torch.cat([_rows(found[name]) for name in names], -2).detach()


def rows_of(model: nn.Module, place: Place) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of the layers that make the neurons of a place, as one.

    >>> weight, bias = rows_of(model, fissile.discover(model).places[0])
    """
    weight = _of_module(model, place)
    biases = [model.get_submodule(name)._parameters.get("bias") for name in place.firsts]
    held = [one.detach() for one in biases if one is not None]
    return weight, torch.cat(held) if held else weight.new_zeros(len(weight))


def _rows(layer: Any) -> Tensor:
    """Return a layer's weights with a row for every neuron or filter."""
    if isinstance(layer, SparseLayer):
        return layer.rows(layer.dense_weight())
    return matrix_of(layer, layer.weight)
