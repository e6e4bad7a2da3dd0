"""Packing as pure functions: weights and owners, or weights and a mask, into bytes and back."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int
from fissile.layers import REMOVED, owner_mask
from fissile.packed.bits import (
    MANTISSA,
    MOST,
    ending_in,
    exists,
    from_bytes,
    low_bits,
    owner_bits,
    to_bytes,
)

#: Where the owners are: in the weights' lowest bits, or in bit-planes of their own.
Layout = Literal["inline", "plane"]

_GROUPS = (8, 4, 2, 1)
#: Groups between two entries of ``start``.
BLOCK = 256


def check_layout(layout: str) -> Layout:
    """Return the layout if it is one, or say which there are."""
    if layout not in get_args(Layout):
        raise FissileError(f'unknown layout {layout!r}; use "inline", "plane" or "2:4"')
    return layout  # type: ignore[return-value]


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that weights can be packed in, or say which those are."""
    if dtype not in MANTISSA:
        names = ", ".join(str(known).removeprefix("torch.") for known in MANTISSA)
        raise FissileError(f"packed weights are {names}, not {dtype}; use one of those")
    return dtype


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in another dtype if it holds numbers, not indices or bits."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def refuse_overflow(name: str, before: Tensor, after: Tensor) -> None:
    """Refuse what became infinite in a narrower dtype."""
    if not bool(after.isfinite().all()) and bool(before.isfinite().all()):
        raise FissileError(f"{name} is not finite in {after.dtype}; pack in another dtype")


def pack_partitioned(
    weight: Float[Tensor, "parents inputs"], owner: Int[Tensor, "parents inputs"], alpha: int,
    dtype: torch.dtype, layout: Layout,
) -> tuple[Float[Tensor, "parents inputs"], Int[Tensor, "bits parents bytes"] | None]:  # fmt: skip
    """Return a partitioned layer's weight with its owners in the lowest bits, or their planes."""
    bits = owner_bits(alpha)
    there, low = owner >= 0, owner.clamp(min=0).int()
    if layout == "plane":
        shifts = torch.arange(bits, device=weight.device).view(-1, 1, 1)
        planes = to_bytes((low >> shifts) & 1 != 0)
        return _rounded(weight, torch.zeros_like(low), 0, there, dtype), planes
    if wrong := _too_many(bits, dtype):
        raise FissileError(f'alpha={alpha}: {wrong}; use layout="plane"')
    return _rounded(weight, low, bits, there, dtype), None


def pack_masked(
    weight: Float[Tensor, "outputs inputs"], mask: Bool[Tensor, "outputs inputs"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, " stored"], Int[Tensor, "outputs bytes"], int]:  # fmt: skip
    """Return the groups of a masked weight that are stored, a bitmap of them, and their size."""
    group = _best_group(mask, torch.finfo(dtype).bits)
    grouped = mask.unflatten(1, (-1, group))
    some = grouped.any(-1)
    stored, there = weight.unflatten(1, (-1, group))[some], grouped[some]
    values = _rounded(stored, torch.zeros_like(there, dtype=torch.int32), 0, there, dtype)
    return values.flatten(), to_bytes(some), group


def recast(weight: Float[Tensor, "*shape"], bits: int, dtype: torch.dtype) -> Tensor:
    """Return packed weights in another dtype, with the same owners in their lowest bits."""
    if wrong := _too_many(bits, check_dtype(dtype)):
        raise FissileError(f'{wrong}; unpack the model and pack it with layout="plane"')
    return _rounded(weight, low_bits(weight, bits), bits, exists(weight), dtype)


# --- and back: what the kernels must agree with


def owners(
    weight: Float[Tensor, "parents inputs"], planes: Int[Tensor, "bits parents bytes"] | None,
    alpha: int,
) -> Int[Tensor, "parents inputs"]:  # fmt: skip
    """Return the child that owns each weight, -1 where none is."""
    if planes is None:
        owner = low_bits(weight, owner_bits(alpha)).int()
    else:
        shifts = torch.arange(len(planes), device=weight.device, dtype=torch.int32)
        bits = from_bytes(planes, weight.shape[-1]).int()
        owner = (bits << shifts[:, None, None]).sum(0, dtype=torch.int32)
    return torch.where(exists(weight), owner, REMOVED)


