"""Splits that look at more than the weights: at what inputs have in common in the training."""

from __future__ import annotations

from torch import Tensor

from fissile.draw import Draw
from fissile.kmeans import gram_points, kmeans
from fissile.shapes import Float, Int
from fissile.sparse.stack import Stack
from fissile.split import Split, deal_groups, resolve_split

__all__ = ["deal_of"]

#: Directions that inputs are compared along, and clusters for each child.
_DIRECTIONS, _CLUSTERS = 32, 4


def deal_of(name: str, stack: Stack) -> Split:
    """Return the split of that name: one that every network has, or one that looks at this one.

    ``"activation"`` keeps inputs together that are large in the same samples, ``"gradient"`` those
    whose weights have been pulled the same way.
    """
    if name == "activation":
        seen = stack.sample - stack.sample.mean(0)
        return _Clusters(gram_points(seen.cpu()).expand(stack.networks, -1, -1))
    if name == "gradient":
        return _Clusters(gram_points(stack.moments["first"].mean.cpu()))
    return resolve_split(name)


class _Clusters(Split):
    """Deal clusters of points, one for each input."""

    def __init__(self, points: Float[Tensor, "networks inputs rank"]) -> None:
        self.points = points[..., :_DIRECTIONS]

    def deal(
        self, weight: Float[Tensor, "networks parents inputs"], alpha: int, draw: Draw
    ) -> Int[Tensor, "networks parents inputs"]:
        """Cluster the inputs of each network, then deal the clusters as groups."""
        parents, inputs = weight.shape[-2:]
        count = min(inputs, _CLUSTERS * alpha)
        labels = kmeans(self.points, count, draw)
        return deal_groups(labels, count, parents, alpha, draw).to(weight.device)
