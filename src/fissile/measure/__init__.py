"""What a layer's weights say about interference between features.

>>> import torch
>>> float(total_capacity(torch.eye(4)))
4.0
"""

from __future__ import annotations

from fissile.measure.accuracy import accuracy_per_parameter, relative_improvement
from fissile.measure.capacity import capacity, features, total_capacity
from fissile.measure.circuits import collisions, edge_usage
from fissile.measure.clusters import (
    Recovery,
    Rows,
    adjusted_rand,
    gram_clusters,
    pairwise_agreement,
    recovery,
)
from fissile.measure.codes import coded_clauses, codes
from fissile.measure.cosine import cosine
from fissile.measure.gram import gram

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
