"""Cosine similarity between neurons: lower means that they represent features apart."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.shapes import Float

__all__ = ["cosine"]


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
