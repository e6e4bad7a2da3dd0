"""The bank on a processor: one compiled call trains small MLPs for many epochs.

It agrees with :func:`fissile.bank.loop.fit`. A ``Wiring`` lists the weights that exist, so that an
expanded network costs no more than the dense one. Batches go through in tiles of ``LANES`` samples,
features by samples: each weight then meets a whole row of samples, in registers.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fissile._common.cores import cores
from fissile._common.random import hash32
from fissile.bank.spec import Data, Dynamic
from fissile.bank.stack import (
    HYPER,
    Stack,
    WideLayer,
    first_index,
    linear_layers,
    read,
    stages,
    write,
)
from fissile.expansion.rewire import Rewire
from fissile.layers import DropConnectLinear, MaskedLinear

if TYPE_CHECKING:
    from fissile.bank.cpu.layout import Masks, Samples
    from fissile.bank.engines import Record

Rows = npt.NDArray[np.int64]
Sets = tuple["Samples", "Samples"]

#: Seconds of work between two looks at whether to stop.
_SLICE = 0.2


@cache
def compiles() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def can(stack: Stack) -> bool:
    """Return whether the compiled kernel can train a stack: networks with ReLUs and LayerNorms."""
    if not compiles():
        return False
    dtype = next(stack.module.parameters()).dtype
    if dtype not in (torch.float32, torch.float64) or stages(stack.module) is None:
        return False
    kind = np.dtype(str(dtype).removeprefix("torch."))
    # A mapped file of another dtype or order would have to be read whole to be converted.
    mapped = [data.x for data in stack.data if isinstance(data.x, np.memmap)]
    return all(x.dtype == kind and x.flags.c_contiguous for x in mapped)


def run(
    stacks: Sequence[Stack], until: int, record: Record, parts: list[Stack], stop: threading.Event
) -> None:
    """Train stacks up to an epoch on all cores and put them into ``parts``.

    An interruption waits for the slices of time in flight; networks may then have reached
    different epochs, and the stacks they come in are cut accordingly.
    """
    converted: dict[Hashable, Sets] = {}
    jobs = [job for stack in stacks for job in _jobs(stack, until, converted)]
    pool = ThreadPoolExecutor(cores())
    running: dict[Future[Any], tuple[_Job, Rows]] = {}
    try:
        for job in jobs:
            running |= {pool.submit(job.train, rows): (job, rows) for rows in job.blocks}
        while running:
            done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in done:
                job, rows = running.pop(future)
                record(*future.result())
                if job.epochs[rows[0]] < until:
                    running[pool.submit(job.train, rows)] = job, rows
            if stop.is_set():
                raise KeyboardInterrupt
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        parts[:] = [part for job in jobs for part in job.parts()]
        for future in running:
            if not future.cancelled() and future.exception() is None:
                record(*future.result())


def _jobs(stack: Stack, until: int, converted: dict[Hashable, Sets]) -> Iterator[_Job]:
    """Lay a stack out for the kernel; if its masks move, every block of networks by itself."""
    if isinstance(stack.arm, Dynamic):
        for rows in _blocks(stack):
            yield _MovingJob(stack.select(torch.from_numpy(rows)), until, converted)
    else:
        yield _Job(stack, until, converted)


def _blocks(stack: Stack) -> Iterator[Rows]:
    """Cut the networks into blocks that one thread trains: of one data set, several each."""
    which, most = stack.which.numpy(), max(1, min(64, len(stack) // 8))
    for data in range(len(stack.data)):
        rows = np.flatnonzero(which == data)
        for begin in range(0, len(rows), most):
            yield rows[begin : begin + most]


class _Job:
    """A stack laid out for the kernel."""

    def __init__(self, stack: Stack, until: int, converted: dict[Hashable, Sets]) -> None:
        from fissile.bank.cpu.kernel import Hyper
        from fissile.bank.cpu.layout import Architecture, Wiring

        self.stack, self.until, self.blocks = stack, until, list(_blocks(stack))
        self.converted = converted  # the data as the kernel reads it, for all stacks
        linears, behind = linear_layers(stack.module), stages(stack.module) or []
        self.architecture = Architecture(
            sizes=np.array([linears[0].in_features, *[layer.out_features for layer in linears]]),
            relu=np.array([stage.relu for stage in behind]),
            biased=np.array([layer.bias is not None for layer in linears]),
            first=first_index(stack.module),
            norm=np.array([0.0 if stage.norm is None else stage.norm.eps for stage in behind]),
        )
        layers = read(stack)
        self.wiring = Wiring.of([self._held(layer) for layer in layers])
        self._pack(layers)
        self.seeds = stack.seeds.numpy()
        self.hyper = Hyper(*(stack.hyper[name].double().numpy() for name in HYPER))
        self.epochs = np.full(len(stack), stack.epoch)
        self.sets = [self._convert(data) for data in stack.data]
        self.seconds = _SLICE

    def _held(self, layer: WideLayer) -> npt.NDArray[np.bool_]:
        """Mark the weights that the kernel is to hold."""
        return _mask(layer)

    def _pack(self, layers: list[WideLayer]) -> None:
        """Write the values, then Adam's two moments, out as flat rows."""

        def all_of(name: str, which: int) -> list[Any]:
            return [layer.states[name][which] if name in layer.states else None for layer in layers]

        names = "weight", *self.architecture.vectors
        self.state = tuple(
            self.wiring.pack(*[all_of(name, which) for name in names]) for which in range(3)
        )
        stack = self.stack
        self.steps = stack.adam.state[next(stack.module.parameters())]["step"].long().numpy()

    def _convert(self, data: Data) -> Sets:
        from fissile.bank.cpu.layout import Samples

        dtype = self.state[0].dtype
        key = (*data.key(), str(dtype))
        if key not in self.converted:
            train = Samples.of(np.asarray(data.x, dtype), data.y)
            self.converted[key] = train, Samples.of(np.asarray(data.x_test, dtype), data.y_test)
        return self.converted[key]

    def train(self, rows: Rows) -> tuple[list[int], list[list[float]], list[list[float]], int]:
        """Train some networks for a slice of time; return what is to be recorded.

        The curves of a network are NaN from the epoch on that it does not finish.
        """
        from fissile.bank.cpu.kernel import train_networks

        stack, alive = self.stack, self.stack.alive.numpy()
        sets, start = self.sets[int(stack.which[int(rows[0])])], int(self.epochs[rows[0]])
        afford = int(_SLICE / (self.seconds * len(rows)))
        epochs = range(start, start + max(1, min(afford, self.until - start)))
        begin, going = time.perf_counter(), rows[alive[rows]]
        count = -(-len(sets[0].x) // stack.batch)  # steps of an epoch
        accuracy, loss = np.full((2, len(rows), len(epochs)), np.nan)
        if len(going):
            trained = train_networks(
                self.architecture, self.wiring, self.state, self.steps, going, self.seeds,
                epochs, *sets, self.hyper, stack.batch, self._masks(going, count * len(epochs)),
            )  # fmt: skip
            for layer in linear_layers(stack.module):
                if isinstance(layer, DropConnectLinear):
                    layer.stream[going, 1] += torch.from_numpy(trained.epochs * count)
            accuracy[alive[rows]], loss[alive[rows]] = trained.accuracy, trained.loss
            alive[going] = trained.epochs == len(epochs)
        self.epochs[rows] = epochs.stop
        if alive[rows].all():  # what it takes one network, it takes the others too
            self.seconds = (time.perf_counter() - begin) / len(epochs) / len(rows)
        steps = count * len(epochs) * len(rows)
        return stack.members[rows].tolist(), accuracy.tolist(), loss.tolist(), steps

    def _masks(self, rows: Rows, steps: int) -> Masks | None:
        """Return what some networks' next masks are drawn from, if they are drawn at all."""
        from fissile.bank.cpu.layout import Masks

        layers = linear_layers(self.stack.module)
        if not any(isinstance(layer, DropConnectLinear) for layer in layers):
            return None
        networks, numbers = len(self.stack), torch.arange(steps)
        degree, keys, share = list[Tensor](), list[Tensor](), list[Tensor]()
        for layer in layers:
            if isinstance(layer, DropConnectLinear):
                seed, passes = layer.stream[rows].unsqueeze(-1).unbind(1)
                degree.append(layer.degree)
                keys.append(hash32(hash32(seed, passes + numbers)))
                share.append(layer.share())
            else:
                degree.append(torch.full((networks, layer.out_features), -1))
                keys.append(torch.zeros(len(rows), steps, dtype=torch.long))
                share.append(torch.ones(networks))
        return Masks.of(
            self.state[0].dtype,
            degree=torch.cat(degree, 1).long().numpy(),
            keys=torch.stack(keys, 1).numpy().astype(np.uint32),
            share=torch.stack([part.double() for part in share], 1).numpy(),
        )

    def parts(self) -> Iterator[Stack]:
        """Write everything back and yield the stack, cut where networks stopped at other epochs."""
        self._write()
        for epoch in np.unique(self.epochs).tolist():
            rows = torch.from_numpy(np.flatnonzero(self.epochs == epoch))
            part = self.stack if len(rows) == len(self.stack) else self.stack.select(rows)
            part.epoch = epoch
            yield part

    def _write(self) -> None:
        """Write everything back into the stack."""
        names = "weight", *self.architecture.vectors
        layers: list[WideLayer] = []
        states = [zip(*self.wiring.unpack(state), strict=True) for state in self.state]
        for layer in zip(*states, strict=True):
            values = [list(map(torch.from_numpy, state)) for state in zip(*layer, strict=True)]
            layers.append(WideLayer(dict(zip(names, values, strict=True))))
        write(self.stack, layers)
        for state in self.stack.adam.state.values():
            state["step"].copy_(torch.from_numpy(self.steps))


class _MovingJob(_Job):
    """Networks whose masks move: the kernel stops where they do."""

    def __init__(self, stack: Stack, until: int, converted: dict[Hashable, Sets]) -> None:
        super().__init__(stack, until, converted)
        arm = stack.arm
        assert isinstance(arm, Dynamic)
        self.blocks = [np.arange(len(stack))]
        self.rewire = Rewire(
            stack.module, stack.adam,
            every=arm.every, fraction=arm.fraction, grow=arm.grow, seed=stack.seeds,
        )  # fmt: skip

    def _held(self, layer: WideLayer) -> npt.NDArray[np.bool_]:
        """Mark all weights: any may grow."""
        return np.ones(layer.states["weight"][0].shape, np.bool_)

    def train(self, rows: Rows) -> tuple[list[int], list[list[float]], list[list[float]], int]:
        """Train all networks for an epoch; return what is to be recorded."""
        stack, before = self.stack, self.stack.steps
        accuracy, loss = stack.try_epoch(self._epoch)
        self.epochs[:] = stack.epoch
        steps = (stack.steps - before) * len(stack)
        return stack.members.tolist(), accuracy[:, None].tolist(), loss[:, None].tolist(), steps

    def _epoch(self) -> tuple[Tensor, Tensor]:
        """Train an epoch and return accuracies and losses, NaN where a network diverges."""
        from fissile.bank.cpu.kernel import train_networks

        stack, every, sets = self.stack, self.rewire.every, self.sets[int(self.stack.which[0])]
        samples, rows, begin = len(sets[0].x), np.flatnonzero(stack.alive.numpy()), 0
        accuracy, loss = np.full(len(stack), np.nan), np.zeros(len(stack))
        while begin < samples:
            self._pack(layers := read(stack))
            masks = self._present(layers)
            steps = every - stack.steps % every
            end = min(samples, begin + steps * stack.batch)
            trained = train_networks(
                self.architecture, self.wiring, self.state, self.steps, rows, self.seeds,
                range(stack.epoch, stack.epoch + 1), *sets, self.hyper, stack.batch,
                masks, (begin, end),
            )  # fmt: skip
            accuracy[rows] = trained.accuracy[:, 0]
            loss[rows] += trained.loss[:, 0]
            rows = rows[trained.epochs == 1]
            self._write()
            stack.steps += -(-(end - begin) // stack.batch)
            if stack.steps % every == 0:
                self._rewire(masks)
            begin = end
        return torch.from_numpy(accuracy), torch.from_numpy(loss)

    def _present(self, layers: list[WideLayer]) -> Masks:
        """Return which weights there are, and room for the gradient that growth may ask for."""
        from fissile.bank.cpu.layout import Masks

        present = np.concatenate([_mask(layer).reshape(len(self.stack), -1) for layer in layers], 1)
        grown = {"gradient": np.zeros_like(self.state[0])} if self.rewire.grow == "gradient" else {}
        return Masks.of(self.state[0].dtype, present=present, **grown)

    def _rewire(self, masks: Masks) -> None:
        """Move the masks, as told the gradient of the last step."""
        stack = self.stack
        if masks.gradient.size:
            gradients = self.wiring.unpack(masks.gradient)[0]
            for layer, gradient in zip(linear_layers(stack.module), gradients, strict=True):
                if isinstance(layer, MaskedLinear) and layer.observer is not None:
                    layer.observer(torch.from_numpy(gradient))
        self.rewire.steps = stack.steps - 1
        self.rewire.step()

    def parts(self) -> Iterator[Stack]:
        """Yield the stack, which every epoch leaves as it is to be."""
        yield self.stack


def _mask(layer: WideLayer) -> npt.NDArray[np.bool_]:
    if layer.mask is None:
        return np.ones(layer.states["weight"][0].shape, np.bool_)
    return layer.mask.numpy()
