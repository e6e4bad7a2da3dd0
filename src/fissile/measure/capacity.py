"""Feature capacity: the fraction of a dimension that each feature has to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.shapes import Float, Int
from fissile.measure._groups import membership
from fissile.measure.gram import gram

__all__ = ["capacity", "features", "total_capacity"]


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
