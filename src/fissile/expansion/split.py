"""Splits: which child inherits which input of its parent; with the k-means that Gram splits use.

k-means sums in a fixed order of elementwise additions, because library matmuls and reductions may
round differently for one network and for a stack of networks.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fissile._common.errors import FissileError, whole
from fissile._common.random import Draw, choose, ranks
from fissile._common.shapes import Bool, Float, Int

_ELEMENTS = 1 << 22  # numbers in one intermediate; more than this goes in pieces

#: The weights of a first layer, and which child of its neuron inherits each: 0 .. alpha-1.
Weights = Float[Tensor, "*batch parents inputs"]
Owners = Int[Tensor, "*batch parents inputs"]
_Points = Float[Tensor, "runs points dims"]
_Centres = Float[Tensor, "runs clusters dims"]


def gram_points(weight: Weights) -> Float[Tensor, "*batch inputs rank"]:
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

    >>> from fissile._common.random import drawer
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


def _scaled(points: Tensor) -> Tensor:
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


def _clusters_at_once(points: _Points) -> int:
    return max(1, _ELEMENTS // max(1, points.numel()))


def _distances(points: _Points, centres: _Centres) -> Float[Tensor, "runs points clusters"]:
    """Squared distances from points to centres."""
    parts = torch.split(centres, _clusters_at_once(points), dim=1)
    squares = ((points[:, :, None] - part[:, None]).square_() for part in parts)
    return torch.cat([_fold(part, -1) for part in squares], -1)


def _centres(points: _Points, members: Bool[Tensor, "runs points clusters"]) -> _Centres:
    """The mean of each cluster's members."""
    parts = torch.split(members, _clusters_at_once(points), dim=-1)
    sums = [_fold(torch.where(part[..., None], points[:, :, None], 0), 1) for part in parts]
    return torch.cat(sums, 1) / members.sum(1)[..., None]


def _seeds(points: _Points, picks: Float[Tensor, "runs clusters trials"]) -> _Centres:
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
    points: _Points, centres: _Centres, steps: int
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


class Named:
    """What ``expand`` takes by a name or as an object, which shows its settings."""

    def __repr__(self) -> str:
        """Show the settings: ``Structured(n=2, m=4)``."""
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class Split(Named, ABC):
    """Deals each parent's inputs among its children; subclass it to invent a new split.

    >>> class Halves(Split):
    ...     def deal(self, weight, alpha, draw):
    ...         child = torch.arange(weight.shape[-1]) * alpha // weight.shape[-1]
    ...         return child.expand(weight.shape)
    >>> register_split("halves", Halves)
    """

    #: False for a control whose children may share inputs (see :class:`Overlapping`).
    disjoint: ClassVar[bool] = True

    @abstractmethod
    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        """Return the owner of every weight, an integer in 0 .. alpha-1."""


class Random(Split):
    """Deal the inputs at random, as evenly as they divide, independently for each parent.

    >>> wide = expand(MLP([32, 8, 1]), 2, split=Random())  # the default, also by name: "random"
    """

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        return ranks(draw(*weight.shape)).to(weight.device) % alpha


class Structured(Split):
    """Deal N of every M consecutive inputs to each child, the pattern of N:M sparse hardware.

    >>> Structured(2, 4)  # also by name: "2:4"; needs alpha = M / N
    Structured(n=2, m=4)
    """

    def __init__(self, n: int = 2, m: int = 4) -> None:
        self.n, self.m = whole("n", n, least=1), whole("m", m, least=1)
        if m % n:
            raise FissileError(f"an N:M split needs N to divide M; {n}:{m} does not")

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        inputs = weight.shape[-1]
        if alpha * self.n != self.m:
            raise FissileError(
                f"a {self.n}:{self.m} split makes {self.m // self.n} children, not alpha={alpha}; "
                f'use alpha={self.m // self.n} or the split "{self.n}:{self.n * alpha}"'
            )
        if inputs % self.m:
            needed = f"a fan-in divisible by {self.m}, not {inputs}"
            raise FissileError(f"a {self.n}:{self.m} split needs {needed}")
        noise = draw(*weight.shape).unflatten(-1, (-1, self.m))  # (*batch, parents, blocks, m)
        return (ranks(noise) % alpha).flatten(-2).to(weight.device)


class Groups(Split):
    """Deal whole groups of inputs, so that a feature's inputs stay together (clause-aware).

    >>> Groups([0, 0, 0, 0, 1, 1, 1, 1])  # inputs 0-3 are one clause, 4-7 another
    Groups(groups=[0, 0, 0, 0, 1, 1, 1, 1])
    """

    def __init__(self, groups: Sequence[int] | Tensor) -> None:
        try:
            ids = torch.as_tensor(groups)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.empty(0)
        if ids.ndim != 1 or ids.numel() == 0 or ids.is_floating_point():
            raise FissileError("groups must be one list of integers, a group for every input")
        # Any labels will do: they are renumbered 0, 1, 2, ... without gaps.
        self.groups: list[int] = torch.unique(ids, return_inverse=True)[1].tolist()

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        *batch, parents, inputs = weight.shape
        if len(self.groups) != inputs:
            raise FissileError(
                f"groups has {len(self.groups)} entries but the layer has {inputs} inputs; give "
                "one group per input (and, for a deeper network, one split per widened layer)"
            )
        count = max(self.groups) + 1
        if count < alpha:
            raise FissileError(
                f"{count} groups cannot be dealt among alpha={alpha} children; "
                "use fewer children or finer groups"
            )
        labels = torch.tensor(self.groups).expand(*batch, inputs)
        return _deal_groups(labels, count, parents, alpha, draw).to(weight.device)


