"""The engine for GPUs: a launch trains networks of many stacks, each on its part of the chip."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fissile._common.random import order_keys
from fissile.bank.spec import Dense, Expand
from fissile.bank.stack import Stack, WideLayer, linear_layers, read, relus, write
from fissile.layers import SparseLinear

if TYPE_CHECKING:
    from fissile.bank.gpu import DataSets, Networks
    from fissile.bank.torch_engine import OnEpochs

__all__ = ["can", "run", "run_together", "together"]

#: Seconds of work in one launch: as long as Ctrl-C may have to wait.
_SLICE = 0.5


def can(stack: Stack) -> bool:
    """Tell whether the kernel can train a stack: one hidden ReLU layer that fits on chip."""
    if importlib.util.find_spec("triton") is None or not isinstance(stack.arm, Dense | Expand):
        return False
    if relus(stack.module) != [True, False] or any(
        p.dtype is not torch.float32 for p in stack.module.parameters()
    ):
        return False
    if any(isinstance(x, np.memmap) for data in stack.data for x in (data.x, data.x_test)):
        return False
    if sum(len(data.x) for data in stack.data) * stack.data[0].inputs >= 2**31:
        return False  # the kernel counts entries in 32 bits
    from fissile.bank.gpu import fits

    first, second = linear_layers(stack.module)
    return fits(first.out_features, first.in_features, second.out_features)


def together(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Sort stacks into groups that one launch can train: those whose padded sizes are the same.

    A launch waits for its slowest network and leaves the rest of the chip idle, and every size
    costs a compilation of seconds: fewer and fuller launches are worth some zeros.
    """
    groups: dict[Hashable, list[Stack]] = {}
    for stack in stacks:
        first, second = linear_layers(stack.module)
        masked = isinstance(first, SparseLinear), isinstance(second, SparseLinear)
        samples = len(stack.data[0].x), len(stack.data[0].x_test)
        key = _tile(stack), masked, second.out_features, samples, stack.batch, stack.epoch
        groups.setdefault((key, _orthogonal(stack)), []).append(stack)
    return list(groups.values())


def run(
    stack: Stack,
    until: int,
    on_epochs: OnEpochs,
    device: torch.device,
    stop: threading.Event | None = None,
) -> None:
    """Train a stack up to an epoch; an interruption leaves it at the last recorded epoch."""
    run_together([stack], until, lambda _, *curves: on_epochs(*curves), device, stop)


def run_together(
    stacks: Sequence[Stack],
    until: int,
    on_epochs: Callable[[Stack, Tensor, Tensor], object],
    device: torch.device,
    stop: threading.Event | None = None,
) -> None:
    """Train a group of stacks in the same launches; see :func:`together`."""
    for stack in stacks:
        stack.to(device)
    job = _Job(stacks, device)
    try:
        while job.epoch < until:
            for stack, accuracy, loss in job.launch(until):
                on_epochs(stack, accuracy, loss)
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
    finally:
        job.finish()


def _orthogonal(stack: Stack) -> bool:
    return bool(stack.dials.orthogonal.any())


def _tile(stack: Stack) -> tuple[int, int]:
    """Return the hidden neurons and inputs of the tiles a stack is computed in."""
    from fissile.bank.gpu import padded

    first, second = linear_layers(stack.module)
    sizes = first.out_features, first.in_features, second.out_features
    return padded(*sizes, _orthogonal(stack))[:2]


