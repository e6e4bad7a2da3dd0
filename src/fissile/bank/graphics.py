"""The engine for GPUs: a launch trains all networks of a stack, each on its part of the chip."""

from __future__ import annotations

import importlib.util
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fissile.bank.plain import OnEpochs, move
from fissile.bank.spec import Dense, Expand
from fissile.bank.stack import Stack
from fissile.bank.wide import WideLayer, linear_layers, read, relus, write
from fissile.order import order_keys

if TYPE_CHECKING:
    from fissile.bank.gpu import DataSets, Networks

__all__ = ["can", "run"]

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


def run(
    stack: Stack,
    until: int,
    on_epochs: OnEpochs,
    device: torch.device,
    stop: threading.Event | None = None,
) -> None:
    """Train a stack up to an epoch; an interruption leaves it at the last recorded epoch."""
    move(stack, device)
    layers = read(stack)
    job = _Job(stack, layers, device)
    try:
        while stack.epoch < until:
            on_epochs(*job.launch(until))
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
    finally:
        job.finish()


class _Job:
    """A stack laid out for the kernel."""

    def __init__(self, stack: Stack, layers: list[WideLayer], device: torch.device) -> None:
        self.stack, self.layers, self.device = stack, layers, device
        self.networks, self.data = _networks(stack, layers, device), _data(stack, device)
        self.tests = self.data.xt.shape[1]
        self.seconds = _SLICE

    def launch(self, until: int) -> tuple[Tensor, Tensor]:
        """Train some epochs and return their curves, NaN where a network has diverged."""
        from fissile.bank.gpu import Outcome, train

        stack = self.stack
        epochs = max(1, min(int(_SLICE / self.seconds), until - stack.epoch))
        seeds = stack.seeds.to(self.device).unsqueeze(-1)
        numbers = torch.arange(stack.epoch, stack.epoch + epochs, device=self.device)
        outcome = Outcome.empty(len(stack), epochs, self.device)
        before = [tensor.clone() for tensor in self._changing()]
        begin = time.perf_counter()
        try:
            keys = order_keys(seeds, numbers).contiguous()
            train(self.networks, self.data, keys, outcome, batch=stack.batch)
            finished = outcome.finished.cpu()
        except BaseException:
            self._restore(before, torch.ones(len(stack), dtype=torch.bool))
            raise
        self.seconds = (time.perf_counter() - begin) / epochs
        self._restore(before, ~stack.alive)  # what diverged earlier stays as it was
        gone = torch.arange(epochs) >= torch.where(stack.alive, finished, 0).unsqueeze(-1)
        stack.alive &= finished == epochs
        stack.epoch += epochs
        curves = outcome.correct.cpu().double() / self.tests, outcome.loss.cpu().double()
        accuracy, loss = (curve.masked_fill(gone, torch.nan) for curve in curves)
        return accuracy, loss

    def finish(self) -> None:
        """Write the networks back into the stack."""
        write(self.stack, self.layers)
        for state in self.stack.adam.state.values():
            state["step"].copy_(self.networks.step)

    def _changing(self) -> list[Tensor]:
        net = self.networks
        return [net.w1, net.b1, net.w2, net.b2, *net.m, *net.v, net.step]

    def _restore(self, before: list[Tensor], rows: Tensor) -> None:
        if rows.any():
            rows = rows.to(self.device)
            for now, then in zip(self._changing(), before, strict=True):
                now[rows] = then[rows]


def _networks(stack: Stack, layers: list[WideLayer], device: torch.device) -> Networks:
    """Hand the kernel the matrices themselves: it changes them in place."""
    from fissile.bank.gpu import Networks

    first, second = layers
    assert first.bias is not None
    assert second.bias is not None
    values, means, squares = (
        (first.weight[i], first.bias[i], second.weight[i], second.bias[i]) for i in range(3)
    )
    dials = {name: getattr(stack.dials, name).to(device) for name in ("lr", "l1", "l2")}
    orthogonal = stack.dials.orthogonal.to(device) if bool(stack.dials.orthogonal.any()) else None
    step = stack.adam.state[next(stack.module.parameters())]["step"].to(device, torch.int64)
    masks = [None if m.mask is None else m.mask.to(torch.uint8).contiguous() for m in layers]
    return Networks(
        *values,
        means,
        squares,
        step,
        **dials,
        mask1=masks[0],
        mask2=masks[1],
        orthogonal=orthogonal,
    )


def _data(stack: Stack, device: torch.device) -> DataSets:
    from fissile.bank.gpu import DataSets

    def stacked(name: str, dtype: torch.dtype) -> Tensor:
        parts = [torch.as_tensor(getattr(data, name)) for data in stack.data]
        return torch.stack(parts).to(device, dtype).contiguous()

    return DataSets(
        x=stacked("x", torch.float32),
        y=stacked("y", torch.int32),
        xt=stacked("x_test", torch.float32),
        yt=stacked("y_test", torch.int32),
        which=stack.which.to(device, torch.int32),
    )
