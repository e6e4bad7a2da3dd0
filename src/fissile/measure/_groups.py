"""Groups of inputs, such as the literals of one clause, given as one id per input."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Int

__all__ = ["membership"]


def membership(groups: Int[Tensor, " inputs"], inputs: int) -> Bool[Tensor, "inputs groups"]:
    """Which input belongs to which group, once the ids are known to be sound.

    >>> membership(torch.tensor([0, 0, 1]), 3).int().tolist()
    [[1, 0], [1, 0], [0, 1]]
    """
    if groups.shape != (inputs,):
        raise FissileError(
            f"groups has shape {list(groups.shape)} but the weight has {inputs} inputs; "
            "give one group id per input."
        )
    if groups.is_floating_point() or groups.dtype == torch.bool:
        raise FissileError(f"groups has dtype {groups.dtype}; group ids must be integers.")
    found = sorted(set(groups.tolist()))
    members = groups[:, None] == torch.arange(len(found), device=groups.device)
    if not bool(members.any(-1).all()):
        raise FissileError(
            f"Group ids must run from 0 without gaps, but the ids found are {found}; "
            "renumber them, for example with groups.unique(return_inverse=True)[1]."
        )
    return members
