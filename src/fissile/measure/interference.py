"""Interference: how features share a layer's neurons, and which edges carry which clauses."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int
from fissile.measure.weights import on_weights

Weights = Float[Tensor, "*batch neurons inputs"]
#: A number for every neuron: its bias, or its outgoing weight.
Neurons = Float[Tensor, "*batch neurons"]
#: The group of every input, numbered from 0: its clause, or the feature it is a part of.
Group = Int[Tensor, " inputs"]
#: Samples, which of their literals are on, and which clauses they satisfy.
X = Float[Tensor, "*#batch samples inputs"]
On = Bool[Tensor, "*#batch samples inputs"]
Satisfied = Bool[Tensor, "*#batch samples clauses"]


@on_weights
def gram(weight: Weights) -> Float[Tensor, "*batch inputs inputs"]:
    """Return the Gram matrix WᵀW: how much each two inputs share neurons.

    >>> gram(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    return weight.mT @ weight


@on_weights
def features(weight: Weights, groups: Group) -> Float[Tensor, "*batch neurons features"]:
    """Return the vector of each feature: the sum of the columns of its inputs.

    >>> features(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0, 0, 1])).tolist()
    [[3.0, 3.0]]
    """
    return weight @ membership(groups, weight).to(weight)


@on_weights
def capacity(weight: Weights, groups: Group | None = None) -> Float[Tensor, "*batch features"]:
    """Return the capacity Cᵢ = (vᵢ·vᵢ)² / Σⱼ(vᵢ·vⱼ)² of each feature, 0 where vᵢ is 0.

    >>> capacity(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist()
    [0.5, 0.5, 1.0]

    Without `groups` each input is a feature of its own.
    """
    vectors = weight if groups is None else features(weight, groups)
    # The ratio ignores scale, but fourth powers of raw weights could overflow or vanish.
    size = vectors.abs().amax((-2, -1), keepdim=True)
    overlap = gram(vectors / torch.where(size > 0, size, 1)).square()  # [*batch features features]
    shared = overlap.sum(-1)
    return overlap.diagonal(dim1=-2, dim2=-1) / torch.where(shared > 0, shared, 1)


@on_weights
def total_capacity(weight: Weights, groups: Group | None = None) -> Float[Tensor, "*batch"]:
    """Return the capacity of all features together; higher means less superposition.

    >>> float(total_capacity(torch.ones(3, 4), torch.tensor([0, 0, 1, 1])))
    1.0
    """
    return capacity(weight, groups).sum(-1)


@on_weights
def cosine(weight: Weights, *, absolute: bool = False) -> Float[Tensor, "*batch"]:
    """Return the mean cosine similarity over all pairs of distinct neurons.

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


def membership(groups: Group, weight: Tensor) -> Bool[Tensor, "inputs groups"]:
    """Return which input belongs to which group, or refuse ids that are not 0, 1, 2, ...

    >>> membership(torch.tensor([0, 0, 1]), torch.ones(2, 3)).int().tolist()
    [[1, 0], [1, 0], [0, 1]]
    """
    neurons, inputs = weight.shape[-2:]
    if groups.shape != (inputs,):
        turned = groups.shape == (neurons,)
        advice = "it looks transposed: give weight.T" if turned else "give one group id per input"
        raise FissileError(
            f"groups has shape {list(groups.shape)} but the weight has {inputs} inputs; {advice}."
        )
    if groups.is_floating_point() or groups.dtype == torch.bool:
        raise FissileError(f"groups has dtype {groups.dtype}; group ids must be integers.")
    ids = sorted(set(groups.tolist()))
    members = groups[:, None] == torch.arange(len(ids), device=groups.device)
    if not bool(members.any(-1).all()):
        raise FissileError(
            f"Group ids must run from 0 without gaps, but the ids found are {ids}; "
            "renumber them, for example with groups.unique(return_inverse=True)[1]."
        )
    return members


@on_weights
def edge_usage(
    weight: Weights, bias: Neurons, x: X, on: On, satisfied: Satisfied
) -> Float[Tensor, "*batch clauses neurons inputs"]:
    """Return how often each edge carries each clause, among the samples that switch its literal on.

    >>> x = torch.eye(2)
    >>> edge_usage(torch.eye(2), torch.zeros(2), x, x > 0, x > 0).shape
    torch.Size([2, 2, 2])

    Only samples that satisfy exactly one clause are traced. The edge from input j to neuron i
    contributes where the neuron is active, literal j is on, and the weight pushes it up. The
    count is taken relative to the clause's samples with literal j on, so that literals of other
    clauses, which are on only now and then, are judged like the clause's own.
    """
    _check(weight, bias, x, on, satisfied)
    active = x @ weight.mT + bias[..., None, :] > 0  # [*batch samples neurons]
    traced = satisfied & (satisfied.sum(-1, keepdim=True) == 1)  # [*batch samples clauses]
    literals = on.to(weight)
    # One matmul per clause counts samples without a tensor of samples × neurons × inputs.
    counts = [(active & chosen[..., None]).to(weight).mT @ literals for chosen in traced.unbind(-1)]
    present = traced.to(weight).mT @ literals  # [*batch clauses inputs]
    share = torch.stack(counts, -3) / present.clamp(min=1)[..., None, :]
    return share * (weight > 0)[..., None, :, :]


@on_weights
def collisions(
    weight: Weights, bias: Neurons, x: X, on: On, satisfied: Satisfied, *, share: float = 0.5
) -> Float[Tensor, "*batch"]:
    """Return the edge collision rate: of the edges any clause uses, those that two or more use.

    >>> x = torch.eye(2)
    >>> float(collisions(torch.eye(2), torch.zeros(2), x, x > 0, x > 0))
    0.0

    A clause uses an edge whose `edge_usage` is more than `share`: by default, whose neuron fires
    on most of the clause's samples with that literal on. At 0 a single sample is enough, and on a
    large test set nearly every edge collides. The rate is 0 where no edge is used.
    """
    if not 0 <= share < 1:
        raise FissileError(f"share={share} is a fraction of samples; give 0 <= share < 1.")
    return collided(edge_usage(weight, bias, x, on, satisfied), share)


def collided(
    usage: Float[Tensor, "*batch clauses neurons inputs"], share: float
) -> Float[Tensor, "*batch"]:
    """Return the edge collision rate from how often each edge carries each clause.

    >>> float(collided(torch.tensor([[[1.0, 1.0]], [[0.0, 0.2]]]), share=0.0))
    0.5
    """
    users = (usage > share).sum(-3)  # [*batch neurons inputs]
    used, shared = ((users >= least).sum((-2, -1)) for least in (1, 2))
    return shared.to(usage.dtype) / used.clamp(min=1)


@on_weights
def codes(
    weight: Weights, bias: Neurons, out: Neurons, groups: Group
) -> Bool[Tensor, "*batch clauses neurons"]:
    """Mark where a neuron holds a clause's code.

    >>> weight, clause = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([0, 0, 1])
    >>> codes(weight, torch.tensor([-2.5]), torch.tensor([1.0]), clause).tolist()
    [[True], [False]]

    A code is a positive weight for every literal of the clause, with a negative bias and a
    positive outgoing weight `out`.
    """
    if not bias.shape == out.shape == weight.shape[:-1]:
        raise FissileError(
            f"bias {list(bias.shape)} and out {list(out.shape)} must hold one number per neuron: "
            f"{list(weight.shape[:-1])}."
        )
    members = membership(groups, weight)
    lacking = (weight <= 0).to(weight) @ members.to(weight)  # [*batch neurons clauses]
    gate = (bias < 0) & (out > 0)
    return ((lacking == 0) & gate[..., None]).mT


@on_weights
def coded_clauses(
    weight: Weights, bias: Neurons, out: Neurons, groups: Group
) -> Int[Tensor, "*batch"]:
    """Return the number of clauses with a code in at least one neuron.

    >>> number = coded_clauses(torch.eye(3), -torch.ones(3), torch.ones(3), torch.arange(3))
    >>> int(number)
    3
    """
    return codes(weight, bias, out, groups).any(-1).sum(-1)


def _check(weight: Tensor, bias: Tensor, x: Tensor, on: Tensor, satisfied: Tensor) -> None:
    if bias.shape != weight.shape[:-1]:
        raise FissileError(
            f"bias has shape {list(bias.shape)}; a weight of shape {list(weight.shape)} "
            f"needs {list(weight.shape[:-1])}."
        )
    if x.shape[-1] != weight.shape[-1] or on.shape[-2:] != x.shape[-2:]:
        raise FissileError(
            f"x {list(x.shape)} and on {list(on.shape)} must both end in "
            f"[samples, inputs] with the weight's {weight.shape[-1]} inputs."
        )
    if satisfied.shape[-2] != x.shape[-2] or satisfied.shape[-1] == 0:
        raise FissileError(
            f"satisfied {list(satisfied.shape)} must end in [samples, clauses] with the "
            f"{x.shape[-2]} samples of x and at least one clause."
        )
