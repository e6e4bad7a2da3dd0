"""Convolutions of an expanded network: filters are neurons, and their inputs are channels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fissile._common.shapes import Bool, Float, Int
from fissile.layers.base import Masked, Partitioned, SparseLayer


@dataclass(frozen=True)
class Geometry:
    """How filters move over the image: what a convolution is apart from its weights."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] | str = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    padding_mode: str = "zeros"

    @classmethod
    def of(cls, layer: nn.Conv2d | SparseConv2d) -> Geometry:
        if isinstance(layer, SparseConv2d):
            return layer.geometry
        return cls(layer.stride, layer.padding, layer.dilation, layer.padding_mode)

    def border(self, kernel: tuple[int, ...]) -> list[int]:
        """Return how far to pad on each side, last dimension first, as ``functional.pad`` wants."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if self.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
            return list(chain.from_iterable((t // 2, t - t // 2) for t in reversed(total)))
        assert not isinstance(self.padding, str)
        return list(chain.from_iterable((p, p) for p in reversed(self.padding)))


class SparseConv2d(SparseLayer):
    """What the expanded convolutions share."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    geometry: Geometry

    # What all expanded layers have under one name.
    inputs: Any = property(attrgetter("in_channels"))
    outputs: Any = property(attrgetter("out_channels"))
    # What code around an nn.Conv2d may ask; grouped convolutions are not expanded.
    stride = property(attrgetter("geometry.stride"))
    padding = property(attrgetter("geometry.padding"))
    dilation = property(attrgetter("geometry.dilation"))
    padding_mode = property(attrgetter("geometry.padding_mode"))
    groups = property(lambda self: 1)

    def forward(
        self, x: Float[Tensor, "*batch inputs height width"]
    ) -> Float[Tensor, "*batch children height2 width2"]:
        how, padding = self.geometry, self.geometry.padding
        if how.padding_mode != "zeros":
            x, padding = functional.pad(x, how.border(self.kernel_size), how.padding_mode), (0, 0)
        weight = self.pass_weight()
        return functional.conv2d(x, weight, self.bias, how.stride, padding, how.dilation)

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(1)

    def written_out(self) -> nn.Module:
        how = self.geometry
        plain = nn.Conv2d(
            self.in_channels, self.out_channels, self.kernel_size,  # type: ignore[arg-type]
            stride=how.stride, padding=how.padding, dilation=how.dilation,  # type: ignore[arg-type]
            padding_mode=how.padding_mode, device="meta",  # type: ignore[arg-type]
        )  # fmt: skip
        return self._fill(plain)

    def extra_repr(self) -> str:
        how = self.geometry
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={how.stride}, padding={how.padding}, {super().extra_repr()}"
        )


class PartitionedConv2d(Partitioned, SparseConv2d):
    """A convolution whose filters had their input channels dealt among ``alpha`` children each.

    >>> owner = torch.tensor([0, 1, 1]).view(1, 3, 1, 1).expand(1, 3, 3, 3)
    >>> PartitionedConv2d(torch.ones(1, 3, 3, 3), owner, alpha=2)(torch.ones(3, 3, 3)).flatten()
    tensor([ 9., 18.], grad_fn=...)
    """

    kind = "partitioned-conv"

    def __init__(
        self,
        weight: Float[Tensor, "parents inputs height width"],
        owner: Int[Tensor, "parents inputs height width"],
        alpha: int,
        bias: Float[Tensor, " children"] | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        super().__init__()
        parents, self.in_channels, *kernel = weight.shape
        self.out_channels, self.kernel_size = alpha * parents, tuple(kernel)
        self.geometry = geometry or Geometry()
        self._deal(weight, owner, alpha, bias)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.in_channels, *self.kernel_size)


class MaskedConv2d(Masked, SparseConv2d):
    """A convolution of which only the weights under a fixed mask take part.

    >>> mask = torch.tensor([True, False]).view(1, 2, 1, 1)
    >>> MaskedConv2d(torch.ones(1, 2, 1, 1), mask)(torch.full((2, 1, 1), 3.0)).item()
    3.0
    """

    kind = "masked-conv"

    def __init__(
        self,
        weight: Float[Tensor, "outputs inputs height width"],
        mask: Bool[Tensor, "outputs inputs height width"],
        bias: Float[Tensor, " outputs"] | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        super().__init__()
        self.out_channels, self.in_channels, *kernel = weight.shape
        self.kernel_size, self.geometry = tuple(kernel), geometry or Geometry()
        self._cover(weight, mask, bias)
