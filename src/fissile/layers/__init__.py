"""The layers of an expanded network: what has been removed cannot come back.

Where children share no inputs, a layer keeps the parents' weights and an owner for each; what was
removed has none. Other patterns are masks: overlapping children, the wider second layer, dynamic
masks. Linear layers may be a stack, every tensor with a leading dimension: a bank is made of those.
"""

from fissile.layers.base import (
    REMOVED,
    Carry,
    Masked,
    Pair,
    Partitioned,
    Rebuilt,
    SparseLayer,
    children_of,
    copied,
    gathered,
    is_transposed,
    owner_mask,
    spread,
    widened,
    width_of,
)
from fissile.layers.conv import Geometry, MaskedConv2d, PartitionedConv2d, SparseConv2d
from fissile.layers.linear import (
    DropConnectLinear,
    MaskedLinear,
    PartitionedLinear,
    SparseLinear,
    all_weights,
    weight_of,
)

__all__ = [
    "REMOVED", "Carry", "DropConnectLinear", "Geometry", "Masked", "MaskedConv2d", "MaskedLinear",
    "Pair", "Partitioned", "PartitionedConv2d", "PartitionedLinear", "Rebuilt", "SparseConv2d",
    "SparseLayer", "SparseLinear", "all_weights", "children_of", "copied", "gathered",
    "is_transposed", "owner_mask", "spread", "weight_of", "widened", "width_of",
]  # fmt: skip
