"""What all expanded layers share: parents and children as tensors, base classes, and norms."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float, Int

#: The owner of a weight that was pruned: no child at all.
REMOVED = -1
#: Weights of parents, the child that owns each, and the children's weights.
_Parents = Float[Tensor, "*batch parents inputs"]
_Owner = Int[Tensor, "*batch parents inputs"]
_Children = Float[Tensor, "*batch children inputs"]


def owner_mask(owner: _Owner, alpha: int) -> Bool[Tensor, "*batch children inputs"]:
    """Mark which weight each child holds; child k of parent i is row ``i * alpha + k``.

    >>> owner_mask(torch.tensor([[0, 1, 1]]), 2).int()
    tensor([[1, 0, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    child = torch.arange(alpha, device=owner.device, dtype=owner.dtype).unsqueeze(-1)
    return (owner.unsqueeze(-2) == child).flatten(-3, -2)


def spread(weight: _Parents, owner: _Owner, alpha: int) -> _Children:
    """Write the parents' weights out as the children's sparse rows."""
    mask = owner_mask(owner, alpha)
    return torch.where(mask, children_of(weight, alpha, -2), nothing(weight))


def gathered(wide: _Children, owner: _Owner, alpha: int) -> _Parents:
    """Collect the children's rows into the parents' weights again: the inverse of ``spread``."""
    mask = owner_mask(owner, alpha).unflatten(-2, (-1, alpha))
    return torch.where(mask, wide.unflatten(-2, (-1, alpha)), nothing(wide)).sum(-2)


def nothing(like: Tensor) -> Tensor:
    """Return a zero that stays in the dtype and on the device, also under autocast."""
    return torch.zeros((), dtype=like.dtype, device=like.device)


def children_of(tensor: Tensor, alpha: int, dim: int) -> Tensor:
    """Copy every entry of a dimension to its alpha children, side by side."""
    return tensor.repeat_interleave(alpha, dim)


def owner_dtype(alpha: int) -> torch.dtype:
    """Return the smallest integer that can name every child."""
    return torch.int8 if alpha < 2**7 else torch.int16 if alpha < 2**15 else torch.int32


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' ``Conv1D``, whose weight lies the other way round."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _own(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().clone())


@dataclass(frozen=True)
class Pair:
    """The layers that make the children, what widened between, and the layer that reads them.

    >>> Pair(("mlp.up",), (), "mlp.down").alone()
    Pair(firsts=('up',), between=(), second='down')
    """

    firsts: tuple[str, ...]
    between: tuple[str, ...]
    second: str

    def alone(self) -> Pair:
        """Name the modules from the one that holds them all, so that it may move elsewhere."""
        parts = [name.split(".")[:-1] for name in (*self.firsts, *self.between, self.second)]
        common = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
        start = sum(len(level[0]) + 1 for level in common)
        return self.mapped(lambda name: name[start:])

    def beside(self, name: str) -> Pair | None:
        """Name the modules in a model where the second layer has this name; None if it cannot."""
        if not f".{name}".endswith(f".{self.second}"):
            return None
        prefix = name.removesuffix(self.second)
        return self.mapped(lambda part: prefix + part)

    def mapped(self, rename: Callable[[str], str]) -> Pair:
        """Name every module otherwise."""
        firsts, between = (tuple(map(rename, names)) for names in (self.firsts, self.between))
        return Pair(firsts, between, rename(self.second))


class SparseLayer(nn.Module, ABC):
    """A layer whose weight is mostly not there; a subclass says what it computes with it."""

    #: What a recipe calls it.
    kind: ClassVar[str]
    #: Whether it is for inference alone.
    packed: ClassVar[bool] = False
    weight: nn.Parameter
    bias: nn.Parameter | None
    #: Of a layer that reads children: which layers it was split with, by names beside its own.
    pair: Pair | None = None
    #: How many features or channels go in and come out.
    inputs: int
    outputs: int

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = nn.Parameter(weight.detach().clone())
        self.register_parameter("bias", _own(bias))

    def _fill(self, plain: nn.Module) -> nn.Module:
        """Give a plain layer what this one computes with."""
        weight = self.dense_weight().detach()
        weight = weight.mT.contiguous() if is_transposed(plain) else weight.clone()
        plain.weight = nn.Parameter(weight)
        plain.register_parameter("bias", _own(self.bias))
        return plain

    @abstractmethod
    def dense_weight(self) -> Float[Tensor, "children inputs *kernel"]:
        """Return the weight as the plain one it stands for, zeros where nothing is."""

    @abstractmethod
    def pattern(self) -> Bool[Tensor, "children inputs *kernel"]:
        """Return which of those weights exist."""

    @abstractmethod
    def written_out(self) -> nn.Module:
        """Return the plain layer of torch.nn, or of transformers, that this one stands for."""

    @abstractmethod
    def rows(self, tensor: Tensor) -> Tensor:
        """View a tensor of the weight's shape as a matrix, one row for every neuron or filter."""

    def nonzeros(self) -> int:
        """Count the weights that exist."""
        return int(self.pattern().sum())

    def pass_weight(self) -> Float[Tensor, "children inputs *kernel"]:
        """Return the weight of this one forward pass."""
        return self.dense_weight()

    def extra_repr(self) -> str:
        nonzeros = "unknown" if self.weight.is_meta else self.nonzeros()
        return f"bias={self.bias is not None}, nonzeros={nonzeros}"


class Partitioned(SparseLayer):
    """A layer of parents whose inputs were dealt among ``alpha`` children each."""

    owner: Tensor
    alpha: int

    def _deal(self, weight: Tensor, owner: Tensor, alpha: int, bias: Tensor | None) -> None:
        self.alpha = alpha
        self._hold(torch.where(owner == REMOVED, 0, weight), bias)
        self.register_buffer("owner", owner.to(owner_dtype(alpha)))

    def dense_weight(self) -> Float[Tensor, "children inputs *kernel"]:
        wide = spread(self.rows(self.weight), self.rows(self.owner), self.alpha)
        return self._shaped(wide)

    def pattern(self) -> Bool[Tensor, "children inputs *kernel"]:
        return self._shaped(owner_mask(self.rows(self.owner), self.alpha))

    def _shaped(self, rows: Tensor) -> Tensor:
        """Undo ``rows`` on the children's matrix."""
        return rows

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, {super().extra_repr()}"


class Masked(SparseLayer):
    """A layer of which only the weights under a mask take part."""

    mask: Tensor
    #: Told the gradient of the whole weight, removed ones included (growth by gradient).
    observer: Callable[[Tensor], None] | None

    def _cover(self, weight: Tensor, mask: Tensor, bias: Tensor | None) -> None:
        self._hold(torch.where(mask, weight, 0), bias)
        self.register_buffer("mask", mask.clone())
        self.observer = None

    def dense_weight(self) -> Float[Tensor, "outputs inputs *kernel"]:
        """Return the weight with zeros under the mask; a select, so that no NaN leaks through."""
        weight = torch.where(self.mask, self.weight, nothing(self.weight))
        if self.observer is not None and weight.requires_grad:
            weight.register_hook(self.observer)
        return weight

    def __getstate__(self) -> dict[str, Any]:
        """Leave the observer behind: a copy of the layer is not what it listens to."""
        return self.__dict__ | {"observer": None}

    def pattern(self) -> Bool[Tensor, "outputs inputs *kernel"]:
        return self.mask


#: Carries a tensor of an old parameter's shape to the new one's.
Carry = Callable[[Tensor], Tensor]

#: A new layer, and how tensors of each of its old parameters' shapes are carried to it.
Rebuilt = tuple[nn.Module, dict[str, Carry]]

#: Norms whose parameters belong to single neurons or channels, and are copied to the children.
NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm,
)  # fmt: skip


def copied(bias: Tensor | None, alpha: int = 1) -> Tensor | None:
    """Return a bias for the children of its neurons."""
    return None if bias is None else children_of(bias.detach(), alpha, -1)


def widened(module: nn.Module, alpha: int) -> Rebuilt | None:
    """Copy what belongs to single neurons, parameters and running statistics, to the children.

    None stands for a module without any, which stays as it is.
    """
    width = width_of(module)
    if width is None:
        return None
    new = copy.deepcopy(module)
    parameters = dict(module.named_parameters(recurse=False))
    for key, value in {**parameters, **dict(module.named_buffers(recurse=False))}.items():
        if key != "num_batches_tracked":
            wide = children_of(value.detach(), alpha, -1)
            setattr(new, key, nn.Parameter(wide) if key in parameters else wide)
    if isinstance(new, nn.LayerNorm | nn.RMSNorm):
        new.normalized_shape = (width * alpha,)
    else:
        setattr(new, _width_name(new), width * alpha)
    return new, dict.fromkeys(parameters, lambda tensor: children_of(tensor, alpha, -1))


def width_of(module: nn.Module) -> int | None:
    """Return how many neurons a norm or a slope was made for; None for anything else."""
    if not isinstance(module, (*NORMS, nn.PReLU)):
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return int(module.normalized_shape[-1])
    width = int(getattr(module, _width_name(module)))
    # One slope for all neurons stays one.
    return None if isinstance(module, nn.PReLU) and width == 1 else width


def _width_name(module: nn.Module) -> str:
    if isinstance(module, nn.PReLU):
        return "num_parameters"
    return "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"
