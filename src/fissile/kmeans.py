"""Batched k-means whose result for one set of points does not depend on the rest of the batch.

Sums run in a fixed order of elementwise additions: library matmuls and reductions may round
differently for another batch size or device, and one rounding can move a point.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fissile.draw import Draw
from fissile.errors import FissileError
from fissile.shapes import Bool, Float, Int

__all__ = ["gram_points", "kmeans"]

_ELEMENTS = 1 << 22  # numbers in one intermediate; more than this goes in pieces


def gram_points(
    weight: Float[Tensor, "*batch neurons inputs"],
) -> Float[Tensor, "*batch inputs rank"]:
    """Points at the distances the rows of the Gram matrix have, in as many dimensions as its rank.

    >>> gram_points(torch.ones(3, 50)).shape
    torch.Size([50, 3])

    With `W = U S Vᵀ` the Gram matrix is `V S² Vᵀ`, and turning its rows by `V` moves no two of them
    apart: hundreds of inputs are clustered in a handful of dimensions.
    """
    _, s, v = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    points: Tensor = v.mT * s.square().unsqueeze(-2)
    return points


def kmeans(
    points: Float[Tensor, "*batch points dims"],
    clusters: int,
    draw: Draw,
    *,
    restarts: int = 8,
    steps: int = 64,
) -> Int[Tensor, "*batch points"]:
    """The cluster of each point: k-means++ seeds, Lloyd steps, best of some restarts.

    >>> from fissile.draw import drawer
    >>> points = torch.tensor([[0.0], [0.1], [5.0]])
    >>> first, second, third = kmeans(points, 2, drawer(torch.Generator().manual_seed(0)))
    >>> bool(first == second), bool(second == third)
    (True, False)

    No cluster is empty, even where points coincide. One call makes one draw, whose
    shape depends on `batch`, `restarts` and `clusters` only.
    """
    _check(points, clusters, restarts, steps)
    *batch, count, dims = points.shape
    sets, trials = math.prod(batch), 2 + int(math.log(clusters))
    picks = draw(*batch, restarts, clusters, trials).to(points)
    picks = picks.reshape(sets * restarts, clusters, trials)
    alone = _scaled(points.detach()).reshape(sets, 1, count, dims)
    runs = alone.expand(-1, restarts, -1, -1).flatten(0, 1)  # [sets*restarts points dims]
    pieces = max(1, _ELEMENTS // max(1, count * dims))
    results = [
        _lloyd(part, _seeds(part, pick), steps)
        for part, pick in zip(torch.split(runs, pieces), torch.split(picks, pieces), strict=True)
    ]
    labels = torch.cat([found for found, _ in results]).reshape(sets, restarts, count)
    inertia = torch.cat([spread for _, spread in results]).reshape(sets, restarts)
    best = inertia.argmin(-1)[:, None, None].expand(-1, 1, count)
    return labels.gather(1, best).reshape(*batch, count)


def _check(points: Tensor, clusters: int, restarts: int, steps: int) -> None:
    if points.ndim < 2:
        raise FissileError(f"Points need shape [*batch, points, dims], not {list(points.shape)}.")
    if not 1 <= clusters <= points.shape[-2]:
        raise FissileError(
            f"{points.shape[-2]} points cannot fill {clusters} clusters; "
            "ask for at least 1 cluster and at most one per point."
        )
    if restarts < 1 or steps < 1:
        raise FissileError(f"restarts={restarts} and steps={steps} must both be at least 1.")
    if not bool(points.isfinite().all()):
        raise FissileError("Points hold NaN or infinity; look for a network that diverged.")


def _scaled(points: Float[Tensor, "*batch points dims"]) -> Float[Tensor, "*batch points dims"]:
    """Points with largest entry 1: clusters stay, and squares neither overflow nor vanish."""
    if points.numel() == 0:
        return points
    size = points.abs().amax((-2, -1), keepdim=True)
    return points / torch.where(size > 0, size, 1)


def _fold(terms: Tensor, dim: int) -> Tensor:
    """The sum over `dim` in a fixed order; `terms` is used up."""
    if terms.shape[dim] == 0:
        return terms.sum(dim)
    while (size := terms.shape[dim]) > 1:
        half = (size + 1) // 2
        terms.narrow(dim, 0, size - half).add_(terms.narrow(dim, half, size - half))
        terms = terms.narrow(dim, 0, half)
    return terms.squeeze(dim)


def _running(terms: Float[Tensor, "runs points"]) -> Float[Tensor, "runs points"]:
    """The running sum over points in a fixed order."""
    reach = 1
    while reach < terms.shape[-1]:
        shifted = torch.nn.functional.pad(terms[:, :-reach], (reach, 0))
        terms, reach = terms + shifted, 2 * reach
    return terms


def _clusters_at_once(points: Float[Tensor, "runs points dims"]) -> int:
    return max(1, _ELEMENTS // max(1, points.numel()))


def _distances(
    points: Float[Tensor, "runs points dims"], centres: Float[Tensor, "runs clusters dims"]
) -> Float[Tensor, "runs points clusters"]:
    """Squared distances from points to centres."""
    parts = torch.split(centres, _clusters_at_once(points), dim=1)
    return torch.cat(
        [_fold((points[:, :, None] - part[:, None]).square_(), -1) for part in parts], -1
    )


def _centres(
    points: Float[Tensor, "runs points dims"], members: Bool[Tensor, "runs points clusters"]
) -> Float[Tensor, "runs clusters dims"]:
    """The mean of each cluster's members."""
    parts = torch.split(members, _clusters_at_once(points), dim=-1)
    sums = [_fold(torch.where(part[..., None], points[:, :, None], 0), 1) for part in parts]
    return torch.cat(sums, 1) / members.sum(1)[..., None]


