"""Packed convolutions: filters held as packed layers hold their rows, written out at every pass."""

from __future__ import annotations

from torch import Tensor

from fissile._common.shapes import Float, Int
from fissile.layers import Geometry, SparseConv2d
from fissile.packed import dispatch
from fissile.packed.format import Layout
from fissile.packed.layers import Bitmap, Owned, Packed

__all__ = ["PackedMaskedConv2d", "PackedPartitionedConv2d"]


class _PackedConv2d(Packed, SparseConv2d):
    @property
    def matrix_shape(self) -> tuple[int, int]:
        height, width = self.kernel_size
        return self.out_channels, self.in_channels * height * width

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.in_channels, *self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the filters, written out for this pass."""
        dispatch.refuse_gradients(x, self.weight, self.bias)
        return super().forward(x)


class PackedPartitionedConv2d(Owned, _PackedConv2d):
    """A partitioned convolution, packed by :func:`fissile.pack`."""

    kind = "partitioned-conv"

    def __init__(
        self,
        weight: Float[Tensor, "parents columns"],
        planes: Int[Tensor, "bits parents bytes"] | None,
        alpha: int,
        bias: Float[Tensor, " children"] | None,
        inputs: int,
        kernel: tuple[int, ...],
        geometry: Geometry,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = inputs, alpha * len(weight)
        self.kernel_size, self.geometry = kernel, geometry
        self._keep(weight, planes, alpha, bias)


class PackedMaskedConv2d(Bitmap, _PackedConv2d):
    """A masked convolution, packed by :func:`fissile.pack`."""

    kind = "masked-conv"

    def __init__(
        self,
        weight: Float[Tensor, " stored"],
        live: Int[Tensor, "outputs bytes"],
        group: int,
        inputs: int,
        bias: Float[Tensor, " outputs"] | None,
        kernel: tuple[int, ...],
        geometry: Geometry,
        *,
        layout: Layout,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = inputs, len(live)
        self.kernel_size, self.geometry = kernel, geometry
        self._keep(weight, live, group, bias, layout)
