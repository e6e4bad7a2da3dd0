"""A packed layer for an expanded one, and the other way round."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile.layers import (
    DropConnectLinear,
    Masked,
    MaskedConv2d,
    MaskedLinear,
    Partitioned,
    PartitionedConv2d,
    PartitionedLinear,
    SparseConv2d,
    SparseLayer,
    SparseLinear,
)
from fissile.packed.conv import PackedMaskedConv2d, PackedPartitionedConv2d
from fissile.packed.format import Layout, check_dtype, pack_bitmap, pack_owned
from fissile.packed.layers import (
    Bitmap,
    Owned,
    Packed,
    PackedMaskedLinear,
    PackedPartitionedLinear,
)

__all__ = ["bitmap_like", "owned_like", "packed_layer", "unpacked_layer"]


def packed_layer(layer: SparseLayer, dtype: torch.dtype | None, layout: Layout) -> Packed:
    """Pack one expanded layer by itself."""
    if isinstance(layer, Packed):
        raise FissileError("it is packed already; fissile.unpack comes first")
    if isinstance(layer, DropConnectLinear):
        raise FissileError(
            "DropConnect uses all its weights in evaluation: nothing to pack; expand the model"
        )
    if layer.weight.ndim != (4 if isinstance(layer, SparseConv2d) else 2):
        raise FissileError("a stack of networks is not packed; take the networks out one by one")
    if layer.weight.is_meta:
        raise FissileError("its weights are on the meta device and have no values; load them first")
    kind, weight = check_dtype(dtype or layer.weight.dtype), layer.rows(layer.weight.detach())
    if not bool(weight.isfinite().all()):
        raise FissileError("it has weights that are NaN or infinite; repair the model first")
    bias = None if layer.bias is None else layer.bias.detach().to(kind, copy=True)
    if isinstance(layer, Partitioned):
        values, planes = pack_owned(weight, layer.rows(layer.owner), layer.alpha, kind, layout)
        return owned_like(layer, values, planes, bias)
    assert isinstance(layer, Masked)
    values, live, group = pack_bitmap(weight, layer.rows(layer.mask), kind)
    return bitmap_like(layer, values, live, group, bias, layout)


def owned_like(
    layer: Partitioned, weight: Tensor, planes: Tensor | None, bias: Tensor | None
) -> Owned:
    """Hold packed tensors in a layer that computes what the given one does."""
    if isinstance(layer, PartitionedConv2d):
        where = layer.inputs, layer.kernel_size, layer.geometry
        return PackedPartitionedConv2d(weight, planes, layer.alpha, bias, *where)
    assert isinstance(layer, SparseLinear)
    turned = layer.transposed
    return PackedPartitionedLinear(weight, planes, layer.alpha, bias, transposed=turned)


def bitmap_like(
    layer: Masked, weight: Tensor, live: Tensor, group: int, bias: Tensor | None, layout: Layout
) -> Bitmap:
    """Hold packed tensors in a layer that computes what the given one does."""
    parts = weight, live, group, layer.inputs, bias
    if isinstance(layer, MaskedConv2d):
        return PackedMaskedConv2d(*parts, layer.kernel_size, layer.geometry, layout=layout)
    assert isinstance(layer, SparseLinear)
    return PackedMaskedLinear(*parts, layout=layout, transposed=layer.transposed)


def unpacked_layer(layer: Packed) -> SparseLayer:
    """Return an expanded layer with the weights that were packed."""
    bias = layer.bias
    if isinstance(layer, Owned):
        weight, owner = layer.weight.detach(), layer.owner()
        if isinstance(layer, PackedPartitionedConv2d):
            shape = len(weight), layer.inputs, *layer.kernel_size
            filters, owner = weight.view(shape), owner.view(shape)
            return PartitionedConv2d(filters, owner, layer.alpha, bias, layer.geometry)
        assert isinstance(layer, SparseLinear)
        return PartitionedLinear(weight, owner, layer.alpha, bias, transposed=layer.transposed)
    weight, mask = layer.dense_weight(), layer.pattern()
    if isinstance(layer, PackedMaskedConv2d):
        return MaskedConv2d(weight, mask, bias, layer.geometry)
    assert isinstance(layer, SparseLinear)
    return MaskedLinear(weight, mask, bias, transposed=layer.transposed)
