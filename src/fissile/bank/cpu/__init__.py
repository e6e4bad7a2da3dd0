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

from fissile._common.cores import cores
from fissile.bank.spec import Data, Dense, Expand
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

if TYPE_CHECKING:
    from fissile.bank.cpu.layout import Samples
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
    """Return whether the compiled kernel can train a stack: ReLU networks with fixed patterns."""
    if not compiles() or not isinstance(stack.arm, Dense | Expand):
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
    jobs = [_Job(stack, until, converted) for stack in stacks]
    pool = ThreadPoolExecutor(cores())
    running: dict[Future[Any], tuple[_Job, Rows]] = {}
    try:
        for job in jobs:
            running |= {pool.submit(job.train, rows): (job, rows) for rows in job.blocks()}
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


class _Job:
    """A stack laid out for the kernel."""

    def __init__(self, stack: Stack, until: int, converted: dict[Hashable, Sets]) -> None:
        from fissile.bank.cpu.kernel import Hyper
        from fissile.bank.cpu.layout import Architecture, Wiring

        self.stack, self.until = stack, until
        self.converted = converted  # the data as the kernel reads it, for all stacks
        layers = read(stack)
        linears, behind = linear_layers(stack.module), stages(stack.module) or []
        self.architecture = Architecture(
            sizes=np.array([linears[0].in_features, *[layer.out_features for layer in linears]]),
            relu=np.array([stage.relu for stage in behind]),
            biased=np.array([layer.bias is not None for layer in linears]),
            first=first_index(stack.module),
            norm=np.array([0.0 if stage.norm is None else stage.norm.eps for stage in behind]),
        )
        self.wiring = Wiring.of([_mask(layer) for layer in layers])
        # The values, then Adam's two moments.
        self.state = tuple(self._packed(layers, which) for which in range(3))
        self.steps = stack.adam.state[next(stack.module.parameters())]["step"].long().numpy()
        self.seeds = stack.seeds.numpy()
        self.hyper = Hyper(*(stack.hyper[name].double().numpy() for name in HYPER))
        self.epochs = np.full(len(stack), stack.epoch)
        self.sets = [self._convert(data) for data in stack.data]
        self.seconds = _SLICE

    def _packed(self, layers: list[WideLayer], which: int) -> npt.NDArray[Any]:
        """Write the values, or one of the moments, out as flat rows."""

        def all_of(name: str) -> list[Any]:
            return [layer.states[name][which] if name in layer.states else None for layer in layers]

        return self.wiring.pack(all_of("weight"), *map(all_of, self.architecture.vectors))

    def _convert(self, data: Data) -> Sets:
        from fissile.bank.cpu.layout import Samples

        dtype = self.state[0].dtype
        key = (*data.key(), str(dtype))
        if key not in self.converted:
            train = Samples.of(np.asarray(data.x, dtype), data.y)
            self.converted[key] = train, Samples.of(np.asarray(data.x_test, dtype), data.y_test)
        return self.converted[key]

    def blocks(self) -> Iterator[Rows]:
        """Cut the networks into blocks that one thread trains: of one data set, several each."""
        which, most = self.stack.which.numpy(), max(1, min(64, len(self.stack) // 8))
        for data in range(len(self.stack.data)):
            rows = np.flatnonzero(which == data)
            for begin in range(0, len(rows), most):
                yield rows[begin : begin + most]

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
        accuracy, loss = np.full((2, len(rows), len(epochs)), np.nan)
        if len(going):
            trained = train_networks(
                self.architecture, self.wiring, self.state, self.steps, going, self.seeds,
                epochs, *sets, self.hyper, stack.batch,
            )  # fmt: skip
            accuracy[alive[rows]], loss[alive[rows]] = trained.accuracy, trained.loss
            alive[going] = trained.epochs == len(epochs)
        self.epochs[rows] = epochs.stop
        if alive[rows].all():  # what it takes one network, it takes the others too
            self.seconds = (time.perf_counter() - begin) / len(epochs) / len(rows)
        steps = -(-len(sets[0].x) // stack.batch) * len(epochs) * len(rows)
        return stack.members[rows].tolist(), accuracy.tolist(), loss.tolist(), steps

    def parts(self) -> Iterator[Stack]:
        """Write everything back and yield the stack, cut where networks stopped at other epochs."""
        names = "weight", *self.architecture.vectors
        layers: list[WideLayer] = []
        states = [zip(*self.wiring.unpack(state), strict=True) for state in self.state]
        for layer in zip(*states, strict=True):
            values = [list(map(torch.from_numpy, state)) for state in zip(*layer, strict=True)]
            layers.append(WideLayer(dict(zip(names, values, strict=True))))
        write(self.stack, layers)
        for state in self.stack.adam.state.values():
            state["step"].copy_(torch.from_numpy(self.steps))
        for epoch in np.unique(self.epochs).tolist():
            rows = torch.from_numpy(np.flatnonzero(self.epochs == epoch))
            part = self.stack if len(rows) == len(self.stack) else self.stack.select(rows)
            part.epoch = epoch
            yield part


def _mask(layer: WideLayer) -> npt.NDArray[np.bool_]:
    weight = layer.states["weight"][0]
    mask = torch.ones_like(weight, dtype=torch.bool) if layer.mask is None else layer.mask
    return mask.numpy()
