"""Reading a model: the chain of layers of an MLP, and whether weights can be ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from fissile.errors import FissileError
from fissile.layers import SparseLinear
from fissile.network import MLP

__all__ = ["check_values", "first_hidden"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PASSING = (
    nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d,
    nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity,
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A module of the chain and its name in the model."""

    name: str
    module: nn.Module


def first_hidden(model: nn.Module) -> nn.Module:
    """Return the layer the paper calls W1: the first linear one that an activation follows."""
    chain = list(_chain(model))
    linears = [i for i, m in enumerate(chain) if isinstance(m.module, nn.Linear | SparseLinear)]
    for here, after in pairwise(linears):
        if _is_hidden(tuple(chain[here + 1 : after])):
            return chain[here].module
    raise FissileError("the model has no hidden layer")


def _chain(model: nn.Module, prefix: str = "") -> Iterator[Link]:
    if isinstance(model, MLP) and type(model).forward is MLP.forward:
        if model.embedding is not None:
            yield Link(f"{prefix}embedding", model.embedding)
        yield from _chain(model.layers, f"{prefix}layers.")
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for name, module in model._modules.items():  # named_children() shows a shared one once
            assert module is not None
            if isinstance(module, nn.Sequential | MLP):
                yield from _chain(module, f"{prefix}{name}.")
            else:
                yield Link(prefix + name, module)
    else:
        raise FissileError(
            f"{type(model).__name__} is no chain of layers: give an nn.Sequential or a fissile.MLP"
        )


def _is_hidden(between: tuple[Link, ...]) -> bool:
    """Tell a hidden layer from a linear embedding, which nothing but a linear layer follows."""
    return any(not isinstance(link.module, _PASSING) for link in between)


def check_values(model: nn.Module, names: Iterable[str]) -> None:
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
