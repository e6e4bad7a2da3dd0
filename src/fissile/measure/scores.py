"""Scores: accuracy per parameter, and how well Gram clusters recover the true groups."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fissile._common.errors import FissileError
from fissile._common.random import Draw
from fissile._common.shapes import Float, Int
from fissile.expansion.split import gram_points, kmeans
from fissile.measure.interference import Group, Weights, membership
from fissile.measure.weights import on_weights

#: What is clustered: the rows of the Gram matrix, the same at unit length, or the rows of the
#: matrix of absolute cosines between the inputs' weights.
Rows = Literal["raw", "unit", "cosine"]


Labels = Int[Tensor, "*batch inputs"]
Truth = Int[Tensor, "*#batch inputs"]


class Recovery(NamedTuple):
    """The two scores of clusters against the true groups; 1 is perfect in both.

    >>> Recovery(agreement=torch.tensor(1.0), adjusted_rand=torch.tensor(0.5)).adjusted_rand
    tensor(0.5000)
    """

    agreement: Float[Tensor, "*batch"]
    adjusted_rand: Float[Tensor, "*batch"]


def pairwise_agreement(labels: Labels, truth: Truth) -> Float[Tensor, "*batch"]:
    """Return the fraction of pairs of inputs that labels and truth treat alike (the Rand index).

    >>> labels, truth = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])
    >>> round(float(pairwise_agreement(labels, truth)), 3)
    0.667

    A single input has no pairs and counts as agreement.
    """
    both, labels_only, truth_only, neither = _pairs(labels, truth)
    differ = labels_only + truth_only
    return 1 - differ / (both + neither + differ).clamp(min=1)


def adjusted_rand(labels: Labels, truth: Truth) -> Float[Tensor, "*batch"]:
    """Return the Rand index adjusted for chance: 1 for equal partitions, about 0 for random ones.

    >>> float(adjusted_rand(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1])))
    1.0
    """
    both, labels_only, truth_only, neither = _pairs(labels, truth)
    above = 2 * (both * neither - labels_only * truth_only)
    below = (both + truth_only) * (truth_only + neither)
    below = below + (both + labels_only) * (labels_only + neither)
    # Equal partitions with one group, or only singletons, would otherwise give 0 / 0.
    return torch.where(labels_only + truth_only == 0, 1.0, above / below.clamp(min=1))


@on_weights
def gram_clusters(
    weight: Weights,
    clusters: int,
    draw: Draw,
    *,
    rows: Rows = "raw",
    restarts: int = 8,
    steps: int = 64,
) -> Labels:
    """Return the cluster of each input: k-means over the rows of the Gram matrix.

    >>> from fissile._common.random import drawer
    >>> weight = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> first, second, third = gram_clusters(weight, 2, drawer(torch.Generator().manual_seed(0)))
    >>> bool(first == second), bool(second == third)
    (True, False)

    Raw rows mostly tell inputs with large weights from inputs with small ones. ``rows="unit"``
    divides each row by its length. ``rows="cosine"`` takes the absolute cosine between two inputs'
    weights in place of their product, so the size of a weight does not matter.
    """
    return kmeans(_points(weight, rows), clusters, draw, restarts=restarts, steps=steps)


def _points(weight: Weights, rows: Rows) -> Float[Tensor, "*batch inputs dims"]:
    """Return the points that are clustered; an input without weights lies at the origin."""
    if rows not in get_args(Rows):
        raise FissileError(f"rows={rows!r} is not known; give {', '.join(get_args(Rows))}")
    if rows == "cosine":
        directions = normalize(weight.detach().double(), dim=-2)
        # Rounded, because a product of many networks may differ in its last digits from one alone.
        return (directions.mT @ directions).abs().round(decimals=12)
    points = gram_points(weight)
    return normalize(points, dim=-1) if rows == "unit" else points


@on_weights
def recovery(weight: Weights, groups: Group, draw: Draw, *, rows: Rows = "raw") -> Recovery:
    """Return both scores of Gram clustering with as many clusters as there are true groups.

    >>> from fissile._common.random import drawer
    >>> weight = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> draw = drawer(torch.Generator().manual_seed(0))
    >>> [float(score) for score in recovery(weight, torch.tensor([0, 0, 1]), draw)]
    [1.0, 1.0]

    ``rows`` says what is clustered: see :func:`gram_clusters`.
    """
    clusters = membership(groups, weight).shape[-1]
    labels = gram_clusters(weight, clusters, draw, rows=rows)
    return Recovery(pairwise_agreement(labels, groups), adjusted_rand(labels, groups))


def _pairs(labels: Labels, truth: Truth) -> list[Tensor]:
    """Count the pairs of inputs that both, only labels, only truth, or neither put together."""
    labels, truth = torch.as_tensor(labels), torch.as_tensor(truth)
    inputs = labels.shape[-1]
    if truth.shape[-1] != inputs:
        raise FissileError(
            f"labels {list(labels.shape)} and truth {list(truth.shape)} must name the same inputs."
        )
    first, second = torch.triu_indices(inputs, inputs, offset=1, device=labels.device)
    ours = labels[..., first] == labels[..., second]  # [*batch pairs]
    true = truth[..., first] == truth[..., second]
    groups = (ours & true, ours & ~true, ~ours & true, ~ours & ~true)
    return [group.sum(-1) for group in groups]


Number = TypeVar("Number", float, Tensor)


def accuracy_per_parameter(accuracy: Number, nonzeros: Number | float) -> Number:
    """Return the accuracy divided by the number of parameters that are not zero.

    >>> accuracy_per_parameter(0.5, 100)
    0.005
    """
    _check_positive("nonzeros", nonzeros)
    return accuracy / nonzeros


def relative_improvement(expanded: Number, dense: Number | float) -> Number:
    """Return the gain of the expanded network's accuracy as a fraction of the dense network's.

    >>> relative_improvement(0.75, 0.5)
    0.5
    """
    _check_positive("dense", dense)
    return (expanded - dense) / dense


def _check_positive(name: str, value: float | Tensor) -> None:
    if not bool((torch.as_tensor(value) > 0).all()):
        raise FissileError(f"{name}={value} divides, so it must be above 0.")
