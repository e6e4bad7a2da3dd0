"""The Gram matrix of a layer, whose diagonal blocks show isolated features."""

from __future__ import annotations

from torch import Tensor

from fissile._common.shapes import Float

__all__ = ["gram"]


def gram(weight: Float[Tensor, "*batch neurons inputs"]) -> Float[Tensor, "*batch inputs inputs"]:
    """The Gram matrix WᵀW: how much each two inputs share neurons.

    >>> import torch
    >>> gram(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    return weight.mT @ weight
