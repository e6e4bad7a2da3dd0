"""What a layer's weights say about interference between features.

>>> import torch
>>> float(total_capacity(torch.eye(4)))
4.0
"""

from __future__ import annotations

from fissile.measure.accuracy import accuracy_per_parameter, relative_improvement
from fissile.measure.circuits import coded_clauses, codes, collisions, edge_usage
from fissile.measure.clusters import (
    Recovery,
    Rows,
    adjusted_rand,
    gram_clusters,
    pairwise_agreement,
    recovery,
)
from fissile.measure.superposition import capacity, cosine, features, gram, total_capacity

__all__ = [
    "Recovery",
    "Rows",
    "accuracy_per_parameter",
    "adjusted_rand",
    "capacity",
    "coded_clauses",
    "codes",
    "collisions",
    "cosine",
    "edge_usage",
    "features",
    "gram",
    "gram_clusters",
    "pairwise_agreement",
    "recovery",
    "relative_improvement",
    "total_capacity",
]
