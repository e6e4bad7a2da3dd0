"""Linear layers of an expanded network."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile._common.random import choose, noise
from fissile._common.shapes import Bool, Float, Int
from fissile.layers.base import Masked, Partitioned, SparseLayer, nothing


class SparseLinear(SparseLayer):
    """What the expanded linear layers share."""

    in_features: int
    out_features: int
    #: Whether it stands for a ``Conv1D`` of transformers, whose weight lies the other way round.
    transposed: bool

    # What all expanded layers have under one name.
    inputs: Any = property(attrgetter("in_features"))
    outputs: Any = property(attrgetter("out_features"))

    def _size(self, inputs: int, outputs: int, transposed: bool) -> None:
        self.in_features, self.out_features, self.transposed = inputs, outputs, transposed
        if transposed:
            self.nx, self.nf = inputs, outputs  # the same, as a Conv1D calls them

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch children"]:
        return functional.linear(x, self.pass_weight(), self.bias)

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor

    def written_out(self) -> nn.Module:
        # On the meta device nothing is drawn: writing out must not move the random numbers.
        with torch.device("meta"):
            plain: nn.Module
            if self.transposed:
                from transformers.pytorch_utils import Conv1D

                plain = Conv1D(self.out_features, self.in_features)  # type: ignore[no-untyped-call]
            else:
                plain = nn.Linear(self.in_features, self.out_features)
        return self._fill(plain)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {super().extra_repr()}"


class PartitionedLinear(Partitioned, SparseLinear):
    """A linear layer of parents whose inputs were dealt among ``alpha`` children each.

    >>> layer = PartitionedLinear(torch.ones(1, 3), torch.tensor([[0, 1, 1]]), alpha=2)
    >>> layer(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 5.], grad_fn=...)
    """

    kind = "partitioned"

    def __init__(
        self,
        weight: Float[Tensor, "*batch parents inputs"],
        owner: Int[Tensor, "*batch parents inputs"],
        alpha: int,
        bias: Float[Tensor, "*batch children"] | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        parents, inputs = weight.shape[-2:]
        self._size(inputs, alpha * parents, transposed)
        self._deal(weight, owner, alpha, bias)


class MaskedLinear(Masked, SparseLinear):
    """A linear layer of which only the weights under a fixed mask take part.

    >>> layer = MaskedLinear(torch.ones(1, 2), torch.tensor([[True, False]]))
    >>> layer(torch.tensor([1.0, 2.0]))
    tensor([1.], grad_fn=...)
    """

    kind = "masked"

    def __init__(
        self,
        weight: Float[Tensor, "*batch outputs inputs"],
        mask: Bool[Tensor, "*batch outputs inputs"],
        bias: Float[Tensor, "*batch outputs"] | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self._size(weight.shape[-1], weight.shape[-2], transposed)
        self._cover(weight, mask, bias)


class DropConnectLinear(SparseLinear):
    """Duplicated neurons with a fresh mask at each forward pass; dense and scaled in evaluation.

    >>> layer = DropConnectLinear(torch.ones(2, 4), torch.tensor([2, 2]))  # 2 inputs per child
    >>> layer.draw_mask().sum(-1)
    tensor([2, 2])

    In training each child sees as many inputs as it would have after the split (``degree``), drawn
    anew every time; in evaluation the dense weight is scaled by the share of active weights.
    """

    kind = "dropconnect"
    degree: Tensor
    stream: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "*batch children inputs"],
        degree: Int[Tensor, "*batch children"],
        bias: Float[Tensor, "*batch children"] | None = None,
        seed: int | Int[Tensor, "*batch"] = 0,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self._size(weight.shape[-1], weight.shape[-2], transposed)
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
        if self.training:
            return torch.where(self.draw_mask(), self.weight, nothing(self.weight))
        return self.dense_weight()

    def dense_weight(self) -> Float[Tensor, "children inputs"]:
        """Return the dense weight of evaluation, scaled by the share of active weights."""
        return self.weight * self.share()[..., None, None]

    def share(self) -> Float[Tensor, "*batch"]:
        """Return the share of weights that take part in a training pass."""
        share = self.degree.sum(-1) / (self.in_features * self.out_features)
        return share.to(self.weight.dtype)

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