def _seeds(
    points: Float[Tensor, "runs points dims"], picks: Float[Tensor, "runs clusters trials"]
) -> Float[Tensor, "runs clusters dims"]:
    """k-means++: of some points drawn by squared distance, each next seed is the most central."""
    runs = torch.arange(len(points), device=points.device)
    weights = points.new_ones(points.shape[:2])  # the first seed may be any point
    seeds: list[Tensor] = []
    for pick in picks.unbind(1):  # [runs trials]
        running = _running(weights)
        chosen = (running[:, None] > (pick * running[:, -1:])[..., None]).int().argmax(-1)
        trials = points[runs[:, None], chosen]  # [runs trials dims]
        nearest = _distances(points, trials)  # [runs points trials]
        if seeds:
            nearest = torch.minimum(nearest, weights[..., None])
        best = _fold(nearest.clone(), 1).argmin(-1)
        seeds.append(trials[runs, best])
        weights = nearest[runs, :, best]
    return torch.stack(seeds, 1)


def _lloyd(
    points: Float[Tensor, "runs points dims"],
    centres: Float[Tensor, "runs clusters dims"],
    steps: int,
) -> tuple[Int[Tensor, "runs points"], Float[Tensor, " runs"]]:
    """Labels and inertia after at most `steps` rounds of assigning points and moving centres."""
    index = torch.arange(centres.shape[1], device=points.device)
    labels = _assigned(_distances(points, centres))
    for _ in range(steps):
        centres = _centres(points, labels[..., None] == index)
        before, labels = labels, _assigned(_distances(points, centres))
        # A run that has settled repeats itself, so stopping when all have changes no result.
        if torch.equal(before, labels):
            break
    centres = _centres(points, labels[..., None] == index)
    own = _distances(points, centres).gather(-1, labels[..., None])[..., 0]
    return labels, _fold(own, -1)


def _assigned(distances: Float[Tensor, "runs points clusters"]) -> Int[Tensor, "runs points"]:
    """The nearest centre of each point; an empty cluster takes the worst-placed point it may."""
    own = distances.amin(-1)
    labels = distances.argmin(-1)  # the first of equals, on every device
    index = torch.arange(distances.shape[-1], device=labels.device)
    sizes = (labels[..., None] == index).sum(1)  # [runs clusters]
    if bool((sizes > 0).all()):
        return labels
    for cluster in range(distances.shape[-1]):
        spare = sizes.gather(-1, labels) > 1  # taking the last member would only move the hole
        worst = torch.where(spare, own, -1).argmax(-1, keepdim=True)
        empty = sizes[:, cluster, None] == 0
        taken = torch.where(empty, cluster, labels.gather(-1, worst))
        labels = labels.scatter(-1, worst, taken)
        sizes = (labels[..., None] == index).sum(1)
    return labels
