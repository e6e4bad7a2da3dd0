"""Reading a model: the chain of layers of an MLP, and the pairs that expansion acts on.

Hidden layers 1, 3, 5, ... widen; the layer after a widened one takes the wider input and is not
widened itself; the last linear layer, the head, never widens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from fissile.errors import FissileError
from fissile.layers import SparseLinear
from fissile.network import MLP, is_elementwise

__all__ = ["NORMS", "Link", "Pair", "check_layers", "first_hidden", "pairs_of"]

#: Norms whose parameters belong to single neurons, and are copied to the children.
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PASSING = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity)


@dataclass(frozen=True)
class Link:
    """A module of the chain and its name in the model."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Pair:
    """A linear layer that widens, what follows it, and the linear layer that takes its output."""

    first: str
    between: tuple[Link, ...]
    second: str


def pairs_of(model: nn.Module) -> list[Pair]:
    """Find the pairs to expand, from the input on; refuse a model that is not a plain MLP.

    >>> [(pair.first, pair.second) for pair in pairs_of(MLP([32, 8, 8, 8, 10]))]
    [('layers.0', 'layers.2'), ('layers.4', 'layers.6')]
    """
    chain = list(_chain(model))
    for link in chain:
        if isinstance(link.module, SparseLinear):
            raise FissileError(f"layer {link.name!r} is expanded already; expand the dense model")
    linears = [i for i, link in enumerate(chain) if type(link.module) is nn.Linear]
    pairs: list[Pair] = []
    spent = -1  # the last linear layer that takes part in a pair
    for here, after in pairwise(linears):
        between = tuple(chain[here + 1 : after])
        if here == spent or not _is_hidden(between):
            continue
        _check_between(chain[here], between)
        pairs.append(Pair(chain[here].name, between, chain[after].name))
        spent = after
    if not pairs:
        raise FissileError(
            "nothing to expand: the model has no linear layer followed by an activation and "
            "another linear layer"
        )
    _check_untied(model, pairs)
    return pairs


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
            f"cannot expand {type(model).__name__}: give an nn.Sequential or a fissile.MLP"
        )


def _is_hidden(between: tuple[Link, ...]) -> bool:
    """Tell a hidden layer from a linear embedding, which nothing but a linear layer follows."""
    return any(not isinstance(link.module, (*NORMS, *_PASSING)) for link in between)


def _check_between(first: Link, between: tuple[Link, ...]) -> None:
    assert isinstance(first.module, nn.Linear)
    width = first.module.out_features
    for link in between:
        module = link.module
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.normalized_shape != (width,):
            raise FissileError(f"{link.name!r} normalises more than the neurons of {first.name!r}")
        if isinstance(module, nn.PReLU) and module.num_parameters not in (1, width):
            raise FissileError(f"{link.name!r} has slopes that fit no neuron of {first.name!r}")
        if not isinstance(module, (*NORMS, *_PASSING)) and not is_elementwise(module):
            raise FissileError(
                f"cannot copy neurons through {link.name!r} ({type(module).__name__}): between a "
                "widened layer and the next stand only norms, dropout and elementwise activations"
            )


def _check_untied(model: nn.Module, pairs: list[Pair]) -> None:
    """Refuse a layer that is used twice: widening one use would break the other."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for pair in pairs:
        for layer in (pair.first, pair.second, *(link.name for link in pair.between)):
            for parameter in model.get_submodule(layer).parameters():
                if len(names[id(parameter)]) > 1:
                    shared = " and ".join(names[id(parameter)])
                    raise FissileError(f"{shared} are one tied parameter; expansion would untie it")


def check_layers(model: nn.Module, pairs: list[Pair]) -> None:
    """Refuse weights that no ranking by magnitude can order, and layers that are more than one."""
    for pair in pairs:
        for name in (pair.first, pair.second):
            layer = model.get_submodule(name)
            if "weight" not in layer._parameters:
                raise FissileError(
                    f"the weight of {name!r} is computed, not a parameter (pruned or "
                    "parametrised?); make it permanent first, e.g. with torch's prune.remove"
                )
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
                raise FissileError(f"{name!r} has hooks, which a new layer would lose; remove them")
            for key, parameter in layer.named_parameters():
                if parameter.is_meta:
                    raise FissileError(f"{name}.{key} is on the meta device and has no values")
                if parameter.dtype not in _DTYPES or not torch.isfinite(parameter).all():
                    raise FissileError(
                        f"{name}.{key} ({parameter.dtype}) holds NaN, infinite or odd values; "
                        "expansion ranks weights by magnitude and needs finite numbers of 16 bits "
                        "or more"
                    )
            if not torch.count_nonzero(layer.get_parameter("weight"), (-2, -1)).all():
                raise FissileError(
                    f"every weight of {name!r} is zero, so there is nothing to keep; "
                    "train the model before expanding it"
                )
