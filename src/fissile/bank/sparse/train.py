"""Training plans in step: stacks of different shapes see the same batches at the same time.

On a GPU a step of all stacks is one graph, in which the stacks are branches side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle, repeat

import torch
from torch import Tensor
from torch.nn import functional

from fissile._common.cores import cores
from fissile._common.errors import FissileError, whole
from fissile._common.random import Draw, hash32, order, seeded, spread
from fissile._common.shapes import Float, Int
from fissile.bank.sparse.plan import Plan, SplitAt
from fissile.bank.sparse.stack import SparseStack, effective, places_alive, within
from fissile.bank.step import AdamMoments, Replay
from fissile.expansion.budget import keep_largest, resolve_allocation
from fissile.expansion.pattern import split_pair
from fissile.expansion.rewire import rewired
from fissile.expansion.split import resolve_split
from fissile.layers import children_of

#: How often masks are looked at in the course of a training.
_TICKS = 100
#: Products of a layer and a step from which on several threads are worth their trouble.
_WORTH_THREADS = 50_000_000
#: Those from which on a stack is worth a thread of its own, on which smaller ones would wait for
#: each other's Python.
_WORTH_A_THREAD = 2_000_000
#: The stream of random numbers that inputs are hidden by.
_DROPOUT = 7
#: Streams on which stacks are trained side by side.
_STREAMS = 16
#: The penalty is steered to leave a little more than the budget, which the largest then share.
_MORE = 1.15


def train(
    plans: Sequence[Plan], seeds: Sequence[int],
    x: Float[Tensor, "samples inputs"], y: Int[Tensor, " samples"], *,
    outputs: int, epochs: int = 50, batch: int = 64, device: str = "cpu",
    weights: Float[Tensor, " samples"] | None = None,
    on_epoch: Callable[[int], object] | None = None,
) -> list[tuple[SparseStack, list[int]]]:  # fmt: skip
    """Train every plan with every seed and return stacks, each with its plans' places in the list.

    >>> [(stack, places)] = train([Plan(2_000, 64, prune=Prune())], [0, 1], x, y, outputs=10)
    >>> stack.accuracy(x_test, y_test)  # of every seed and plan

    ``weights`` say how much each sample's loss counts. Inputs should vary by about one: the rates
    of the plans are meant for that.
    """
    _check(plans, seeds, x, y, outputs, weights)
    whole("epochs", epochs, least=1)
    where = torch.device(device)
    x, y = x.to(where, torch.float32), y.to(where, torch.long)
    batch = min(whole("batch", batch, least=1), len(x))
    steps = epochs * (len(x) // batch)
    shapes: dict[object, list[int]] = {}
    for place, plan in enumerate(plans):
        shapes.setdefault(plan.shape(), []).append(place)
    stacks = [
        SparseStack([plans[p] for p in places], seeds, x.shape[1], outputs, steps, where)
        for places in shapes.values()
    ]
    with _settings(stacks, batch) as threads, ThreadPoolExecutor(threads) as pool:
        alone = threads == 1
        groups = [stacks] if alone else [[stack] for stack in stacks]
        courses = [_Course(group, x, y, batch, weights) for group in groups]
        for epoch in range(epochs):
            list((map if alone else pool.map)(_Course.epoch, courses, repeat(epoch)))
            if on_epoch is not None:
                on_epoch(epoch + 1)
    return list(zip(stacks, shapes.values(), strict=True))


def _check(
    plans: Sequence[Plan], seeds: Sequence[int], x: Tensor, y: Tensor, outputs: int,
    weights: Tensor | None,
) -> None:  # fmt: skip
    """Refuse what cannot be trained."""
    if not plans or not seeds:
        raise FissileError("there is nothing to train: give at least one plan and one seed")
    if x.ndim != 2 or y.shape != x.shape[:1] or not len(y):
        raise FissileError(
            "training needs a matrix of samples and one label for each; got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    if weights is not None and weights.shape != y.shape:
        raise FissileError(f"{len(weights)} weights were given for {len(y)} samples")
    classes = max(2, outputs)
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise FissileError(f"labels must be whole numbers from 0 to {classes - 1}")


@contextmanager
def _settings(stacks: Sequence[SparseStack], batch: int) -> Iterator[int]:
    """Let a GPU multiply with 11 bits of mantissa, give small networks one thread each.

    That is ten times as fast, and networks learn as well. Two threads would wait for each other,
    and for other processes: on two cores, two processes with two threads each took sixty times as
    long as with one each. Yields how many stacks are worth training at the same time.
    """
    products = [batch * max(w.numel() for w in stack.weights.values()) for stack in stacks]
    threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    exact, small = matmul.allow_tf32, max(products) < _WORTH_THREADS
    matmul.allow_tf32 = True
    torch.set_num_threads(1 if small else threads)
    try:
        worth = sum(one >= _WORTH_A_THREAD for one in products)
        yield max(1, min(worth, cores())) if small and stacks[0].device.type == "cpu" else 1
    finally:
        torch.set_num_threads(threads)
        matmul.allow_tf32 = exact


class _Course:
    """Stacks that see the same batches at the same time."""

    def __init__(
        self, stacks: Sequence[SparseStack], x: Tensor, y: Tensor, batch: int,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        self.stacks, self.seeds, self.x = stacks, stacks[0].seeds, x
        steps = torch.arange(stacks[0].steps, device=x.device)
        self.hiding = hash32(hash32(self.seeds, _DROPOUT).unsqueeze(-1), steps)
        self.weights = None if weights is None else weights.to(x.device, x.dtype)
        outputs = stacks[0].outputs
        targets = y.unsqueeze(-1) if outputs == 1 else functional.one_hot(y, outputs)
        self.targets = targets.to(x.dtype)
        self.rows = torch.zeros(len(self.seeds), batch, dtype=torch.long, device=x.device)
        self.sides = [torch.cuda.Stream() for _ in stacks[:_STREAMS]] if x.is_cuda else []
        self.batch, self.done = batch, 0
        self.ticked = -1.0  # the share of the training at the last tick
        self._record()
        self.tick(0.0)

    def _record(self) -> None:
        """Make the step, which a GPU is to record anew."""
        self.step = Replay(self._step, eager=2) if self.x.is_cuda else self._step

    def epoch(self, number: int) -> None:
        """Train for an epoch. What is left over at its end is another rest every time."""
        steps, count = self.stacks[0].steps, len(self.x)
        for rows in order(self.seeds, number, count).split(self.batch, 1)[: count // self.batch]:
            self.rows.copy_(rows)
            self.step()
            self.done += 1
            if self.done % max(1, steps // _TICKS) == 0 or self.done == steps:
                self.tick(self.done / steps)

    def tick(self, share: float) -> None:
        """Do what is due after a share of the training."""
        changed = [tick(stack, share, self.ticked) for stack in self.stacks]
        self.ticked = share
        if any(changed):
            self._record()

    def _step(self) -> None:
        """Make a step of every stack on the batches at ``rows``; on a GPU side by side."""
        rows, shape = self.rows.flatten(), (*self.rows.shape, -1)
        x = self.x.index_select(0, rows).view(shape)
        y = self.targets.index_select(0, rows).view(shape).mT.contiguous()
        weights = None if self.weights is None else self.weights[self.rows]
        seen = {rate: self._dropped(x, rate) for rate in {s.plan.dropout for s in self.stacks}}
        if not self.sides:
            for stack in self.stacks:
                stack.train(seen[stack.plan.dropout], y, weights)
            return
        main = torch.cuda.current_stream()
        for side in self.sides:
            side.wait_stream(main)
        for stack, side in zip(self.stacks, cycle(self.sides), strict=False):
            with torch.cuda.stream(side):
                stack.train(seen[stack.plan.dropout], y, weights)
        for side in self.sides:
            main.wait_stream(side)

    def _dropped(self, x: Float[Tensor, "seeds batch inputs"], rate: float) -> Tensor:
        """Hide a share of the inputs: seed and step alone decide which, whatever the company."""
        if not rate:
            return x
        keys = self.hiding.index_select(1, self.stacks[0].step).squeeze(1)
        kept = spread(keys, *x.shape[1:]) >= rate
        return x * kept / (1 - rate)


# --- what happens to the weights on the way


@torch.no_grad()
def tick(stack: SparseStack, share: float, before: float) -> bool:
    """Do what is due since an earlier share of the training; return whether shapes changed."""
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


def _prune(stack: SparseStack, share: float, before: float) -> None:
    left = {plan: plan.prune.left(share, before) if plan.prune else None for plan in stack.plans}
    if all(surplus is None for surplus in left.values()):
        return
    due = stack.each(lambda plan: left[plan] is not None).bool().view(-1, 1, 1)
    whole = sum(w[0].numel() for name, w in stack.weights.items() if name != "out")
    more = (whole - stack.room).clamp(min=0)
    room = stack.room + (more * stack.each(lambda plan: left[plan] or 0.0)).long()
    kept = within(_saliency(stack), room, bias=stack.plan.bias)
    stack.put({name: torch.where(due, kept[name], mask) for name, mask in stack.masks.items()})


def _saliency(stack: SparseStack) -> dict[str, Tensor]:
    second = stack.each(lambda p: bool(p.prune) and p.prune.saliency == "second-order").bool()  # type: ignore[union-attr]
    scores = {}
    for name, mask in stack.masks.items():
        size = stack.weights[name].abs() * mask
        root = stack.moments[name].square.sqrt()
        scores[name] = torch.where(second.view(-1, 1, 1), size * root, size)
    return scores


def _rewire(stack: SparseStack, share: float) -> None:
    moves = stack.each(partial(_moving, share=share))
    if not bool((moves > 0).any()):
        return
    heard = stack.each(lambda p: bool(p.rewire) and p.rewire.grow == "gradient").bool()  # type: ignore[union-attr]
    after, living = {}, places_alive(stack.masks)
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


def _steer(stack: SparseStack, share: float) -> None:
    """Steer the penalty so that about the budget is left; then cut to it, and refit."""
    if share < 0.5:
        there = torch.count_nonzero(stack.weights["direct"], (-2, -1))
        stack.penalty *= (there / (_MORE * stack.room)).clamp(0.5, 4.0).sqrt()
    elif bool((stack.penalty > 0).any()):
        stack.penalty.zero_()
        size = stack.weights["direct"].abs().flatten(1)
        kept = keep_largest(size, stack.room) & (size > 0)
        stack.put({"direct": kept.view_as(stack.weights["direct"])})


def _split(stack: SparseStack, split: SplitAt) -> None:
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


def _draw(stack: SparseStack, device: torch.device) -> Draw:
    """Return the draw of every seed, the one :func:`fissile.expand` has, for all its plans."""
    draw = seeded(stack.seeds)

    def drawn(networks: int, *shape: int) -> Tensor:
        once = draw(networks // len(stack.plans), *shape).to(device)
        return once.repeat_interleave(len(stack.plans), 0)

    return drawn


def _copy(stack: SparseStack, name: str, axis: int, alpha: int, mask: Tensor | None) -> None:
    """Give every child its parent's numbers, where it keeps them."""
    old = stack.weights[name], *stack.moments[name]
    new = [children_of(x, alpha, axis) * (1 if mask is None else mask) for x in old]
    stack.weights[name], stack.moments[name] = new[0], AdamMoments(*new[1:])


def _moving(plan: Plan, share: float) -> float:
    """Return which share of a layer's weights moves now."""
    if plan.rewire is None or share >= plan.rewire.until:
        return 0.0
    # While others are still to go, what has just come would be the first of them.
    if (plan.prune and share < plan.prune.end) or any(share < split.at for split in plan.splits):
        return 0.0
    return plan.rewire.fraction * (1 + math.cos(math.pi * share / plan.rewire.until)) / 2
