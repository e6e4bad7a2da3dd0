"""The layers of an expanded network: what has been removed cannot come back.

* :class:`PartitionedLinear` keeps the parents' weights as they were plus one small integer per
  weight, its owner. A removed weight has no owner, so there is nothing an optimizer could revive.
* :class:`MaskedLinear` is for patterns that are no partition: the wider second layer, overlapping
  children, dynamic masks.
* :class:`DropConnectLinear` draws a fresh mask at each forward pass (a control, not a split).

Each may hold a stack of layers, every tensor with a leading dimension: a bank is made of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile.draw import choose
from fissile.order import noise
from fissile.shapes import Bool, Float, Int

__all__ = [
    "REMOVED",
    "DropConnectLinear",
    "MaskedLinear",
    "PartitionedLinear",
    "SparseLinear",
    "all_weights",
    "children_of",
    "gathered",
    "owner_mask",
    "spread",
    "weight_of",
]

#: The owner of a weight that was pruned: no child at all.
REMOVED = -1


def owner_mask(
    owner: Int[Tensor, "*batch parents inputs"], alpha: int
) -> Bool[Tensor, "*batch children inputs"]:
    """Mark which weight each child holds; child k of parent i is row ``i * alpha + k``.

    >>> owner_mask(torch.tensor([[0, 1, 1]]), 2).int()
    tensor([[1, 0, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    child = torch.arange(alpha, device=owner.device, dtype=owner.dtype).unsqueeze(-1)
    return (owner.unsqueeze(-2) == child).flatten(-3, -2)


def spread(
    weight: Float[Tensor, "*batch parents inputs"],
    owner: Int[Tensor, "*batch parents inputs"],
    alpha: int,
) -> Float[Tensor, "*batch children inputs"]:
    """Write the parents' weights out as the children's sparse rows."""
    mask = owner_mask(owner, alpha)
    return torch.where(mask, children_of(weight, alpha, -2), _nothing(weight))


def gathered(
    wide: Float[Tensor, "*batch children inputs"],
    owner: Int[Tensor, "*batch parents inputs"],
    alpha: int,
) -> Float[Tensor, "*batch parents inputs"]:
    """Collect the children's rows into the parents' weights again: the inverse of ``spread``."""
    mask = owner_mask(owner, alpha).unflatten(-2, (-1, alpha))
    return torch.where(mask, wide.unflatten(-2, (-1, alpha)), _nothing(wide)).sum(-2)


def _nothing(like: Tensor) -> Tensor:
    """Return a zero that stays in the dtype and on the device, also under autocast."""
    return torch.zeros((), dtype=like.dtype, device=like.device)


def children_of(tensor: Tensor, alpha: int, dim: int) -> Tensor:
    """Copy every entry of a dimension to its alpha children, side by side."""
    return tensor.repeat_interleave(alpha, dim)


def _owner_dtype(alpha: int) -> torch.dtype:
    return torch.int8 if alpha < 2**7 else torch.int16 if alpha < 2**15 else torch.int32


class SparseLinear(nn.Module, ABC):
    """What the expanded layers share: a linear map whose weight is mostly not there."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = nn.Parameter(weight.detach().clone())
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias.detach().clone())
        )

    @abstractmethod
    def dense_weight(self) -> Float[Tensor, "children inputs"]:
        """Return the weight as the plain matrix it stands for, zeros where nothing is."""

    @abstractmethod
    def pattern(self) -> Bool[Tensor, "children inputs"]:
        """Return which weights of that matrix exist."""

    def nonzeros(self) -> int:
        """Count the weights that exist."""
        return int(self.pattern().sum())

    def pass_weight(self) -> Float[Tensor, "children inputs"]:
        """Return the weight of this one forward pass."""
        return self.dense_weight()

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch children"]:
        """Apply the linear map."""
        return functional.linear(x, self.pass_weight(), self.bias)

    def extra_repr(self) -> str:
        """Say the shape and how much of it exists."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, "
            f"nonzeros={'unknown' if self.weight.is_meta else self.nonzeros()}"
        )


class PartitionedLinear(SparseLinear):
    """A linear layer of parents whose inputs were dealt among ``alpha`` children each.

    >>> layer = PartitionedLinear(torch.ones(1, 3), torch.tensor([[0, 1, 1]]), alpha=2)
    >>> layer(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 5.], grad_fn=...)
    """

    owner: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "*batch parents inputs"],
        owner: Int[Tensor, "*batch parents inputs"],
        alpha: int,
        bias: Float[Tensor, "*batch children"] | None = None,
    ) -> None:
        super().__init__()
        parents, self.in_features = weight.shape[-2:]
        self.alpha, self.out_features = alpha, alpha * parents
        self._hold(torch.where(owner == REMOVED, 0, weight), bias)
        self.register_buffer("owner", owner.to(_owner_dtype(alpha)))

    def dense_weight(self) -> Float[Tensor, "children inputs"]:
        """Return the children's rows."""
        return spread(self.weight, self.owner, self.alpha)

    def pattern(self) -> Bool[Tensor, "children inputs"]:
        """Return which child holds which input."""
        return owner_mask(self.owner, self.alpha)

    def extra_repr(self) -> str:
        """Say the shape, alpha and how much exists."""
        return f"alpha={self.alpha}, {super().extra_repr()}"


