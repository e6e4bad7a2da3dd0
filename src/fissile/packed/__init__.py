"""The wide network in the bytes of the narrow one: a format and kernels for inference."""

from fissile.packed.convert import pack, unpack
from fissile.packed.format import Layout
from fissile.packed.layers import (
    Packed,
    PackedMaskedConv2d,
    PackedMaskedLinear,
    PackedPartitionedConv2d,
    PackedPartitionedLinear,
)

__all__ = [
    "Layout", "Packed", "PackedMaskedConv2d", "PackedMaskedLinear",
    "PackedPartitionedConv2d", "PackedPartitionedLinear", "pack", "unpack",
]  # fmt: skip
