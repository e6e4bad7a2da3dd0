"""What all expanded layers share, whatever map they compute with their weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float
from fissile.layers.algebra import REMOVED, nothing, owner_dtype, owner_mask, spread
from fissile.layers.pair import Pair

__all__ = ["Masked", "Partitioned", "SparseLayer"]


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

    @property
    @abstractmethod
    def inputs(self) -> int:
        """How many features or channels go in."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many features or channels come out."""

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = nn.Parameter(weight.detach().clone())
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias.detach().clone())
        )

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
        """Say how much of the layer exists."""
        return (
            f"bias={self.bias is not None}, "
            f"nonzeros={'unknown' if self.weight.is_meta else self.nonzeros()}"
        )


class Partitioned(SparseLayer):
    """A layer of parents whose inputs were dealt among ``alpha`` children each."""

    owner: Tensor
    alpha: int

    def _deal(self, weight: Tensor, owner: Tensor, alpha: int, bias: Tensor | None) -> None:
        self.alpha = alpha
        self._hold(torch.where(owner == REMOVED, 0, weight), bias)
        self.register_buffer("owner", owner.to(owner_dtype(alpha)))

    def dense_weight(self) -> Float[Tensor, "children inputs *kernel"]:
        """Return the children's rows."""
        wide = spread(self.rows(self.weight), self.rows(self.owner), self.alpha)
        return self._shaped(wide)

    def pattern(self) -> Bool[Tensor, "children inputs *kernel"]:
        """Return which child holds which input."""
        return self._shaped(owner_mask(self.rows(self.owner), self.alpha))

    def _shaped(self, rows: Tensor) -> Tensor:
        """Undo ``rows`` on the children's matrix."""
        return rows

    def extra_repr(self) -> str:
        """Say alpha before the rest."""
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
        """Return the mask."""
        return self.mask
