"""The budget: counting non-zeros, and pruning back to exactly as many.

Selection is by rank, never by threshold: the copies of a W2 weight are equal in magnitude, so a
threshold would keep too many or too few. The order is stated and deterministic: larger magnitude
first; among equals the first layer before the second, and within a layer the order of storage
(row by row, as the tensors lie in memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fissile.errors import FissileError
from fissile.layers import SparseLayer
from fissile.shapes import Bool, Float, Int

__all__ = [
    "Budget",
    "Count",
    "NonZeros",
    "check_budget",
    "keep_largest",
    "keep_together",
    "nonzeros",
    "prune_back",
]

#: What is counted: the weights, as the paper does, or everything that learns.
Budget = Literal["weights", "all"]


def check_budget(budget: str) -> Budget:
    """Return the budget if it is one, or say which there are."""
    for known in get_args(Budget):
        if budget == known:
            return known  # type: ignore[no-any-return]
    raise FissileError(f'unknown budget {budget!r}; use "weights" or "all"')


def keep_largest(
    magnitude: Float[Tensor, "*batch entries"], count: int | Int[Tensor, "*batch"]
) -> Bool[Tensor, "*batch entries"]:
    """Mark exactly ``count`` entries, the largest; among equals those that come first.

    >>> keep_largest(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2)
    tensor([ True,  True, False, False])
    """
    entries = magnitude.shape[-1]
    room = torch.as_tensor(count, device=magnitude.device).expand(magnitude.shape[:-1])
    room = room.unsqueeze(-1)  # (*batch, 1)
    # Sorting values alone and settling ties afterwards beats a stable argsort on large layers.
    largest = magnitude.sort(-1, descending=True).values
    threshold = largest.gather(-1, (room - 1).clamp(0, entries - 1))
    above, level = magnitude > threshold, magnitude == threshold
    left = room - above.sum(-1, keepdim=True)
    return torch.where(room > 0, above | (level & (level.cumsum(-1) <= left)), False)


def prune_back(
    first: Float[Tensor, "*batch parents inputs"],
    second: Float[Tensor, "*batch outputs children"],
    count: int | Int[Tensor, "*batch"],
) -> tuple[Bool[Tensor, "*batch parents inputs"], Bool[Tensor, "*batch outputs children"]]:
    """Keep the ``count`` largest magnitudes over both layers of a pair together."""
    return keep_together(first.abs(), second.abs(), count)


def keep_together(
    first: Float[Tensor, "*batch parents inputs"],
    second: Float[Tensor, "*batch outputs children"],
    count: int | Int[Tensor, "*batch"],
) -> tuple[Bool[Tensor, "*batch parents inputs"], Bool[Tensor, "*batch outputs children"]]:
    """Keep the ``count`` largest scores over both layers of a pair together."""
    scores = torch.cat([first.flatten(-2), second.flatten(-2)], -1)
    keep_first, keep_second = keep_largest(scores, count).split(
        [first.shape[-2] * first.shape[-1], second.shape[-2] * second.shape[-1]], -1
    )
    return (
        keep_first.unflatten(-1, first.shape[-2:]),
        keep_second.unflatten(-1, second.shape[-2:]),
    )


@dataclass(frozen=True)
class Count:
    """The non-zero parameters of one kind in one layer."""

    layer: str
    kind: Literal["weight", "bias", "norm", "other"]
    count: int


@dataclass(frozen=True)
class NonZeros:
    """How many non-zero parameters a model has, by layer and kind."""

    counts: tuple[Count, ...]

    def of(self, kind: str) -> int:
        """Count one kind: ``"weight"``, ``"bias"``, ``"norm"`` or ``"other"``."""
        return sum(row.count for row in self.counts if row.kind == kind)

    @property
    def weights(self) -> int:
        """Count the weights alone, as the paper does."""
        return self.of("weight")

    @property
    def all(self) -> int:
        """Count everything that learns."""
        return sum(row.count for row in self.counts)

    def under(self, budget: Budget) -> int:
        """Count what the given budget counts."""
        return self.weights if budget == "weights" else self.all


def nonzeros(model: nn.Module) -> NonZeros:
    """Count a model's non-zero parameters by layer and kind.

    >>> nonzeros(nn.Linear(3, 2)).weights
    6

    A weight counts if it is not zero; in an expanded layer, if it exists. Biases and norm
    parameters always count: one that is zero today learns tomorrow.
    """
    rows: list[Count] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # a tied weight is one weight
                continue
            seen.add(id(parameter))
            rows.append(_count(name or "(model)", module, key, parameter))
    return NonZeros(tuple(rows))


def _count(layer: str, module: nn.Module, key: str, parameter: Tensor) -> Count:
    if key == "bias" and not _is_norm(module):
        return Count(layer, "bias", parameter.numel())
    if _is_norm(module):
        return Count(layer, "norm", parameter.numel())
    if isinstance(module, SparseLayer):
        return Count(layer, "weight", module.nonzeros())
    if parameter.ndim >= 2:
        count = torch.count_nonzero(parameter.detach())
        # Of a sharded parameter, every process counts its own part.
        whole = count.full_tensor() if hasattr(count, "full_tensor") else count
        return Count(layer, "weight", int(whole))
    return Count(layer, "other", parameter.numel())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
