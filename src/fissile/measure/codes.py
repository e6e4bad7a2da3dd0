"""Codes: neurons whose signs compute the soft AND of a clause."""

from __future__ import annotations

from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int
from fissile.measure._groups import membership

__all__ = ["coded_clauses", "codes"]


def codes(
    weight: Float[Tensor, "*batch neurons inputs"],
    bias: Float[Tensor, "*batch neurons"],
    out: Float[Tensor, "*batch neurons"],
    groups: Int[Tensor, " inputs"],
) -> Bool[Tensor, "*batch clauses neurons"]:
    """True where a neuron holds a clause's code.

    >>> import torch
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
    members = membership(groups, weight.shape[-1])
    lacking = (weight <= 0).to(weight) @ members.to(weight)  # [*batch neurons clauses]
    gate = (bias < 0) & (out > 0)
    return ((lacking == 0) & gate[..., None]).mT


def coded_clauses(
    weight: Float[Tensor, "*batch neurons inputs"],
    bias: Float[Tensor, "*batch neurons"],
    out: Float[Tensor, "*batch neurons"],
    groups: Int[Tensor, " inputs"],
) -> Int[Tensor, "*batch"]:
    """The number of clauses with a code in at least one neuron.

    >>> import torch
    >>> number = coded_clauses(torch.eye(3), -torch.ones(3), torch.ones(3), torch.arange(3))
    >>> int(number)
    3
    """
    return codes(weight, bias, out, groups).any(-1).sum(-1)
