"""The budget: count non-zeros, prune back to an exact count, share it between two layers.

Selection is by rank, never by threshold: the copies of a W2 weight are equal in magnitude, so a
threshold would remove too many. An `Allocation` decides how both layers of a pair share the budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int
from fissile.expansion.split import Named, register, resolve
from fissile.layers import SparseLayer

#: What is counted: the weights, as the paper does, or everything that learns, which grows with the
#: number of neurons: each child has a bias, and norm parameters of its own.
Budget = Literal["weights", "all"]

#: The weights of both layers of a pair, after the split; the masks of those that stay; and the mean
#: square of the gradient of each.
First = Float[Tensor, "*batch parents inputs"]
Second = Float[Tensor, "*batch outputs children"]
Masks = tuple[Bool[Tensor, "*batch parents inputs"], Bool[Tensor, "*batch outputs children"]]
Squares = tuple[First, Second]


def check_budget(budget: Budget) -> Budget:
    """Return the budget if it is one, or say which there are."""
    if budget not in get_args(Budget):
        raise FissileError(f'unknown budget {budget!r}; use "weights" or "all"')
    return budget


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


def keep_together(first: First, second: Second, count: int | Int[Tensor, "*batch"]) -> Masks:
    """Keep the ``count`` largest scores over both layers of a pair together."""
    scores = [first.flatten(-2), second.flatten(-2)]
    kept = keep_largest(torch.cat(scores, -1), count)
    of_first, of_second = kept.split([part.shape[-1] for part in scores], -1)
    return of_first.view(first.shape), of_second.view(second.shape)


@dataclass(frozen=True)
class Count:
    """The non-zero parameters of one kind in one layer."""

    layer: str
    kind: Literal["weight", "bias", "norm", "other"]
    count: int


@dataclass(frozen=True)
class NonZeros:
    """The number of non-zero parameters of a model, by layer and kind.

    >>> counts = nonzeros(nn.Linear(3, 2))
    >>> counts.weights, counts.of("bias"), counts.all
    (6, 2, 8)
    """

    counts: tuple[Count, ...]

    def __repr__(self) -> str:
        """Show the totals; ``counts`` has every layer."""
        return f"NonZeros(weights={self.weights}, all={self.all})"

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
    if "norm" in type(module).__name__.lower():
        return Count(layer, "norm", parameter.numel())
    if key == "bias":
        return Count(layer, "bias", parameter.numel())
    if isinstance(module, SparseLayer):
        return Count(layer, "weight", module.nonzeros())
    if parameter.ndim >= 2:
        value = parameter.detach()  # torch cannot count in floats of eight bits
        count = torch.count_nonzero(value.float() if value.itemsize == 1 else value)
        # Of a sharded parameter, every process counts its own part.
        whole = count.full_tensor() if hasattr(count, "full_tensor") else count
        return Count(layer, "weight", int(whole))
    return Count(layer, "other", parameter.numel())


@dataclass(frozen=True)
class Candidates:
    """The weights of a split pair before it is pruned back, and how many may stay.

    ``first`` are the parents' weights, each of which one child inherits; ``second`` holds alpha
    copies of every column. ``squares`` are there for a rule that asks for them.
    """

    first: First
    second: Second
    count: Int[Tensor, "*batch"]
    alpha: int
    squares: Squares | None = None

    @property
    def layers(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second


class Allocation(Named, ABC):
    """Decides which weights of a split pair stay; subclass it to invent a new rule.

    >>> class Relative(Allocation):  # magnitudes in units of the largest of their layer
    ...     def keep(self, pair):
    ...         one, two = (w.abs() / w.abs().amax((-2, -1), keepdim=True) for w in pair.layers)
    ...         return keep_together(one, two, pair.count)  # from fissile.expansion.budget
    >>> wide = expand(model, 2, allocation=Relative())
    """

    #: True for a rule that needs ``squares``, the gradients'.
    uses_gradients: ClassVar[bool] = False

    @abstractmethod
    def keep(self, pair: Candidates) -> Masks:
        """Mark exactly ``pair.count`` non-zero weights over both layers."""


class Magnitude(Allocation):
    """Keep the largest magnitudes over both layers together: the rule of the paper."""

    def keep(self, pair: Candidates) -> Masks:
        return keep_together(pair.first.abs(), pair.second.abs(), pair.count)


class Layer(Allocation):
    """Let each layer keep as many weights as it had; what else is to be paid, both pay alike."""

    def keep(self, pair: Candidates) -> Masks:
        return _by_shares(pair, _existing(pair.first), _existing(pair.second) // pair.alpha)


class ErdosRenyi(Allocation):
    """Share in proportion to rows plus columns of each layer, as random sparse networks do.

    Rows and columns are those of the expanded matrices. What a layer cannot fill goes to the other.
    """

    def keep(self, pair: Candidates) -> Masks:
        rows, columns = pair.first.shape[-2:]
        return _by_shares(pair, pair.alpha * rows + columns, sum(pair.second.shape[-2:]))


class Saliency(Allocation):
    """Rank by w² times the mean square of its gradient: what the loss would feel, to second order.

    A copy has the gradient of the weight that it copies.
    """

    uses_gradients = True

    def keep(self, pair: Candidates) -> Masks:
        squares = _checked(pair.squares)
        # 16 bits are too few for anything but the weights themselves.
        dtype = torch.promote_types(pair.first.dtype, pair.second.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        # The root is in the same order, and does not underflow where gradients are small.
        first, second = (
            torch.where(weight == 0, -1, weight.abs().to(dtype) * square.to(dtype).sqrt())
            for weight, square in zip(pair.layers, squares, strict=True)
        )
        return keep_together(first, second, pair.count)


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


def _by_shares(pair: Candidates, of_first: int | Tensor, of_second: int | Tensor) -> Masks:
    """Share the budget in proportion, to the nearest weight, and rank within each layer."""
    whole = of_first + of_second
    share = (2 * pair.count * of_first + whole) // (2 * whole)
    share = share.minimum(_existing(pair.first))
    # The second layer takes the rest; what it cannot fill goes back to the first.
    rest = (pair.count - share).minimum(_existing(pair.second))
    return _largest(pair.first, pair.count - rest), _largest(pair.second, rest)


def _largest(weight: Tensor, count: Int[Tensor, "*batch"]) -> Tensor:
    return keep_largest(weight.abs().flatten(-2), count).view(weight.shape)


def _existing(weight: Float[Tensor, "*batch rows columns"]) -> Int[Tensor, "*batch"]:
    return torch.count_nonzero(weight, (-2, -1))


_ALLOCATIONS: dict[str, Callable[[], Allocation]] = {
    "magnitude": Magnitude,
    "layer": Layer,
    "erdos-renyi": ErdosRenyi,
    "saliency": Saliency,
}


def register_allocation(name: str, factory: Callable[[], Allocation]) -> None:
    """Make a rule available by name.

    >>> register_allocation("layer", Layer)  # or a name and a class of your own
    >>> wide = expand(model, 2, allocation="layer")
    """
    register("an allocation", _ALLOCATIONS, name, factory)


def resolve_allocation(allocation: str | Allocation) -> Allocation:
    """Turn a name such as ``"layer"`` into a rule; a rule stays itself."""
    return resolve("an allocation", Allocation, _ALLOCATIONS, allocation)