class Blocks(Split):
    """Deal groups of ``size`` consecutive inputs: the clauses of a Boolean task of any length.

    >>> Blocks(4)  # on a layer of 32 inputs the same as Groups(torch.arange(32) // 4)
    Blocks(size=4)
    """

    def __init__(self, size: int) -> None:
        self.size = whole("size", size, least=1)

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        return Groups(torch.arange(weight.shape[-1]) // self.size).deal(weight, alpha, draw)


class Gram(Split):
    """Deal clusters of inputs found by k-means over the rows of the Gram matrix ``W1ᵀ W1``.

    >>> Gram(clusters=8)  # by default 4 clusters per child, at most one per input
    Gram(clusters=8)
    """

    def __init__(self, clusters: int | None = None) -> None:
        self.clusters = None if clusters is None else whole("clusters", clusters, least=1)

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        parents, inputs = weight.shape[-2:]
        clusters = min(inputs, 4 * alpha) if self.clusters is None else self.clusters
        if not alpha <= clusters <= inputs:
            raise FissileError(f"the Gram split needs {alpha} to {inputs} clusters, not {clusters}")
        labels = kmeans(gram_points(weight.cpu()), clusters, draw)
        return _deal_groups(labels, clusters, parents, alpha, draw).to(weight.device)


class Overlapping(Random):
    """The non-disjoint control: every child draws its inputs anew, with the degree FPE gave it.

    >>> control = expand(MLP([32, 8, 1]), 2, split=Overlapping())  # also by name: "overlapping"
    """

    disjoint = False


def redraw(
    mask: Bool[Tensor, "*batch children inputs"],
    weight: Float[Tensor, "*batch children inputs"],
    draw: Draw,
) -> Bool[Tensor, "*batch children inputs"]:
    """Draw as many inputs for each child as ``mask`` gives it, among its non-zero weights."""
    noise = draw(*mask.shape).to(mask.device)
    noise = torch.where(weight == 0, 2.0, noise)  # a weight that is not there comes last
    return choose(noise, mask.sum(-1))


def _deal_groups(
    labels: Int[Tensor, "*batch inputs"], count: int, parents: int, alpha: int, draw: Draw
) -> Int[Tensor, "*batch parents inputs"]:
    """Deal groups in rounds of alpha, largest first, the largest to the lightest child.

    Every child gets one group a round, so counts differ by at most one; within a round the
    matching evens out the sizes. Noise below 1 breaks ties between whole-numbered sizes.
    """
    batch = labels.shape[:-1]
    size = torch.zeros(*batch, count, dtype=torch.double)
    size.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.double))
    size = size.unsqueeze(-2).expand(*batch, parents, count)
    order = (draw(*batch, parents, count) - size).argsort(dim=-1, stable=True)
    rounds = -(-count // alpha)
    seats = draw(*batch, parents, rounds, alpha)
    load = torch.zeros(*batch, parents, alpha, dtype=torch.double)
    owner = torch.zeros(*batch, parents, count, dtype=torch.long)
    for turn in range(rounds):
        groups = order[..., turn * alpha : (turn + 1) * alpha]
        lightest = (load + seats[..., turn, :]).argsort(dim=-1, stable=True)
        children = lightest[..., : groups.shape[-1]]
        owner.scatter_(-1, groups, children)
        load.scatter_add_(-1, children, size.gather(-1, groups))
    return owner.gather(-1, labels.unsqueeze(-2).expand(*batch, parents, labels.shape[-1]))


def _without_groups() -> Split:
    raise FissileError('the split "groups" needs the groups: pass fissile.Groups([0, 0, 1, 1])')


_SPLITS: dict[str, Callable[[], Split]] = {
    "random": Random,
    "gram": Gram,
    "overlapping": Overlapping,
    "groups": _without_groups,
}


def register_split(name: str, factory: Callable[[], Split]) -> None:
    """Make a split available by name.

    >>> register_split("random", Random)  # or a name and a class of your own
    >>> wide = expand(model, 2, split="random")
    """
    register("a split", _SPLITS, name, factory)


def resolve_split(split: str | Split) -> Split:
    """Turn a name such as ``"random"`` or ``"2:4"`` into a split; a split stays itself."""
    pattern = re.fullmatch(r"(\d+):(\d+)", split) if isinstance(split, str) else None
    if pattern and split not in _SPLITS:
        return Structured(int(pattern[1]), int(pattern[2]))
    return resolve("a split", Split, _SPLITS, split, " and N:M patterns such as 2:4")


_N = TypeVar("_N", bound=Named)


def register(what: str, known: dict[str, Callable[[], _N]], name: str, factory: Any) -> None:
    """Add a name, and what makes the thing it stands for, to those that are known."""
    if not isinstance(name, str) or not callable(factory):
        raise FissileError(f"register {what} by a name and what makes it: a class or a function")
    if known.get(name, factory) is not factory:
        raise FissileError(f"{what} named {name!r} is registered already; choose another name")
    known[name] = factory


def resolve(
    what: str, kind: Any, known: dict[str, Callable[[], _N]], given: Any, more: str = ""
) -> _N:
    """Return what a known name stands for; a thing of the kind stays itself."""
    if isinstance(given, kind):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, str):
        raise FissileError(
            f"{what} is a name or a fissile.{kind.__name__}, not {type(given).__name__}"
        )
    if given not in known:
        names = ", ".join(sorted(known)) + more
        raise FissileError(f"unknown {kind.__name__.lower()} {given!r}; known are {names}")
    return known[given]()
