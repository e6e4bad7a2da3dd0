"""`MLP`: linear layers in a row, with an optional embedding, norms, dropout and activation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import Float
from fissile.layers import SparseLinear

# Activations of torch.nn that act on each number alone, by the name a user would write.
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__.lower(): kind
    for kind in (
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU,
        nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign,
        nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    )
}  # fmt: skip

_EPS = inspect.signature(nn.LayerNorm).parameters["eps"].default  # makes no tensor yet


def _make_activation(activation: str | nn.Module) -> nn.Module:
    """Return a fresh activation from a name such as ``"relu"`` or a module to copy."""
    if isinstance(activation, str):
        if activation.lower() not in _ACTIVATIONS:
            names = ", ".join(sorted(_ACTIVATIONS))
            raise FissileError(f"unknown activation {activation!r}; known are {names}")
        return _ACTIVATIONS[activation.lower()]()
    if not isinstance(activation, nn.Module) or not is_elementwise(activation):
        raise FissileError(
            f"{activation!r} is not an elementwise activation: give a name such as 'relu' or a "
            "module that maps each number by itself"
        )
    return copy.deepcopy(activation)


def _activation_recipe(activation: nn.Module) -> dict[str, Any] | None:
    """Describe an activation of torch.nn so that it can be made again; None for a foreign one."""
    kind = type(activation)
    if _ACTIVATIONS.get(kind.__name__.lower()) is not kind:
        return None
    settings = _settings(kind)
    values = {key: getattr(activation, key) for key in settings}
    return {"name": kind.__name__.lower(), "settings": values}


def _settings(kind: type[nn.Module]) -> list[str]:
    """Name what an activation is made with; how many slopes a PReLU has, its tensors say."""
    accepted = inspect.signature(kind.__init__).parameters
    named = [key for key in getattr(kind, "__constants__", []) if key in accepted]
    return [key for key in named if key != "num_parameters"]


def _activation_from(recipe: dict[str, Any]) -> nn.Module:
    """Make the activation a recipe describes; only known names and plain values are taken."""
    kind = _ACTIVATIONS.get(str(recipe["name"]))
    settings = recipe["settings"]
    if kind is None or not set(settings) <= set(_settings(kind)):
        raise FissileError(f"unknown activation in the recipe: {recipe!r}")
    if not all(isinstance(value, bool | int | float | str) for value in settings.values()):
        raise FissileError(f"odd settings for an activation in the recipe: {recipe!r}")
    return kind(**settings)


def is_elementwise(module: nn.Module, *, training: bool = False) -> bool:
    """Return whether a module maps every number by itself, so that neurons may be copied through.

    >>> is_elementwise(nn.ReLU()), is_elementwise(nn.Softmax(-1))
    (True, False)

    The activations of torch.nn are known; any other module is tried out, in evaluation mode or in
    training: its answer must not depend on the order or the number of the entries. When in doubt,
    the answer is no.
    """
    if any(type(module) is kind for kind in _ACTIVATIONS.values()):
        return True
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return False
    probe = copy.deepcopy(module).train(training)
    x = torch.tensor([[-1.7, 0.3, 2.2, -0.4, 0.9, 3.1], [0.1, -2.5, 1.4, 0.6, -0.8, -3.3]])
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    try:
        with torch.no_grad():
            y, shuffled, part = probe(x), probe(x[:, order]), probe(x[:, :4])
    except Exception:  # whatever it is, it is no elementwise function
        return False
    return (
        isinstance(y, Tensor)
        and y.shape == x.shape
        and torch.allclose(y[:, order], shuffled, rtol=1e-5, atol=1e-6)  # vectors round anew
        and torch.allclose(y[:, :4], part, rtol=1e-5, atol=1e-6)
    )


class MLP(nn.Module):
    """A multilayer perceptron: ``MLP([inputs, hidden, ..., outputs])``.

    >>> model = MLP([32, 8, 1])
    >>> model(torch.zeros(64, 32)).shape
    torch.Size([64, 1])

    Args:
        sizes: inputs, the width of every hidden layer, outputs.
        embedding: width of a linear embedding without bias in front (the paper's ``E``).
        layer_norm: put a LayerNorm before each activation.
        dropout: dropout after each activation.
        activation: a name such as ``"relu"``, or a module that acts on each number alone.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        embedding: int | None = None,
        layer_norm: bool = False,
        dropout: float = 0.0,
        activation: str | nn.Module = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = _check_sizes(sizes)
        if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise FissileError(f"dropout must be in [0, 1), not {dropout!r}")
        if embedding is not None:
            embedding = whole("embedding", embedding, least=1)
        self.embedding_width = embedding
        self.layer_norm, self.dropout = bool(layer_norm), float(dropout)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        inputs = self.sizes[0]
        self.embedding: nn.Linear | None = None
        if embedding is not None:
            self.embedding = nn.Linear(inputs, embedding, bias=False, **where)
            inputs = embedding
        layers: list[nn.Module] = []
        for width in self.sizes[1:-1]:
            layers.append(nn.Linear(inputs, width, **where))
            if layer_norm:
                layers.append(nn.LayerNorm(width, **where))
            layers.append(_make_activation(activation).to(**where))
            if dropout:
                layers.append(nn.Dropout(dropout))
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, self.sizes[-1], **where))

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        if self.embedding is not None:
            x = self.embedding(x)
        logits: Tensor = self.layers(x)
        return logits

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any], device: torch.device | str = "cpu") -> MLP:
        """Build the dense architecture that :meth:`recipe` described."""
        settings = dict(recipe) | {"activation": _activation_from(recipe["activation"])}
        return cls(settings.pop("sizes"), **settings, device=device)

    def recipe(self) -> dict[str, Any] | None:
        """Describe the dense architecture so that it can be built again; None if it cannot be."""
        known = (nn.Linear, SparseLinear, nn.LayerNorm, nn.Dropout)
        activations = [_activation_recipe(m) for m in self.layers if not isinstance(m, known)]
        activation = activations[0]
        # A network that was edited after it was built is not what these settings would build.
        edited = (
            any(other != activation for other in activations)
            or any(isinstance(m, nn.LayerNorm) and m.eps != _EPS for m in self.layers)
            or any(isinstance(m, nn.Dropout) and m.p != self.dropout for m in self.layers)
        )
        if activation is None or edited:
            return None
        return {
            "sizes": list(self.sizes),
            "embedding": self.embedding_width,
            "layer_norm": self.layer_norm,
            "dropout": self.dropout,
            "activation": activation,
        }


