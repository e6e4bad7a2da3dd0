"""Splitting one pair of layers: which weights of the expanded pair exist.

This is the whole method as pure tensor algebra, on any leading batch dimensions: deal the inputs,
copy the second layer's columns, prune back to the budget.

Every kind of pair is two matrices. Gate and up are one, their rows below each other; a filter is a
row, in which every input channel has as many columns as the kernel has positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fissile._common.errors import FissileError, whole
from fissile._common.random import Draw
from fissile._common.shapes import Bool, Float
from fissile.expansion.budget import Allocation, Candidates, Magnitude, Masks, Second, Squares
from fissile.expansion.split import Owners, Split, Weights, redraw
from fissile.layers import REMOVED, children_of, owner_mask


@dataclass(frozen=True)
class Form:
    """How the neurons of a pair lie in its two matrices.

    ``parts`` is 2 where a neuron has two rows of the first matrix, gate and up; the kernels are how
    many columns an input of the first, and of the second layer has.
    """

    parts: int = 1
    first_kernel: int = 1
    second_kernel: int = 1


@dataclass(frozen=True)
class Pattern:
    """Which weights of an expanded pair exist.

    ``owner`` says which child holds each first-layer weight (``REMOVED``: none). Where the split
    is no partition, ``first`` is the mask that stands instead, with the same degree per child.
    """

    alpha: int
    owner: Owners
    second: Bool[Tensor, "*batch outputs children"]
    first: Bool[Tensor, "*batch children inputs"] | None = None

    def first_mask(self) -> Bool[Tensor, "*batch children inputs"]:
        """Return the first layer's pattern as a mask, whatever it is kept as."""
        return owner_mask(self.owner, self.alpha) if self.first is None else self.first

    def idle(self, parts: int = 1) -> Bool[Tensor, "*batch children"]:
        """Mark the children that no input reaches, through any of their ``parts`` rows."""
        if self.first is None:
            slots = self.owner.new_zeros((*self.owner.shape[:-1], self.alpha + 1), dtype=torch.bool)
            reached = slots.scatter(-1, self.owner - REMOVED, True)[..., 1:].flatten(-2)
        else:
            reached = self.first.any(-1)
        return torch.logical_not(reached.unflatten(-1, (parts, -1)).any(-2))

    def parts(self, count: int) -> list[Pattern]:
        """Return a pattern for each of ``count`` first layers that lie below each other."""
        owners = self.owner.chunk(count, -2)
        firsts = [None] * count if self.first is None else self.first.chunk(count, -2)
        return [
            Pattern(self.alpha, owner, self.second, first)
            for owner, first in zip(owners, firsts, strict=True)
        ]


def check_alpha(alpha: int, inputs: int) -> int:
    """Return alpha as an int if a neuron with that many inputs can be split so."""
    count = whole("alpha", alpha, least=1)
    if count > inputs:
        raise FissileError(
            f"alpha={count} is larger than the fan-in of {inputs}: some children would have no "
            "input; use a smaller alpha"
        )
    return count


