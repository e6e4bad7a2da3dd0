"""A 2:4 split handed to PyTorch's semi-structured tensors, for GPUs with sparse tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool
from fissile.layers import SparseLayer, SparseLinear

__all__ = ["is_two_of_four", "semi_structured"]


def is_two_of_four(pattern: Bool[Tensor, "outputs inputs"]) -> bool:
    """Tell whether no four consecutive inputs of a neuron have more than two weights.

    >>> is_two_of_four(torch.tensor([[True, True, False, False]]))
    True
    """
    if pattern.shape[-1] % 4:
        return False
    return bool((pattern.unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


def semi_structured(layer: SparseLayer, dtype: torch.dtype | None) -> nn.Module | None:
    """Return a plain linear layer over a semi-structured weight; None if the layer is not 2:4."""
    if not isinstance(layer, SparseLinear) or layer.transposed or layer.weight.ndim != 2:
        return None
    if not is_two_of_four(layer.pattern()):
        return None
    new = layer.written_out().to(dtype=dtype)
    weight = new.get_parameter("weight").detach()
    if not weight.is_cuda:
        raise FissileError(
            'layout="2:4" is for GPUs: move the model there first, or use layout="inline"'
        )
    try:
        sparse = torch.sparse.to_sparse_semi_structured(weight)
    except (RuntimeError, ValueError) as error:
        raise FissileError(f"PyTorch does not take it as a 2:4 weight: {error}") from None
    new.weight = nn.Parameter(sparse, requires_grad=False)
    return new