def _check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(sizes, Iterable):
        raise FissileError(f"sizes must be a list such as [32, 8, 1], not {sizes!r}")
    widths = tuple(whole("a layer's size", width, least=1) for width in sizes)
    if len(widths) < 3:
        needed = "inputs, at least one hidden width and outputs"
        raise FissileError(f"an MLP needs {needed}; got {list(sizes)}")
    return widths


_PASSING = (
    nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d,
    nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity,
)  # fmt: skip

#: What a plain chain is made of: nothing here runs code that is not known.
PLAIN_PARTS = {nn.Sequential, MLP, nn.Linear, *_PASSING, *_ACTIVATIONS.values()}


@dataclass(frozen=True)
class Link:
    """A module of the chain and its name in the model."""

    name: str
    module: nn.Module


def first_hidden(model: nn.Module) -> nn.Module:
    """Return the layer the paper calls W1: the first linear one that an activation follows.

    >>> first_hidden(MLP([32, 8, 1], embedding=4))
    Linear(in_features=4, out_features=8, bias=True)
    """
    links = list(chain(model))
    linears = [i for i, m in enumerate(links) if isinstance(m.module, nn.Linear | SparseLinear)]
    for here, after in pairwise(linears):
        between = (link.module for link in links[here + 1 : after])
        if not all(isinstance(module, _PASSING) for module in between):
            return links[here].module
    raise FissileError("the model has no hidden layer")


def chain(model: nn.Module, prefix: str = "") -> Iterator[Link]:
    """Yield the modules of a model that calls them one after the other.

    >>> [link.name for link in chain(MLP([32, 8, 1]))]
    ['layers.0', 'layers.1', 'layers.2']
    """
    if isinstance(model, MLP) and type(model).forward is MLP.forward:
        if model.embedding is not None:
            yield Link(f"{prefix}embedding", model.embedding)
        yield from chain(model.layers, f"{prefix}layers.")
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for name, module in model._modules.items():  # named_children() shows a shared one once
            assert module is not None
            if isinstance(module, nn.Sequential | MLP):
                yield from chain(module, f"{prefix}{name}.")
            else:
                yield Link(prefix + name, module)
    else:
        raise FissileError(
            f"{type(model).__name__} is no chain of layers: give an nn.Sequential or a fissile.MLP"
        )
