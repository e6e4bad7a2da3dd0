"""The engines of a bank: choosing one for each stack, smaller stacks when memory runs out, PyTorch.

The PyTorch engine trains any architecture and any arm on any device: the fast engines
(``fissile.bank.cpu``, ``fissile.bank.gpu``) fall back to it and are tested against it.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile._common.errors import FissileError
from fissile._common.random import order
from fissile._common.shapes import Float, Int
from fissile.bank import cpu, gpu
from fissile.bank.spec import Dynamic
from fissile.bank.stack import HYPER, Stack
from fissile.bank.step import Replay, foreach_adam, guess, network_losses, per_network
from fissile.expansion.rewire import Rewire
from fissile.layers import SparseLinear, all_weights
from fissile.layers.mlp import chain, first_hidden

_log = logging.getLogger("fissile")

#: Numbers held at once when a test set is evaluated, and positions when an order is drawn.
_CHUNK = 1 << 24
#: Told a stack and its networks' accuracy and loss, (networks, epochs), after some epochs.
OnEpochs = Callable[[Stack, Tensor, Tensor], object]
#: Takes some networks' accuracies and losses over the epochs they have just finished, a row for
#: each network, and how many steps that took them all together.
Record = Callable[[Sequence[int], Sequence[Sequence[float]], Sequence[Sequence[float]], int], None]


@contextmanager
def deferred_sigint() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event while the block runs, however often it is pressed."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are the main thread's alone
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    stacks: list[Stack], until: int, device: torch.device, engine: str, record: Record,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Train all stacks up to an epoch, in place; the list may hold smaller stacks afterwards."""

    def on_epochs(stack: Stack, accuracy: Tensor, loss: Tensor) -> None:
        steps = -(-len(stack.data[0].x) // stack.batch) * len(stack) * accuracy.shape[1]
        record(stack.members.tolist(), accuracy.tolist(), loss.tolist(), steps)

    fast = [stack for stack in stacks if engine == "auto" and stack.epoch < until]
    if device.type == "cpu":
        _run_pool(stacks, [stack for stack in fast if cpu.can(stack)], until, record, stop)
    fast = [stack for stack in fast if device.type == "cuda" and gpu.can(stack)]
    jobs = [(gpu.run, group) for group in gpu.together(fast)]
    rest = _without(stacks, fast)
    jobs += [(run_torch, [stack]) for stack in rest if stack.epoch < until]
    while jobs:
        (train, group), failed = jobs.pop(0), ""
        try:
            train(group, until, on_epochs, device, stop)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            failed = (str(error) or type(error).__name__).splitlines()[0]
            _log.warning("out of memory, going on in smaller parts (%s)", failed)
        if failed:
            # Outside the except block, whose traceback would keep all that was allocated.
            smaller = _halves(group[0], failed) if len(group) == 1 else group
            stacks[:] = _without(stacks, group) + smaller
            jobs = [(train, [stack]) for stack in smaller if stack.epoch < until] + jobs


def _run_pool(
    stacks: list[Stack], fast: list[Stack], until: int, record: Record, stop: threading.Event
) -> None:
    """Train stacks with the compiled kernel; what memory does not suffice for is left undone."""
    parts = list(fast)
    try:
        if fast:
            cpu.run(fast, until, record, parts, stop)
    except MemoryError as error:
        _log.warning("out of memory, going on in smaller parts (%s)", error)
    finally:
        stacks[:] = _without(stacks, fast) + parts


def _without(stacks: list[Stack], gone: list[Stack]) -> list[Stack]:
    return [stack for stack in stacks if all(stack is not other for other in gone)]


def _is_out_of_memory(error: BaseException) -> bool:
    said = any(text in str(error) for text in ("not enough memory", "can't allocate memory"))
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _halves(stack: Stack, error: str) -> list[Stack]:
    """Cut a stack in two and free the memory it had."""
    stack.to(torch.device("cpu"))
    if len(stack) == 1:
        raise FissileError(
            "not even one network of this bank fits into memory: use a smaller batch or network, "
            f"or a device with more ({error})"
        )
    middle = len(stack) // 2
    _log.warning(
        "out of memory with %d networks at once: going on with %d and %d",
        len(stack), middle, len(stack) - middle,
    )  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used
    return [stack.select(range(middle)), stack.select(range(middle, len(stack)))]


# --- batched PyTorch


def run_torch(
    stacks: Sequence[Stack], until: int, on_epochs: OnEpochs, device: torch.device,
    stop: threading.Event | None = None,
) -> None:  # fmt: skip
    """Train stacks up to an epoch in batched PyTorch; after each, report accuracy and loss."""
    for stack in stacks:
        engine = _TorchEngine(stack, device)
        while stack.epoch < until:
            accuracy, loss = stack.try_epoch(partial(engine.epoch, stop))
            on_epochs(stack, accuracy.unsqueeze(-1), loss.unsqueeze(-1))


def _forward(
    module: nn.Module, x: Float[Tensor, "*#networks samples inputs"]
) -> Float[Tensor, "networks samples outputs"]:
    """Return the logits of every network of a stacked module."""
    for layer in (link.module for link in chain(module)):
        if isinstance(layer, nn.Linear | SparseLinear):
            weight = layer.pass_weight() if isinstance(layer, SparseLinear) else layer.weight
            x = x @ weight.mT
            if layer.bias is not None:
                x = x + layer.bias.unsqueeze(-2)
        elif isinstance(layer, nn.LayerNorm):
            x = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            x = x * layer.weight.unsqueeze(-2) + layer.bias.unsqueeze(-2)
        else:
            x = layer(x)
    return x


@dataclass(frozen=True)
class _Sets:
    """The data sets of a stack, one below the other, on the device; or one that is streamed."""

    x: Tensor | np.ndarray  # (sets * samples, inputs)
    y: Tensor  # (sets * samples,)
    begin: Tensor  # (networks, 1): where the samples of each network begin
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, stack: Stack, x: str, y: str, device: torch.device) -> _Sets:
        """Return one part of a stack's data on the device, by the names of its arrays."""
        dtype = next(stack.module.parameters()).dtype
        arrays = [getattr(data, x) for data in stack.data]
        labels = torch.cat([getattr(data, y) for data in stack.data]).to(device)
        begin = (stack.which * len(arrays[0])).unsqueeze(-1).to(device)
        if len(arrays) == 1 and isinstance(arrays[0], np.ndarray):
            return cls(arrays[0], labels, begin, device, dtype)
        held = [torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for x in arrays]
        return cls(torch.cat(held).to(device, dtype), labels, begin, device, dtype)

    def batch(self, rows: Int[Tensor, "networks batch"]) -> tuple[Tensor, Tensor]:
        """Gather a batch for every network."""
        if isinstance(self.x, np.ndarray):  # only the rows that are needed are read
            x = torch.from_numpy(np.ascontiguousarray(self.x[rows.cpu().numpy()])).to(self.device)
            return x.to(self.dtype), self.y[rows]
        places = (rows + self.begin).flatten()  # whole rows are copied faster than entries
        x = self.x.index_select(0, places).view(*rows.shape, -1)
        return x, self.y.index_select(0, places).view(rows.shape)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return a range of samples for every network, once if all share them."""
        if isinstance(self.x, np.ndarray):
            part = torch.from_numpy(np.array(self.x[start:stop]))
            return part.to(self.device, self.dtype), self.y[start:stop]
        if not self.begin.any():
            return self.x[start:stop], self.y[start:stop]
        return self.batch(torch.arange(start, stop, device=self.device).expand(len(self.begin), -1))


class _TorchEngine:
    """One stack at work on one device."""

    def __init__(self, stack: Stack, device: torch.device) -> None:
        self.stack, self.device = stack, device
        stack.to(device)
        self.train = _Sets.of(stack, "x", "y", device)
        self.test = _Sets.of(stack, "x_test", "y_test", device)
        self.seeds = stack.seeds.to(device)
        self.lr, self.l1, self.l2, self.orthogonal = (
            stack.hyper[name].to(device) for name in HYPER
        )
        self.parameters: list[Tensor] = list(stack.module.parameters())
        weight = first_hidden(stack.module).get_parameter("weight")
        self.first = [p is weight for p in self.parameters].index(True)
        self.penalised = bool((self.orthogonal != 0).any())
        self.rewire = None
        if isinstance(arm := stack.arm, Dynamic):
            self.rewire = Rewire(
                stack.module, stack.adam,
                every=arm.every, fraction=arm.fraction, grow=arm.grow, seed=self.seeds,
            )  # fmt: skip
            self.rewire.steps = stack.steps
        self.rows = torch.zeros(len(stack), stack.batch, dtype=torch.long, device=device)
        self.replay = Replay(lambda: self._step(self.rows), eager=3)

    def epoch(self, stop: threading.Event | None) -> tuple[Tensor, Tensor]:
        """Train one epoch; return every network's test accuracy and its mean training loss."""
        stack, samples = self.stack, len(self.stack.data[0].x)
        stack.module.train()
        loss = torch.zeros(len(stack), device=self.device, dtype=self.lr.dtype)
        for rows in self._batches(samples):
            loss += self._replayed(rows) * rows.shape[1] / samples
            stack.steps += 1
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
        return self.accuracy(), loss.cpu().double()

    def _replayed(self, rows: Int[Tensor, "networks batch"]) -> Float[Tensor, " networks"]:
        """Make a step: on a GPU as a CUDA graph, where it can be recorded."""
        whole = rows.shape[1] == self.stack.batch
        streamed = isinstance(self.train.x, np.ndarray)  # reading a file cannot be recorded
        if self.device.type != "cuda" or self.rewire is not None or streamed or not whole:
            return self._step(rows)
        self.rows.copy_(rows)
        return self.replay()

    def _batches(self, samples: int) -> Iterator[Int[Tensor, "networks batch"]]:
        """Draw the epoch's order in parts, so that no order is ever held whole for all."""
        stack = self.stack
        part = max(1, _CHUNK // (len(stack) * stack.batch)) * stack.batch
        for start in range(0, samples, part):
            stop = min(start + part, samples)
            yield from order(self.seeds, stack.epoch, samples, start, stop).split(stack.batch, 1)

    def _step(self, rows: Int[Tensor, "networks batch"]) -> Float[Tensor, " networks"]:
        x, y = self.train.batch(rows)
        loss = network_losses(_forward(self.stack.module, x), y)
        gradients = torch.autograd.grad((loss + self._orthogonality()).sum(), self.parameters)
        self._adam(list(gradients))
        if self.rewire is not None:
            self.rewire.step()
        return loss.detach()

    def _orthogonality(self) -> Float[Tensor, " networks"]:
        """Return the penalty on W1 W1ᵀ; those on single weights go straight to the gradient."""
        if not self.penalised:
            return self.orthogonal
        first = all_weights(first_hidden(self.stack.module))
        identity = torch.eye(first.shape[-2], dtype=first.dtype, device=first.device)
        return self.orthogonal * (first @ first.mT - identity).square().sum((-2, -1))

    @torch.no_grad()
    def _adam(self, gradients: list[Tensor]) -> None:
        """Add the penalties on single weights to the gradients and make a step of Adam."""
        decay = torch._foreach_mul(self.parameters, per_network(2 * self.l2, self.parameters))
        torch._foreach_add_(gradients, decay)
        first = self.parameters[self.first]
        (strength,) = per_network(self.l1, [first])
        gradients[self.first].addcmul_(strength, first.sign())
        states = [self.stack.adam.state[parameter] for parameter in self.parameters]
        foreach_adam(self.parameters, gradients, states, self.lr)

    @torch.no_grad()
    def accuracy(self) -> Float[Tensor, " networks"]:
        """Return every network's accuracy on its test set."""
        stack, samples = self.stack, len(self.stack.data[0].x_test)
        stack.module.eval()
        widest = max(p.shape[-1] for p in stack.module.parameters())
        part = max(1, _CHUNK // (len(stack) * widest))
        correct = torch.zeros(len(stack), device=self.device, dtype=torch.long)
        for start in range(0, samples, part):
            x, y = self.test.slice(start, min(start + part, samples))
            correct += (guess(_forward(stack.module, x)) == y).sum(-1)
        return (correct.double() / samples).cpu()
