"""Training plans in step: stacks of different shapes see the same batches at the same time.

On a GPU a step of all stacks is one graph, in which the stacks are branches side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from fissile._common.errors import FissileError, whole
from fissile._common.random import hash32, noise, order
from fissile._common.shapes import Float, Int
from fissile.bank.sparse.changes import tick
from fissile.bank.sparse.plan import Plan
from fissile.bank.sparse.stack import Stack
from fissile.bank.step import Replay

__all__ = ["train"]

#: How often masks are looked at in the course of a training.
_TICKS = 100
#: Products of a layer and a step from which on several threads are worth their trouble.
_WORTH_THREADS = 50_000_000
#: The stream of random numbers that inputs are hidden by.
_DROPOUT = 7
#: Steps on a GPU before one is recorded as a graph.
_EAGER = 2
OnEpoch = Callable[[int], object]


def train(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    x: Float[Tensor, "samples inputs"],
    y: Int[Tensor, " samples"],
    *,
    outputs: int,
    epochs: int = 50,
    batch: int = 64,
    device: str = "cpu",
    weights: Float[Tensor, " samples"] | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[tuple[Stack, list[int]]]:
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
        Stack([plans[p] for p in places], seeds, x.shape[1], outputs, steps, where)
        for places in shapes.values()
    ]
    course = _Course(stacks, torch.tensor(list(seeds), device=where), x, y, batch, weights)
    with _tensor_cores(), _few_threads(stacks, batch):
        course.run(epochs, on_epoch)
    return list(zip(stacks, shapes.values(), strict=True))


def _check(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    x: Tensor,
    y: Tensor,
    outputs: int,
    weights: Tensor | None,
) -> None:
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
def _few_threads(stacks: Sequence[Stack], batch: int) -> Iterator[None]:
    """Train small networks in one thread: two would wait for each other, and for other processes.

    On two cores, two processes with two threads each took sixty times as long as with one each.
    """
    work = max(batch * max(one.numel() for one in stack.weights.values()) for stack in stacks)
    was = torch.get_num_threads()
    if work < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(was)


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Let a GPU multiply with 11 bits of mantissa, ten times as fast; networks learn as well."""
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was


class _Course:
    def __init__(
        self,
        stacks: Sequence[Stack],
        seeds: Tensor,
        x: Tensor,
        y: Tensor,
        batch: int,
        weights: Tensor | None,
    ) -> None:
        self.weights = None if weights is None else weights.to(x.device, x.dtype)
        self.stacks, self.seeds, self.x, self.batch = stacks, seeds, x, batch
        self.targets = _targets(y, stacks[0].outputs).to(x.dtype)
        self.rows = torch.zeros(len(seeds), batch, dtype=torch.long, device=x.device)
        self.sides = [torch.cuda.Stream() for _ in range(16)] if x.is_cuda else []
        self.replay = Replay(self._all, eager=_EAGER)
        self.ticked = -1.0  # the share of the training at the last tick

    def run(self, epochs: int, on_epoch: OnEpoch | None) -> None:
        steps, done = self.stacks[0].steps, 0
        every = max(1, steps // _TICKS)
        self._tick(0.0)
        for epoch in range(epochs):
            # What is left over at the end of an epoch is another rest every time.
            for rows in order(self.seeds, epoch, len(self.x)).split(self.batch, 1):
                if rows.shape[1] < self.batch:
                    continue
                self.rows.copy_(rows)
                self._step()
                done += 1
                if done % every == 0 or done == steps:
                    self._tick(done / steps)
            if on_epoch is not None:
                on_epoch(epoch + 1)

    def _tick(self, share: float) -> None:
        changed = [tick(stack, share, self.ticked) for stack in self.stacks]
        self.ticked = share
        if any(changed):
            self.replay = Replay(self._all, eager=_EAGER)  # tensors have changed

    def _step(self) -> None:
        if self.x.is_cuda:
            self.replay()
        else:
            self._all()

    def _all(self) -> None:
        x = self.x[self.rows.flatten()].view(*self.rows.shape, -1)
        y = self.targets[self.rows.flatten()].view(*self.rows.shape, -1).mT.contiguous()
        weights = None if self.weights is None else self.weights[self.rows]
        seen = {rate: self._dropped(x, rate) for rate in {s.plan.dropout for s in self.stacks}}
        if not self.sides:
            for stack in self.stacks:
                stack.train(seen[stack.plan.dropout], y, weights)
            return
        main = torch.cuda.current_stream()
        for number, stack in enumerate(self.stacks):
            side = self.sides[number % len(self.sides)]
            if number < len(self.sides):
                side.wait_stream(main)
            with torch.cuda.stream(side):
                stack.train(seen[stack.plan.dropout], y, weights)
        for side in self.sides[: len(self.stacks)]:
            main.wait_stream(side)

    def _dropped(self, x: Float[Tensor, "seeds batch inputs"], rate: float) -> Tensor:
        """Hide a share of the inputs: seed and step alone decide which, whatever the company."""
        if not rate:
            return x
        step = self.stacks[0].step.expand(len(self.seeds))
        kept = noise(hash32(self.seeds, _DROPOUT), step, *x.shape[1:]) >= rate
        return x * kept / (1 - rate)


def _targets(y: Int[Tensor, " samples"], outputs: int) -> Int[Tensor, "samples outputs"]:
    return y.unsqueeze(-1) if outputs == 1 else functional.one_hot(y, outputs)
