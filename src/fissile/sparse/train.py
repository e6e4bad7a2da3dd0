"""Training plans in step: stacks of different shapes see the same batches at the same time.

On a GPU a step of all stacks is one graph, in which the stacks are branches side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from fissile.order import order
from fissile.shapes import Float, Int
from fissile.sparse.plan import Plan
from fissile.sparse.stack import Stack

__all__ = ["train"]

#: How often masks are looked at in the course of a training.
_TICKS = 100
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
    where = torch.device(device)
    x, y = x.to(where), y.to(where)
    batch = min(batch, len(x))
    steps = epochs * (len(x) // batch)
    shapes: dict[object, list[int]] = {}
    for place, plan in enumerate(plans):
        shapes.setdefault(plan.shape(), []).append(place)
    stacks = [
        Stack([plans[p] for p in places], seeds, x.shape[1], outputs, steps, where)
        for places in shapes.values()
    ]
    course = _Course(stacks, torch.tensor(list(seeds), device=where), x, y, batch, weights)
    with _tensor_cores():
        course.run(epochs, on_epoch)
    return list(zip(stacks, shapes.values(), strict=True))


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
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0

    def run(self, epochs: int, on_epoch: OnEpoch | None) -> None:
        steps, done = self.stacks[0].steps, 0
        every = max(1, steps // _TICKS)
        self._tick(0.0, -1.0)
        for epoch in range(epochs):
            # What is left over at the end of an epoch is another rest every time.
            for rows in order(self.seeds, epoch, len(self.x)).split(self.batch, 1):
                if rows.shape[1] < self.batch:
                    continue
                self.rows.copy_(rows)
                self._step()
                done += 1
                if done % every == 0 or done == steps:
                    self._tick(done / steps, (done - every) / steps)
            if on_epoch is not None:
                on_epoch(epoch + 1)

    def _tick(self, share: float, before: float) -> None:
        changed = [stack.tick(share, before) for stack in self.stacks]
        if any(changed):
            self.graph, self.eager = None, 0

    def _step(self) -> None:
        if not self.x.is_cuda:
            self._all()
            return
        if self.graph is None:
            self.eager += 1
            if self.eager <= 2:
                self._all()
                return
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._all()
        self.graph.replay()

    def _all(self) -> None:
        x = self.x[self.rows.flatten()].view(*self.rows.shape, -1)
        y = self.targets[self.rows.flatten()].view(*self.rows.shape, -1).mT.contiguous()
        weights = None if self.weights is None else self.weights[self.rows]
        if not self.sides:
            for stack in self.stacks:
                stack.train(x, y, weights)
            return
        main = torch.cuda.current_stream()
        for number, stack in enumerate(self.stacks):
            side = self.sides[number % len(self.sides)]
            if number < len(self.sides):
                side.wait_stream(main)
            with torch.cuda.stream(side):
                stack.train(x, y, weights)
        for side in self.sides[: len(self.stacks)]:
            main.wait_stream(side)


def _targets(y: Int[Tensor, " samples"], outputs: int) -> Int[Tensor, "samples outputs"]:
    return y.unsqueeze(-1) if outputs == 1 else functional.one_hot(y, outputs)