class _Job:
    """Stacks laid out for the kernel, one after another, with zeros where a tile is wider."""

    def __init__(self, stacks: Sequence[Stack], device: torch.device) -> None:
        self.stacks, self.device = stacks, device
        self.layers = [read(stack) for stack in stacks]
        self.tile = _tile(stacks[0])
        self.networks, self.data = self._networks(), self._data()
        self.seconds = _SLICE

    @property
    def epoch(self) -> int:
        """How far all of them are."""
        return self.stacks[0].epoch

    def launch(self, until: int) -> list[tuple[Stack, Tensor, Tensor]]:
        """Train some epochs and return their curves, NaN where a network has diverged."""
        from fissile.bank.gpu import Outcome, train

        epochs = max(1, min(int(_SLICE / self.seconds), until - self.epoch))
        seeds = torch.cat([stack.seeds for stack in self.stacks]).to(self.device).unsqueeze(-1)
        alive = torch.cat([stack.alive for stack in self.stacks])
        numbers = torch.arange(self.epoch, self.epoch + epochs, device=self.device)
        outcome = Outcome.empty(len(alive), epochs, self.device)
        before = [tensor.clone() for tensor in self._changing()]
        begin = time.perf_counter()
        try:
            keys = order_keys(seeds, numbers).contiguous()
            train(self.networks, self.data, keys, outcome, batch=self.stacks[0].batch)
            finished = outcome.finished.cpu()
        except BaseException:
            self._restore(before, torch.ones(len(alive), dtype=torch.bool))
            raise
        self.seconds = (time.perf_counter() - begin) / epochs
        self._restore(before, ~alive)  # what diverged earlier stays as it was
        gone = torch.arange(epochs) >= torch.where(alive, finished, 0).unsqueeze(-1)
        shares = outcome.correct.cpu().double() / self.data.xt.shape[1]
        accuracy, loss = (
            curve.masked_fill(gone, torch.nan) for curve in (shares, outcome.loss.cpu().double())
        )
        parts = zip(self.stacks, *map(self._cut, (accuracy, loss, finished)), strict=True)
        found = []
        for stack, shares, losses, done in parts:
            stack.alive &= done == epochs
            stack.epoch += epochs
            found.append((stack, shares, losses))
        return found

    def finish(self) -> None:
        """Write the networks back into their stacks."""
        states = zip(*(self._cut(tensor) for tensor in self._changing()), strict=True)
        for stack, layers, (*tensors, step) in zip(self.stacks, self.layers, states, strict=True):
            for target, tensor in zip(_matrices(layers), tensors, strict=True):
                target.copy_(tensor[tuple(slice(size) for size in target.shape)])
            write(stack, layers)
            for moments in stack.adam.state.values():
                moments["step"].copy_(step)

    def _cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = tensor.split([len(stack) for stack in self.stacks])
        return parts

    def _changing(self) -> list[Tensor]:
        """Return all that training changes, in the order of :func:`_matrices`, and the steps."""
        net = self.networks
        return [net.w1, net.b1, net.w2, net.b2, *net.m, *net.v, net.step]

    def _restore(self, before: list[Tensor], rows: Tensor) -> None:
        if rows.any():
            rows = rows.to(self.device)
            for now, then in zip(self._changing(), before, strict=True):
                now[rows] = then[rows]

    def _networks(self) -> Networks:
        from fissile.bank.gpu import Networks

        (hidden, inputs), outputs = self.tile, self.layers[0][1].weight[0].shape[1]
        shapes = [(hidden, inputs), (hidden,), (outputs, hidden), (outputs,)]
        states = zip(*map(_matrices, self.layers), strict=True)  # w1 of all stacks, b1 of all, ...
        values = [_joined(some, shapes[i % 4]) for i, some in enumerate(states)]
        (w1, b1, w2, b2), m, v = (
            (values[i], values[i + 1], values[i + 2], values[i + 3]) for i in (0, 4, 8)
        )
        masks = [
            _joined([one.mask.to(torch.uint8) for one in some if one.mask is not None], shape)
            for some, shape in zip(zip(*self.layers, strict=True), shapes[::2], strict=True)
        ]
        dials = {
            name: torch.cat([getattr(stack.dials, name) for stack in self.stacks]).to(self.device)
            for name in ("lr", "l1", "l2", "orthogonal")
        }
        steps = [s.adam.state[next(s.module.parameters())]["step"] for s in self.stacks]
        return Networks(
            w1=w1,
            b1=b1,
            w2=w2,
            b2=b2,
            m=m,
            v=v,
            step=torch.cat(steps).to(self.device, torch.int64),
            lr=dials["lr"],
            l1=dials["l1"],
            l2=dials["l2"],
            mask1=masks[0] if len(masks[0]) else None,
            mask2=masks[1] if len(masks[1]) else None,
            orthogonal=dials["orthogonal"] if _orthogonal(self.stacks[0]) else None,
        )

    def _data(self) -> DataSets:
        from fissile.bank.gpu import DataSets

        sets = {data.key(): data for stack in self.stacks for data in stack.data}
        number = {key: i for i, key in enumerate(sets)}
        which = [
            torch.tensor([number[data.key()] for data in stack.data])[stack.which.cpu()]
            for stack in self.stacks
        ]

        def stacked(name: str, dtype: torch.dtype, width: tuple[int, ...]) -> Tensor:
            parts = [torch.as_tensor(getattr(data, name))[None] for data in sets.values()]
            shape = (parts[0].shape[1], *width)
            return _joined([part.to(self.device, dtype) for part in parts], shape)

        inputs = (self.tile[1],)
        return DataSets(
            x=stacked("x", torch.float32, inputs),
            y=stacked("y", torch.int32, ()),
            xt=stacked("x_test", torch.float32, inputs),
            yt=stacked("y_test", torch.int32, ()),
            which=torch.cat(which).to(self.device, torch.int32),
        )


def _matrices(layers: Sequence[WideLayer]) -> list[Tensor]:
    """Return W1, b1, W2 and b2, then their first moments, then their second."""
    first, second = layers
    assert first.bias is not None
    assert second.bias is not None
    parts = first.weight, first.bias, second.weight, second.bias
    return [part[state] for state in range(3) for part in parts]


def _joined(tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Put stacks of tensors one after another, each filled up with zeros to a shape."""
    if not tensors:
        return torch.empty(0)
    found = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
    for place, tensor in zip(found.split([len(t) for t in tensors]), tensors, strict=True):
        place[tuple(slice(size) for size in tensor.shape)] = tensor
    return found
