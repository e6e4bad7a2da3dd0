"""What happens to the weights of a stack on the way: splits, pruning, rewiring, a penalty.

Everything is looked at in ticks, a hundred to a training.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from fissile._common.random import Draw, seeded
from fissile.bank.sparse.masks import alive, effective, within
from fissile.bank.sparse.plan import Plan, SplitAt
from fissile.bank.sparse.stack import Stack
from fissile.bank.step import AdamMoments
from fissile.expansion.budget import keep_largest, resolve_allocation
from fissile.expansion.pattern import split_pair
from fissile.expansion.rewire import rewired
from fissile.expansion.split import resolve_split
from fissile.layers import children_of

__all__ = ["tick"]

#: The penalty is steered to leave a little more than the budget, which the largest then share.
_MORE = 1.15


@torch.no_grad()
def tick(stack: Stack, share: float, before: float) -> bool:
    """Do what is due since an earlier share of the training; tell whether shapes changed."""
    due = [split for split in stack.plan.splits if before < split.at <= share]
    for split in due:
        _split(stack, split)
    if share <= 0:
        return bool(due)
    if stack.plan.l1:
        _steer(stack, share)
    _prune(stack, share, before)
    _rewire(stack, share)
    return bool(due)


def _prune(stack: Stack, share: float, before: float) -> None:
    left = [plan.prune.left(share, before) if plan.prune else None for plan in stack.plans]
    if all(one is None for one in left):
        return
    surplus = torch.tensor([one or 0.0 for one in left], device=stack.device)
    due = torch.tensor([one is not None for one in left], device=stack.device)
    due = due.repeat(len(stack.seeds)).view(-1, 1, 1)
    whole = sum(one[0].numel() for name, one in stack.weights.items() if name != "out")
    more = (whole - stack.room).clamp(min=0)
    room = stack.room + (more * surplus.repeat(len(stack.seeds))).long()
    kept = within(_saliency(stack), room, bias=stack.plan.bias)
    stack.put({name: torch.where(due, kept[name], mask) for name, mask in stack.masks.items()})


def _saliency(stack: Stack) -> dict[str, Tensor]:
    second = stack.each(lambda p: bool(p.prune) and p.prune.saliency == "second-order").bool()  # type: ignore[union-attr]
    found = {}
    for name, mask in stack.masks.items():
        size = stack.weights[name].abs() * mask
        root = stack.moments[name].square.sqrt()
        found[name] = torch.where(second.view(-1, 1, 1), size * root, size)
    return found


def _rewire(stack: Stack, share: float) -> None:
    moves = stack.each(partial(_moving, share=share))
    if not bool((moves > 0).any()):
        return
    heard = stack.each(lambda p: bool(p.rewire) and p.rewire.grow == "gradient").bool()  # type: ignore[union-attr]
    after, living = {}, _living(stack)
    for layer, (name, mask) in enumerate(stack.masks.items()):
        score = stack.noise(8 + 8 * int(stack.step) + layer, *mask.shape[1:])
        if stack.listens:
            score = torch.where(heard.view(-1, 1, 1), stack.gradients[name].abs(), score)
        # A pruned network's dead neurons stay dead: their biases are no longer paid for.
        closed = stack.pruned.view(-1, 1, 1) & ~living[name]
        free = (~mask & ~closed).sum((-2, -1))
        number = torch.minimum((moves * mask.sum((-2, -1))).long(), free)
        score = torch.where(closed, -1.0, score)
        after[name] = rewired(stack.weights[name], mask, score, number)
    kept = effective(after)
    stack.put(
        {name: torch.where(stack.pruned.view(-1, 1, 1), kept[name], after[name]) for name in after}
    )


def _living(stack: Stack) -> dict[str, Tensor]:
    """Return, for every layer, which places belong to neurons that are alive."""
    found = {name: torch.ones_like(mask) for name, mask in stack.masks.items()}
    if "first" in found:
        on = alive(stack.masks)
        found |= {"first": on.unsqueeze(-1), "second": on.unsqueeze(-2)}
    return found


def _steer(stack: Stack, share: float) -> None:
    """Steer the penalty so that about the budget is left; then cut to it, and refit."""
    if share < 0.5:
        there = torch.count_nonzero(stack.weights["direct"], (-2, -1))
        stack.penalty *= (there / (_MORE * stack.room)).clamp(0.5, 4.0).sqrt()
    elif bool((stack.penalty > 0).any()):
        stack.penalty.zero_()
        size = stack.weights["direct"].abs().flatten(1)
        kept = keep_largest(size, stack.room) & (size > 0)
        stack.put({"direct": kept.view_as(stack.weights["direct"])})


def _split(stack: Stack, split: SplitAt) -> None:
    first, second, alpha = stack.weights["first"], stack.weights["second"], split.alpha
    deal = resolve_split(split.split)
    # Clusters are found on the processor, wherever the weights are.
    draw = _draw(stack, stack.device if split.split == "random" else torch.device("cpu"))
    squares = stack.moments["first"].square, stack.moments["second"].square
    pattern = split_pair(
        first, second, alpha, deal, draw,
        extra=(alpha - 1) * first.shape[1] * stack.plan.bias,
        allocation=resolve_allocation(split.allocation), squares=squares,
    )  # fmt: skip
    kept = {"first": pattern.first_mask(), "second": pattern.second}
    for name, axis in (("first", -2), ("bias", -1), ("second", -1)):
        if name in stack.weights:
            _copy(stack, name, axis, alpha, kept.get(name))
    stack.weights["second"] *= split.scale
    stack.masks |= {name: mask.clone() for name, mask in kept.items()}
    stack.hear()


def _draw(stack: Stack, device: torch.device) -> Draw:
    """Return the draw of every seed, the one :func:`fissile.expand` has, for all its plans."""
    draw = seeded(stack.seeds)

    def drawn(networks: int, *shape: int) -> Tensor:
        once = draw(networks // len(stack.plans), *shape).to(device)
        return once.repeat_interleave(len(stack.plans), 0)

    return drawn


def _copy(stack: Stack, name: str, axis: int, alpha: int, mask: Tensor | None) -> None:
    """Give every child its parent's numbers, where it keeps them."""
    old = stack.weights[name], *stack.moments[name]
    new = [children_of(one, alpha, axis) * (1 if mask is None else mask) for one in old]
    stack.weights[name], stack.moments[name] = new[0], AdamMoments(*new[1:])


def _moving(plan: Plan, share: float) -> float:
    """Return which share of a layer's weights moves now."""
    if plan.rewire is None or share >= plan.rewire.until:
        return 0.0
    # While others are still to go, what has just come would be the first of them.
    if (plan.prune and share < plan.prune.end) or any(share < one.at for one in plan.splits):
        return 0.0
    return plan.rewire.fraction * (1 + math.cos(math.pi * share / plan.rewire.until)) / 2
