"""The layers of an expanded network: what has been removed cannot come back.

* :class:`PartitionedLinear` and :class:`PartitionedConv2d` keep the parents' weights as they were
  plus one small integer per weight, its owner. A removed weight has no owner, so there is nothing
  an optimizer could revive.
* :class:`MaskedLinear` and :class:`MaskedConv2d` are for patterns that are no partition: the wider
  second layer, overlapping children, dynamic masks.
* :class:`DropConnectLinear` draws a fresh mask at each forward pass (a control, not a split).

Each linear one may hold a stack of layers, every tensor with a leading dimension: a bank is made
of those.
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