class MaskedLinear(SparseLinear):
    """A linear layer of which only the weights under a fixed mask take part.

    >>> layer = MaskedLinear(torch.ones(1, 2), torch.tensor([[True, False]]))
    >>> layer(torch.tensor([1.0, 2.0]))
    tensor([1.], grad_fn=...)
    """

    mask: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "*batch outputs inputs"],
        mask: Bool[Tensor, "*batch outputs inputs"],
        bias: Float[Tensor, "*batch outputs"] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape[-2:]
        self._hold(torch.where(mask, weight, 0), bias)
        self.register_buffer("mask", mask.clone())
        #: Told the gradient of the whole matrix, removed weights included (growth by gradient).
        self.observer: Callable[[Tensor], None] | None = None

    def dense_weight(self) -> Float[Tensor, "outputs inputs"]:
        """Return the weight with zeros under the mask; a select, so that no NaN leaks through."""
        weight = torch.where(self.mask, self.weight, _nothing(self.weight))
        if self.observer is not None and weight.requires_grad:
            weight.register_hook(self.observer)
        return weight

    def __getstate__(self) -> dict[str, Any]:
        """Leave the observer behind: a copy of the layer is not what it listens to."""
        return self.__dict__ | {"observer": None}

    def pattern(self) -> Bool[Tensor, "outputs inputs"]:
        """Return the mask."""
        return self.mask


class DropConnectLinear(SparseLinear):
    """Duplicated neurons with a fresh mask at each forward pass; dense and scaled in evaluation.

    In training each child sees as many inputs as it would have after the split (``degree``), drawn
    anew every time; in evaluation the dense weight is scaled by the share of active weights.
    """

    degree: Tensor
    stream: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "*batch children inputs"],
        degree: Int[Tensor, "*batch children"],
        bias: Float[Tensor, "*batch children"] | None = None,
        seed: int | Int[Tensor, "*batch"] = 0,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape[-2:]
        self._hold(weight, bias)
        self.register_buffer("degree", degree.to(torch.int32))
        # The seed and the passes so far: with them a saved model goes on with the same masks.
        seeds = torch.as_tensor(seed, device=weight.device)
        self.register_buffer("stream", torch.stack([seeds, torch.zeros_like(seeds)], -1))

    def draw_mask(self) -> Bool[Tensor, "children inputs"]:
        """Draw the next mask with every child's degree."""
        seed, passes = self.stream.unbind(-1)
        mask = choose(noise(seed, passes, *self.weight.shape[-2:]), self.degree)
        self.stream[..., 1] += 1
        return mask

    def pass_weight(self) -> Float[Tensor, "children inputs"]:
        """Return a freshly masked weight in training, the dense scaled weight in evaluation."""
        if not self.training:
            return self.dense_weight()
        return torch.where(self.draw_mask(), self.weight, _nothing(self.weight))

    def dense_weight(self) -> Float[Tensor, "children inputs"]:
        """Return the dense weight of evaluation, scaled by the share of active weights."""
        share = self.degree.sum(-1) / (self.in_features * self.out_features)
        return self.weight * share.to(self.weight.dtype)[..., None, None]

    def pattern(self) -> Bool[Tensor, "children inputs"]:
        """Return the weights that exist: all of them, since evaluation uses them all."""
        return torch.ones_like(self.weight, dtype=torch.bool)

    def active(self) -> int:
        """Count the weights that take part in one training pass."""
        return int(self.degree.sum())


def all_weights(layer: nn.Module) -> Float[Tensor, "outputs inputs"]:
    """Return every weight that learns, as a plain matrix: also what DropConnect leaves out now."""
    return layer.weight if isinstance(layer, DropConnectLinear) else weight_of(layer)


def weight_of(layer: nn.Module) -> Float[Tensor, "outputs inputs"]:
    """Return a linear layer's weight as a plain matrix, expanded or not."""
    if isinstance(layer, SparseLinear):
        return layer.dense_weight()
    if isinstance(layer, nn.Linear):
        return layer.weight
    raise TypeError(f"{type(layer).__name__} has no weight matrix")