def partitioned_dense(
    weight: Float[Tensor, "parents inputs"], planes: Int[Tensor, "bits parents bytes"] | None,
    alpha: int,
) -> Float[Tensor, "children inputs"]:  # fmt: skip
    """Write the children's rows out."""
    mask = owner_mask(owners(weight, planes, alpha), alpha)
    return torch.where(mask, weight.repeat_interleave(alpha, 0), weight.new_zeros(()))


def group_starts(live: Int[Tensor, "outputs bytes"], groups: int) -> Int[Tensor, "outputs blocks"]:
    """Count the groups stored before every block of 256, over the whole matrix."""
    blocks = from_bytes(live, groups).split(BLOCK, -1)
    counts = torch.stack([block.sum(-1, dtype=torch.int32) for block in blocks], -1)
    return counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts) - counts


def masked_dense(
    weight: Float[Tensor, " stored"], live: Int[Tensor, "outputs bytes"], group: int, inputs: int
) -> Float[Tensor, "outputs inputs"]:
    """Write a masked layer's matrix out."""
    mask = from_bytes(live, inputs // group)
    wide = weight.new_zeros(*mask.shape, group)
    wide[mask] = weight.view(-1, group)
    return wide.flatten(1)


# --- tensors that packing could not have made


def partitioned_misfit(
    weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int, shape: tuple[int, int]
) -> str | None:
    """Return why :func:`pack_partitioned` cannot have made these tensors; None if it can."""
    if weight.dtype not in MANTISSA or weight.shape != shape:
        return f"the weight is not a matrix of {shape} packed numbers"
    if wrong := _numbers_misfit(weight, bias, alpha * shape[0]):
        return wrong
    if planes is None:
        if wrong := _too_many(owner_bits(alpha), weight.dtype):
            return wrong
    else:
        expected = owner_bits(alpha), shape[0], -(-shape[1] // 8)
        if planes.dtype is not torch.uint8 or planes.shape != expected:
            return "the planes are not the bits of its owners"
        # A kernel reads the bits whatever the weight is.
        if bool((planes & ~to_bytes(exists(weight))).any()):
            return "the planes name owners of weights that are not there"
    if bool((owners(weight, planes, alpha) >= alpha).any()):
        return f"an owner is outside 0 .. {alpha - 1}"
    return None


def masked_misfit(
    weight: Tensor, live: Tensor, bias: Tensor | None, group: int, shape: tuple[int, int]
) -> str | None:
    """Return why :func:`pack_masked` cannot have made these tensors; None if it can."""
    if group not in _GROUPS or shape[1] % group:
        return f"groups of {group} do not go into {shape[1]} columns"
    if weight.dtype not in MANTISSA or weight.ndim != 1:
        return "the weight is not a row of packed numbers"
    if wrong := _numbers_misfit(weight, bias, shape[0]):
        return wrong
    groups = shape[1] // group
    if live.dtype is not torch.uint8 or live.shape != (shape[0], -(-groups // 8)):
        return "live is not a bitmap of its groups"
    stored = from_bytes(live, groups)
    if (count := int(stored.count_nonzero())) * group != len(weight):
        return f"live marks {count} groups, which the weight does not hold"
    return None if torch.equal(to_bytes(stored), live) else "live marks groups beyond the last"


def _numbers_misfit(weight: Tensor, bias: Tensor | None, outputs: int) -> str | None:
    if bias is not None and (bias.shape != (outputs,) or bias.dtype is not weight.dtype):
        return f"the bias is not a row of {outputs} numbers of {weight.dtype}"
    return None if bool(weight.isfinite().all()) else "a weight is not finite"


def _too_many(bits: int, dtype: torch.dtype) -> str | None:
    if bits <= MOST[dtype]:
        return None
    return f"owners take {bits} bits of every weight, and {dtype} has {MOST[dtype]} to give away"


def _best_group(mask: Bool[Tensor, "outputs inputs"], width: int) -> int:
    """Return the size of group that takes the fewest bits."""
    sizes = [size for size in _GROUPS if mask.shape[1] % size == 0]
    takes = [
        int(mask.unflatten(1, (-1, size)).any(-1).sum()) * size * width + mask.numel() // size
        for size in sizes
    ]
    return sizes[takes.index(min(takes))]


def _rounded(weight: Tensor, low: Tensor, count: int, there: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the weights that are there so that they end in ``low``; the others are zero bits."""
    rounded = ending_in(low.flatten(), count, weight.flatten(), dtype).view_as(weight)
    return torch.where(there, rounded, rounded.new_zeros(()))
