"""Who keeps how much: how the budget is shared between the two layers of a pair.

After a split the second layer holds alpha copies of every weight, and both layers together must
shrink back to the old number of non-zeros. The paper ranks all magnitudes together; where the
second layer has many outputs its copies may then take the whole budget. The other rules guard the
first layer in one way or another.

Two families: one ranks both layers together, by magnitude or another score; the other gives each
layer a share and lets magnitude decide within it. All work on any number of leading
batch dimensions, and ties are settled as in :mod:`fissile.budget`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fissile.budget import keep_largest, keep_together, prune_back
from fissile.errors import FissileError
from fissile.shapes import Bool, Float, Int

__all__ = [
    "Allocation",
    "Candidates",
    "ErdosRenyi",
    "Layer",
    "Magnitude",
    "Masks",
    "Saliency",
    "Squares",
    "allocation_names",
    "register_allocation",
    "resolve_allocation",
]

#: Which weights of the first layer stay, and which copies in the second.
Masks = tuple[Bool[Tensor, "*batch parents inputs"], Bool[Tensor, "*batch outputs children"]]
#: The mean square of the gradient of every weight, in the same two shapes.
Squares = tuple[Float[Tensor, "*batch parents inputs"], Float[Tensor, "*batch outputs children"]]


@dataclass(frozen=True)
class Candidates:
    """The weights of a split pair before it is pruned back, and how many may stay.

    ``first`` are the parents' weights, each of which one child inherits; ``second`` holds alpha
    copies of every column. ``squares`` are there for a rule that asks for them.
    """

    first: Float[Tensor, "*batch parents inputs"]
    second: Float[Tensor, "*batch outputs children"]
    count: Int[Tensor, "*batch"]
    alpha: int
    squares: Squares | None = None

    @property
    def layers(self) -> tuple[Tensor, Tensor]:
        """The weights of both layers."""
        return self.first, self.second


class Allocation(ABC):
    """Decides which weights of a split pair stay; subclass it to invent a new rule.

    >>> class Relative(Allocation):  # magnitudes in units of the largest of their layer
    ...     def keep(self, pair):
    ...         one, two = (w.abs() / w.abs().amax((-2, -1), keepdim=True) for w in pair.layers)
    ...         return keep_together(one, two, pair.count)  # from fissile.budget
    >>> wide = expand(model, 2, allocation=Relative())
    """

    #: True for a rule that needs ``squares``, the gradients'.
    uses_gradients: ClassVar[bool] = False

    @abstractmethod
    def keep(self, pair: Candidates) -> Masks:
        """Mark exactly ``pair.count`` non-zero weights over both layers."""

    def __repr__(self) -> str:
        """Show the rule with its settings."""
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class Magnitude(Allocation):
    """Keep the largest magnitudes over both layers together: the rule of the paper."""

    def keep(self, pair: Candidates) -> Masks:
        """Rank both layers together by magnitude."""
        return prune_back(pair.first, pair.second, pair.count)


class Layer(Allocation):
    """Let each layer keep as many weights as it had; what else is to be paid, both pay alike."""

    def keep(self, pair: Candidates) -> Masks:
        """Share the budget as the layers shared it before the split."""
        return _by_shares(pair, _existing(pair.first), _existing(pair.second) // pair.alpha)


class ErdosRenyi(Allocation):
    """Share in proportion to rows plus columns of each layer, as random sparse networks do.

    Rows and columns are those of the expanded matrices. What a layer cannot fill goes to the other.
    """

    def keep(self, pair: Candidates) -> Masks:
        """Share the budget by the sizes of the layers alone."""
        rows, columns = pair.first.shape[-2:]
        return _by_shares(pair, pair.alpha * rows + columns, sum(pair.second.shape[-2:]))


class Saliency(Allocation):
    """Rank by w² times the mean square of its gradient: what the loss would feel, to second order.

    A copy has the gradient of the weight that it copies.
    """

    uses_gradients = True

    def keep(self, pair: Candidates) -> Masks:
        """Rank both layers together by their weights and gradients."""
        dtype, squares = _score_dtype(pair), _checked(pair.squares)
        # The root is in the same order, and does not underflow where gradients are small.
        scores = [
            weight.abs().to(dtype) * square.to(dtype).sqrt()
            for weight, square in zip(pair.layers, squares, strict=True)
        ]
        return _by_scores(pair, scores)


def _checked(squares: Squares | None) -> Squares:
    """Refuse gradients that rank nothing."""
    if squares is None:
        raise FissileError(
            'allocation="saliency" needs gradients, and there are none; pass optimizer= the Adam '
            "that trained the model, or run backward() before expanding"
        )
    if not all(bool(torch.isfinite(square).all()) for square in squares):
        raise FissileError(
            'allocation="saliency" found gradients that are NaN or infinite; clear them and run '
            "backward() again"
        )
    if not bool((_existing(squares[0]) + _existing(squares[1])).all()):
        raise FissileError(
            'allocation="saliency" found gradients of zero only; train the model, or run '
            "backward() on a loss that reaches these layers"
        )
    return squares


def _by_scores(pair: Candidates, scores: list[Tensor]) -> Masks:
    """Rank both layers together by scores that are not negative; weights of zero come last."""
    first, second = (
        torch.where(weight == 0, -1, score)
        for weight, score in zip(pair.layers, scores, strict=True)
    )
    return keep_together(first, second, pair.count)


def _by_shares(pair: Candidates, of_first: int | Tensor, of_second: int | Tensor) -> Masks:
    """Share the budget in proportion, to the nearest weight, and rank within each layer."""
    whole = of_first + of_second
    share = (2 * pair.count * of_first + whole) // (2 * whole)
    share = share.minimum(_existing(pair.first))
    # The second layer takes the rest; what it cannot fill goes back to the first.
    rest = (pair.count - share).minimum(_existing(pair.second))
    return _largest(pair.first, pair.count - rest), _largest(pair.second, rest)


def _largest(
    weight: Float[Tensor, "*batch rows columns"], count: Int[Tensor, "*batch"]
) -> Bool[Tensor, "*batch rows columns"]:
    return keep_largest(weight.abs().flatten(-2), count).view(weight.shape)


def _existing(weight: Float[Tensor, "*batch rows columns"]) -> Int[Tensor, "*batch"]:
    return torch.count_nonzero(weight, (-2, -1))


def _score_dtype(pair: Candidates) -> torch.dtype:
    """Return what to rank in: 16 bits are too few for anything but the weights themselves."""
    both = torch.promote_types(pair.first.dtype, pair.second.dtype)
    return torch.promote_types(both, torch.float32)


_ALLOCATIONS: dict[str, Callable[[], Allocation]] = {
    "magnitude": Magnitude,
    "layer": Layer,
    "erdos-renyi": ErdosRenyi,
    "saliency": Saliency,
}


def register_allocation(name: str, factory: Callable[[], Allocation]) -> None:
    """Make a rule available by name: ``register_allocation("relative", Relative)``."""
    if not isinstance(name, str) or not callable(factory):
        raise FissileError(
            "register an allocation by a name and what makes it: a class or a function"
        )
    if _ALLOCATIONS.get(name, factory) is not factory:
        raise FissileError(
            f"an allocation named {name!r} is registered already; choose another name"
        )
    _ALLOCATIONS[name] = factory


def allocation_names() -> list[str]:
    """List what ``allocation=`` understands by name."""
    return sorted(_ALLOCATIONS)


def resolve_allocation(allocation: str | Allocation) -> Allocation:
    """Turn a name such as ``"layer"`` into a rule; a rule stays itself."""
    if isinstance(allocation, Allocation):
        return allocation
    if not isinstance(allocation, str):
        raise FissileError(
            f"an allocation is a name or a fissile.Allocation, not {type(allocation).__name__}"
        )
    if allocation not in _ALLOCATIONS:
        names = ", ".join(allocation_names())
        raise FissileError(f"unknown allocation {allocation!r}; known are {names}")
    return _ALLOCATIONS[allocation]()
