"""The bank on a processor: one compiled call trains small MLPs for many epochs.

A call holds no lock, so a pool of threads trains thousands of networks side by side, and none
depends on the others. It agrees with :func:`fissile.bank.loop.fit`: the same order of samples,
loss, penalties and Adam.

* A removed weight does not exist: a ``Wiring`` lists the inputs each neuron has, so that an
  expanded network costs no more than the dense one.
* A batch is turned on its side, features by samples: each weight then meets a whole row of samples,
  in registers. Batches of any size go through in tiles of ``LANES`` samples.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
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

__all__ = ["can", "run"]

SampleSets = dict[Hashable, "tuple[Samples, Samples]"]
_converting = threading.Lock()

#: Seconds of work between two looks at whether to stop.
_SLICE = 0.2


def can(stack: Stack) -> bool:
    """Return whether the compiled kernel can train a stack: ReLU networks with fixed patterns."""
    if importlib.util.find_spec("numba") is None or not isinstance(stack.arm, Dense | Expand):
        return False
    dtype = next(stack.module.parameters()).dtype
    if dtype not in (torch.float32, torch.float64) or stages(stack.module) is None:
        return False
    kind = np.dtype(str(dtype).removeprefix("torch."))
    # A mapped file of another dtype or order would have to be read whole to be converted.
    mapped = [data.x for data in stack.data if isinstance(data.x, np.memmap)]
    return all(x.dtype == kind and x.flags.c_contiguous for x in mapped)


def run(
    stacks: Sequence[Stack],
    until: int,
    record: Record,
    parts: list[Stack],
    stop: threading.Event,
) -> None:
    """Train stacks up to an epoch on all cores and put them into ``parts``.

    An interruption waits for the slices of time in flight; networks may then have reached
    different epochs, and the stacks they come in are cut accordingly.
    """
    samples: SampleSets = {}
    jobs = [_Job(stack, until, samples) for stack in stacks]
    news, halt = _News(), threading.Event()
    pool = ThreadPoolExecutor(cores())
    try:
        futures = [
            pool.submit(job.train, rows, halt, news) for job in jobs for rows in job.blocks()
        ]
        _follow(futures, news, record, stop)
    finally:
        halt.set()
        pool.shutdown(wait=True, cancel_futures=True)
        parts[:] = [part for job in jobs for part in job.parts()]
        news.deliver(record)


def _follow(
    futures: Sequence[Future[None]], news: _News, record: Record, stop: threading.Event
) -> None:
    """Pass on what the threads report until all are done; an error in one ends it."""
    left = set(futures)
    while left:
        done, left = wait(left, timeout=0.1)
        news.deliver(record)
        for future in done:
            future.result()
        if stop.is_set():
            raise KeyboardInterrupt


class _News(queue.SimpleQueue[tuple[list[int], Any, Any, int]]):
    """What the threads have finished; only the main thread passes it on."""

    def deliver(self, record: Record) -> None:
        while not self.empty():
            record(*self.get())


@dataclass
class _Job:
    """A stack laid out for the kernel."""

    stack: Stack
    until: int
    shared: SampleSets  # converted once for all stacks

    def __post_init__(self) -> None:
        from fissile.bank.cpu.kernel import Hyper
        from fissile.bank.cpu.layout import Architecture, Wiring

        module = self.stack.module
        layers, linears = read(self.stack), linear_layers(module)
        behind = stages(module) or []
        norm = tuple(0.0 if stage.norm is None else stage.norm.eps for stage in behind)
        self.architecture = Architecture(
            sizes=(linears[0].in_features, *(layer.out_features for layer in linears)),
            relu=tuple(stage.relu for stage in behind),
            biased=tuple(layer.bias is not None for layer in linears),
            first=first_index(module),
            norm=norm if any(norm) else (),
        )
        self.wiring = Wiring.of([_mask(layer) for layer in layers])
        # The values, then Adam's two moments.
        self.state = [self._packed(layers, which) for which in range(3)]
        adam = self.stack.adam.state[next(module.parameters())]
        self.steps = adam["step"].long().numpy()
        self.seeds = self.stack.seeds.numpy()
        self.hyper = Hyper(*(self.stack.hyper[name].double().numpy() for name in HYPER))
        self.epochs = np.full(len(self.stack), self.stack.epoch)
        self.seconds = _SLICE

    def _packed(self, layers: list[WideLayer], which: int) -> npt.NDArray[Any]:
        """Write the values, or one of the moments, out as flat rows."""
        flat = self.wiring.pack(
            [layer.states["weight"][which] for layer in layers],
            [layer.states["bias"][which] if "bias" in layer.states else None for layer in layers],
        )
        if not self.architecture.norm:
            return flat
        front = np.zeros((2, len(flat), self.architecture.rows), flat.dtype)
        for rows, layer in zip(self._rows(), layers, strict=True):
            for part, name in zip(front, ("scale", "shift"), strict=True):
                if name in layer.states:
                    part[:, rows] = layer.states[name][which].numpy()
        return np.concatenate([*front, flat], 1)

    def _rows(self) -> Iterator[slice]:
        """Yield which neurons each layer has."""
        end = 0
        for size in self.architecture.sizes[1:]:
            yield slice(end, end + size)
            end += size

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Cut the networks into blocks that one thread trains: of one data set, several each."""
        which, most = self.stack.which.numpy(), max(1, min(64, len(self.stack) // 8))
        for data in range(len(self.stack.data)):
            rows = np.flatnonzero(which == data)
            for begin in range(0, len(rows), most):
                yield rows[begin : begin + most]

    def train(self, rows: npt.NDArray[np.int64], stop: threading.Event, news: _News) -> None:
        """Train some networks to the end, a slice of time at a time."""
        stack = self.stack
        sets = self.samples(stack.data[int(stack.which[int(rows[0])])])
        steps = -(-len(sets[0].x) // stack.batch)
        while self.epochs[rows[0]] < self.until and not stop.is_set():
            start = int(self.epochs[rows[0]])
            afford = int(_SLICE / (self.seconds * len(rows)))
            epochs = range(start, start + max(1, min(afford, self.until - start)))
            begin = time.perf_counter()
            curves = self._slice(rows, epochs, sets)
            self.epochs[rows] = epochs.stop
            news.put((stack.members[rows].tolist(), *curves, steps * len(epochs) * len(rows)))
            if stack.alive[rows].all():  # what it takes one network, it takes the others too
                self.seconds = (time.perf_counter() - begin) / len(epochs) / len(rows)

    def _slice(
        self, rows: npt.NDArray[np.int64], epochs: range, sets: tuple[Samples, Samples]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Train some epochs; what a network that diverges does not finish is NaN."""
        from fissile.bank.cpu.kernel import train_networks

        alive = self.stack.alive.numpy()
        going = rows[alive[rows]]
        accuracy, loss = np.full((2, len(rows), len(epochs)), np.nan)
        if len(going):
            trained = train_networks(
                self.architecture, self.wiring, self.state, self.steps, going, self.seeds,
                epochs, *sets, self.hyper, self.stack.batch,
            )  # fmt: skip
            accuracy[alive[rows]], loss[alive[rows]] = trained.accuracy, trained.loss
            alive[going] = trained.epochs == len(epochs)
        return accuracy.tolist(), loss.tolist()

    def samples(self, data: Data) -> tuple[Samples, Samples]:
        """Return a data set as the kernel reads it, converted once for all networks."""
        from fissile.bank.cpu.layout import Samples

        dtype = self.state[0].dtype
        key = (*data.key(), str(dtype))
        with _converting:  # one thread converts, the others wait for it
            if key not in self.shared:
                self.shared[key] = (
                    Samples.of(np.asarray(data.x, dtype), data.y),
                    Samples.of(np.asarray(data.x_test, dtype), data.y_test),
                )
        return self.shared[key]

    def parts(self) -> Iterator[Stack]:
        """Write everything back and yield the stack, cut where networks stopped at other epochs."""
        front, neurons = self.architecture.front, self.architecture.rows
        unpacked = [self.wiring.unpack(state[:, front:]) for state in self.state]
        layers = []
        for i, own in enumerate(self._rows()):
            arrays = {
                "weight": [weights[i] for weights, _ in unpacked],
                "bias": [biases[i] for _, biases in unpacked],
                "scale": [state[:, own] for state in self.state],
                "shift": [state[:, neurons:][:, own] for state in self.state],
            }
            states = {name: list(map(torch.from_numpy, values)) for name, values in arrays.items()}
            layers.append(WideLayer(states))
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
