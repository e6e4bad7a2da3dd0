"""Parents and children as tensors: who owns which weight, and the children's rows written out."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.shapes import Bool, Float, Int

__all__ = ["REMOVED", "children_of", "gathered", "nothing", "owner_dtype", "owner_mask", "spread"]

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
    return torch.where(mask, children_of(weight, alpha, -2), nothing(weight))


def gathered(
    wide: Float[Tensor, "*batch children inputs"],
    owner: Int[Tensor, "*batch parents inputs"],
    alpha: int,
) -> Float[Tensor, "*batch parents inputs"]:
    """Collect the children's rows into the parents' weights again: the inverse of ``spread``."""
    mask = owner_mask(owner, alpha).unflatten(-2, (-1, alpha))
    return torch.where(mask, wide.unflatten(-2, (-1, alpha)), nothing(wide)).sum(-2)


def nothing(like: Tensor) -> Tensor:
    """Return a zero that stays in the dtype and on the device, also under autocast."""
    return torch.zeros((), dtype=like.dtype, device=like.device)


def children_of(tensor: Tensor, alpha: int, dim: int) -> Tensor:
    """Copy every entry of a dimension to its alpha children, side by side."""
    return tensor.repeat_interleave(alpha, dim)


def owner_dtype(alpha: int) -> torch.dtype:
    """Return the smallest integer that can name every child."""
    return torch.int8 if alpha < 2**7 else torch.int16 if alpha < 2**15 else torch.int32
