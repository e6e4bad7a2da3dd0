"""What a layer's weights say about interference between features.

>>> import torch
>>> float(total_capacity(torch.eye(4)))
4.0

Weights may be a tensor, an array, a layer, or a model with ``place=``, the name of a layer in it.
"""

from __future__ import annotations

from fissile.measure.interference import (
    capacity,
    coded_clauses,
    codes,
    collisions,
    cosine,
    edge_usage,
    features,
    gram,
    total_capacity,
)
from fissile.measure.scores import (
    Recovery,
    Rows,
    accuracy_per_parameter,
    adjusted_rand,
    gram_clusters,
    pairwise_agreement,
    recovery,
    relative_improvement,
)

__all__ = [
    "Recovery", "Rows", "accuracy_per_parameter", "adjusted_rand", "capacity", "coded_clauses",
    "codes", "collisions", "cosine", "edge_usage", "features", "gram", "gram_clusters",
    "pairwise_agreement", "recovery", "relative_improvement", "total_capacity",
]  # fmt: skip