def split_pair(
    first: Weights,
    second: Float[Tensor, "*batch outputs parents"],
    alpha: int,
    split: Split,
    draw: Draw,
    *,
    form: Form = Form(),  # noqa: B008 (it is frozen)
    extra: int = 0,
    allocation: Allocation = Magnitude(),  # noqa: B008 (it has no state)
    squares: Squares | None = None,
) -> Pattern:
    """Split every neuron between two layers and prune back to the same number of non-zeros.

    >>> pattern = split_pair(w1, w2, 2, Random(), drawer(torch.Generator().manual_seed(0)))

    ``extra`` is what the pair must pay besides: the children's biases and norm parameters when
    the budget counts them. ``squares`` are the mean squares of the gradients of ``first`` and
    ``second``, for an allocation that asks for them.
    """
    alpha = check_alpha(alpha, first.shape[-1] // form.first_kernel)
    owner = _owners(first, alpha, split, draw, form)
    count = torch.count_nonzero(first, (-2, -1)) + torch.count_nonzero(second, (-2, -1)) - extra
    if bool((count < 1).any()):
        raise FissileError(
            "the budget leaves no weights: the children's biases and norm parameters alone use it "
            'up; use a smaller alpha or budget="weights"'
        )
    if squares is not None:
        squares = squares[0], _copies(squares[1], alpha, form)
    pair = Candidates(first, _copies(second, alpha, form), count, alpha, squares)
    keep, second_mask = _kept(allocation.keep(pair), pair, allocation)
    owner = torch.where(keep, owner, REMOVED)
    if split.disjoint:
        return Pattern(alpha, owner, second_mask)
    if form.first_kernel > 1:
        raise FissileError(f"{split!r} shares inputs, which filters cannot do; use another split")
    again = _alike(draw, form.parts)
    mask = redraw(owner_mask(owner, alpha), children_of(first, alpha, -2), again)
    return Pattern(alpha, owner, second_mask, mask)


def _copies(second: Float[Tensor, "*batch outputs parents"], alpha: int, form: Form) -> Second:
    """Copy what reads a parent, all positions of a kernel together, to all its children."""
    return children_of(second.unflatten(-1, (-1, form.second_kernel)), alpha, -2).flatten(-2)


def _owners(first: Weights, alpha: int, split: Split, draw: Draw, form: Form) -> Owners:
    """Deal the inputs once for each neuron, whatever number of weights it has on each.

    A split that looks at weights sees a neuron's other weights as further rows, after the parents.
    """
    parts = first.unflatten(-1, (-1, form.first_kernel)).unflatten(-3, (form.parts, -1))
    rows = parts.movedim(-1, -3)  # (*batch, parts, kernel, parents, inputs)
    parents = rows.shape[-2]
    rows = rows.flatten(-4, -2)
    owner = _checked(split.deal(rows, alpha, draw), rows, alpha, split)[..., :parents, :]
    owner = children_of(owner, form.first_kernel, -1)
    return torch.cat([owner] * form.parts, -2)


def _alike(draw: Draw, parts: int) -> Draw:
    """Draw the same for both parts of a neuron: its gate and its up see their inputs together."""

    def alike(*shape: int) -> Tensor:
        *batch, rows, columns = shape
        return torch.cat([draw(*batch, rows // parts, columns)] * parts, -2)

    return alike


def _checked(owner: Tensor, first: Tensor, alpha: int, split: Split) -> Tensor:
    """Refuse what a split from outside the package may get wrong."""
    if owner.shape != first.shape or owner.is_floating_point() or owner.is_complex():
        raise FissileError(
            f"{split!r} must return one integer owner per weight, shape {tuple(first.shape)}; "
            f"it returned {tuple(owner.shape)} of {owner.dtype}"
        )
    if bool(((owner < 0) | (owner >= alpha)).any()):
        raise FissileError(f"{split!r} returned an owner outside 0 .. {alpha - 1}")
    return owner.to(first.device, torch.long)


def _kept(masks: Masks, pair: Candidates, allocation: Allocation) -> Masks:
    """Refuse what an allocation from outside the package may get wrong."""
    wanted = [(weight.shape, torch.bool) for weight in pair.layers]
    given = masks if isinstance(masks, tuple | list) else ()
    if [(getattr(m, "shape", None), getattr(m, "dtype", None)) for m in given] != wanted:
        one, two = (tuple(weight.shape) for weight in pair.layers)
        raise FissileError(
            f"{allocation!r} must return two masks, boolean tensors of the shapes {one} and {two}"
        )
    first, second = (mask.to(pair.first.device) for mask in masks)
    marked = first.sum((-2, -1)) + second.sum((-2, -1))
    zeros = (first & (pair.first == 0)).sum((-2, -1)) + (second & (pair.second == 0)).sum((-2, -1))
    wrong = (marked != pair.count) | (zeros > 0)
    if bool(wrong.any()):
        count, kept, idle = (int(n[wrong][0]) for n in (pair.count, marked, zeros))
        raise FissileError(
            f"{allocation!r} must keep exactly {count} weights that are not zero, the budget; it "
            f"kept {kept}, {idle} of them zero"
        )
    return first, second
