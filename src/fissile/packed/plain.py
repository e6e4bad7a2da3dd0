"""Packed layers in plain PyTorch: what the kernels must agree with, and where there are none."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fissile._common.shapes import Float, Int
from fissile.layers import REMOVED, owner_mask
from fissile.packed.bits import exists, from_bytes, low_bits, owner_bits

__all__ = [
    "BLOCK",
    "Activation",
    "activated",
    "bitmap_dense",
    "bitmap_linear",
    "group_starts",
    "owned_dense",
    "owned_linear",
    "owners",
]

#: What may follow a packed layer in the same kernel.
Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]

#: Groups between two entries of ``start``.
BLOCK = 256


def owners(
    weight: Float[Tensor, "parents inputs"], planes: Int[Tensor, "bits parents bytes"] | None,
    alpha: int,
) -> Int[Tensor, "parents inputs"]:  # fmt: skip
    """Return the child that owns each weight, -1 where none is."""
    if planes is None:
        found = low_bits(weight, owner_bits(alpha)).int()
    else:
        places = torch.arange(len(planes), device=weight.device, dtype=torch.int32)
        bits = from_bytes(planes, weight.shape[-1]).int()
        found = (bits << places[:, None, None]).sum(0, dtype=torch.int32)
    return torch.where(exists(weight), found, REMOVED)


def owned_dense(
    weight: Float[Tensor, "parents inputs"], planes: Int[Tensor, "bits parents bytes"] | None,
    alpha: int,
) -> Float[Tensor, "children inputs"]:  # fmt: skip
    """Write the children's rows out."""
    mask = owner_mask(owners(weight, planes, alpha), alpha)
    return torch.where(mask, weight.repeat_interleave(alpha, 0), weight.new_zeros(()))


def owned_linear(
    x: Float[Tensor, "batch inputs"],
    weight: Float[Tensor, "parents inputs"],
    planes: Int[Tensor, "bits parents bytes"] | None,
    bias: Float[Tensor, " children"] | None,
    alpha: int,
    activation: Activation,
) -> Float[Tensor, "batch children"]:
    """Apply a partitioned layer."""
    return activated(functional.linear(x, owned_dense(weight, planes, alpha), bias), activation)


def group_starts(live: Int[Tensor, "outputs bytes"], groups: int) -> Int[Tensor, "outputs blocks"]:
    """Count the groups stored before every block of 256, over the whole matrix."""
    blocks = from_bytes(live, groups).split(BLOCK, -1)
    counts = torch.stack([block.sum(-1, dtype=torch.int32) for block in blocks], -1)
    return counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts) - counts


def bitmap_dense(
    weight: Float[Tensor, " stored"], live: Int[Tensor, "outputs bytes"], group: int, inputs: int
) -> Float[Tensor, "outputs inputs"]:
    """Write a masked layer's matrix out."""
    mask = from_bytes(live, inputs // group)
    wide = weight.new_zeros(*mask.shape, group)
    wide[mask] = weight.view(-1, group)
    return wide.flatten(1)


def bitmap_linear(
    x: Float[Tensor, "batch inputs"],
    weight: Float[Tensor, " stored"],
    live: Int[Tensor, "outputs bytes"],
    start: Int[Tensor, "outputs blocks"],
    bias: Float[Tensor, " outputs"] | None,
    group: int,
    activation: Activation,
) -> Float[Tensor, "batch outputs"]:
    """Apply a masked layer."""
    wide = bitmap_dense(weight, live, group, x.shape[-1])
    return activated(functional.linear(x, wide, bias), activation)


def activated(y: Tensor, activation: Activation) -> Tensor:
    """Apply an activation by its name."""
    if activation == "none":
        return y
    if activation == "relu":
        return y.relu()
    if activation == "silu":
        return functional.silu(y)
    return functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
