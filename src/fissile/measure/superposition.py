"""Superposition: how much the features of a layer share its neurons."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int

__all__ = ["capacity", "cosine", "features", "gram", "membership", "total_capacity"]


def gram(weight: Float[Tensor, "*batch neurons inputs"]) -> Float[Tensor, "*batch inputs inputs"]:
    """The Gram matrix WᵀW: how much each two inputs share neurons.

    >>> gram(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    return weight.mT @ weight


def features(
    weight: Float[Tensor, "*batch neurons inputs"], groups: Int[Tensor, " inputs"]
) -> Float[Tensor, "*batch neurons features"]:
    """The vector of each feature: the sum of the columns of its inputs.

    >>> features(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0, 0, 1])).tolist()
    [[3.0, 3.0]]
    """
    return weight @ membership(groups, weight.shape[-1]).to(weight)


def capacity(
    weight: Float[Tensor, "*batch neurons inputs"], groups: Int[Tensor, " inputs"] | None = None
) -> Float[Tensor, "*batch features"]:
    """The capacity Cᵢ = (vᵢ·vᵢ)² / Σⱼ(vᵢ·vⱼ)² of each feature, 0 where vᵢ is 0.

    >>> capacity(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist()
    [0.5, 0.5, 1.0]

    Without `groups` each input is a feature of its own.
    """
    vectors = weight if groups is None else features(weight, groups)
    # The ratio ignores scale, but fourth powers of raw weights could overflow or vanish.
    size = vectors.abs().amax((-2, -1), keepdim=True)
    overlap = gram(vectors / torch.where(size > 0, size, 1)).square()  # [*batch features features]
    shared = overlap.sum(-1)
    return overlap.diagonal(dim1=-2, dim2=-1) / torch.where(shared > 0, shared, 1)


def total_capacity(
    weight: Float[Tensor, "*batch neurons inputs"], groups: Int[Tensor, " inputs"] | None = None
) -> Float[Tensor, "*batch"]:
    """The capacity of all features together; higher means less superposition.

    >>> float(total_capacity(torch.ones(3, 4), torch.tensor([0, 0, 1, 1])))
    1.0
    """
    return capacity(weight, groups).sum(-1)


def cosine(
    weight: Float[Tensor, "*batch neurons inputs"], *, absolute: bool = False
) -> Float[Tensor, "*batch"]:
    """The mean cosine similarity over all pairs of distinct neurons.

    >>> float(cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 0.0]])))
    -1.0

    Pairs with a neuron without weights are left out; 0 where no pair remains. With `absolute`
    opposite neurons count as similar. Summed in float64: so many terms cancel that in float32 the
    last digits would tell how many threads had shared them.
    """
    dtype = weight.dtype
    if weight.device.type != "mps":  # which has no float64
        weight = weight.double()
    size = weight.abs().amax(-1, keepdim=True)
    directed = (size > 0).sum((-2, -1))  # [*batch] a neuron of zeros has no direction
    rows = weight / torch.where(size > 0, size, 1)
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    unit = rows / length.clamp(min=1)  # the largest entry is 1, so only rows of zeros are clamped
    similarity = (unit @ unit.mT).triu(1)  # [*batch neurons neurons]
    total = (similarity.abs() if absolute else similarity).sum((-2, -1))
    return (2 * total / (directed * (directed - 1)).clamp(min=1)).to(dtype)


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
