"""The bank on a GPU: a few programs train a network, step after step, without leaving the kernel.

A network here is ``z = W2 · relu(W1 x + b1) + b2``, trained as :func:`fissile.bank.loop.fit` does.
With a few thousand weights one program keeps all of it on chip (:func:`train`); larger ones, with
several outputs, lie in device memory and are walked through in blocks (:func:`walk`). The result is
the same alone and in company, to the bit where the launches have the same settings.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fissile._common.random import order_keys, order_shape
from fissile.bank.spec import Dense, Expand
from fissile.bank.stack import (
    HYPER,
    Stack,
    Stage,
    WideLayer,
    joined_data,
    linear_layers,
    read,
    stages,
    write,
)
from fissile.bank.step import BETA1, BETA2
from fissile.layers import DropConnectLinear, SparseLinear

if TYPE_CHECKING:
    from fissile.bank.engines import OnEpochs

#: The inner dimension of a matrix product in a kernel has at least this size.
_LEAST_INNER = 16
#: The narrowest hidden layer worth a tile of its own.
_LEAST_HIDDEN = 8
#: W1 and its two moments and gradient are four tiles of this many floats at most.
_MOST_WEIGHTS = 8192
_MOST_CLASSES = 128
#: Beyond, a batch no longer fits beside the weights, and the kernel lost its lead when tried.
_MOST_INPUTS = 256
#: Samples, inputs and hidden neurons of a block of :func:`walk`. Triton 3.6 compiles products of
#: more than 32 rows to wrong addresses where a program has 8 warps.
_TILE, _INPUTS, _HIDDEN = 32, 64, 32
#: Most programs of a network: beyond, they wait for each other longer than they save.
_MOST_PROGRAMS = 8
_MOST_OUTPUTS = 256
_MOST_BATCH = 128
#: Seconds of work in one launch: as long as Ctrl-C may have to wait.
_SLICE = 0.5


@dataclass(frozen=True)
class Networks:
    """A stack of networks with their optimizers; :func:`train` changes it in place.

    A weight whose mask is 0 does not exist: its gradient is dropped, it and its moments are 0.
    """

    w1: Tensor  # (networks, hidden, inputs), float32 like all that follow
    b1: Tensor  # (networks, hidden)
    w2: Tensor  # (networks, outputs, hidden)
    b2: Tensor  # (networks, outputs)
    m: tuple[Tensor, ...]  # Adam's first moments of w1, b1, w2, b2
    v: tuple[Tensor, ...]  # and the second
    step: Tensor  # (networks,), int64: how many steps Adam has made
    lr: Tensor  # (networks,)
    l1: Tensor  # (networks,), on W1
    l2: Tensor  # (networks,), on all parameters
    mask1: Tensor | None = None  # (networks, hidden, inputs), uint8
    mask2: Tensor | None = None  # (networks, outputs, hidden), uint8
    orthogonal: Tensor | None = None  # (networks,); None leaves the penalty out of the kernel


@dataclass(frozen=True)
class DataSets:
    """The data sets and which of them each network learns; inputs may be of other dtypes."""

    x: Tensor  # (sets, samples, inputs)
    y: Tensor  # (sets, samples), int32
    xt: Tensor  # (sets, tests, inputs)
    yt: Tensor  # (sets, tests), int32
    which: Tensor  # (networks,), int32


@dataclass(frozen=True)
class Curves:
    """What a launch returns; epochs that a network did not finish hold NaN and -1."""

    loss: Tensor  # (networks, epochs), float32: the mean task loss of the samples, no penalties
    correct: Tensor  # (networks, epochs), int32: test samples classified rightly after the epoch
    finished: Tensor  # (networks,), int32: epochs before the first that was not finite


def fits(hidden: int, inputs: int, outputs: int) -> bool:
    """Return whether a network of these sizes fits on chip."""
    h, d, c = padded(hidden, inputs, outputs)
    return d <= _MOST_INPUTS and h * max(d, c) <= _MOST_WEIGHTS and c <= _MOST_CLASSES


def train(
    networks: Networks, data: DataSets, keys: Tensor, *, batch: int = 64, chunk: int | None = None,
    num_warps: int | None = None,
) -> Curves:  # fmt: skip
    """Train every network of a stack for some epochs, in place, in one launch.

    A network whose loss or parameters stop being finite is left as it was after its last finished
    epoch. All tensors are contiguous and on one device; keys, of the order of samples, are int64,
    (networks, epochs, rounds, 2).

    A chunk of samples, a power of two from 16 on, is on chip at a time. With more than 32 samples
    ``num_warps`` is at most 4: Triton 3.6 compiles some others to wrong addresses.
    """
    from fissile.bank.gpu.kernels import train_kernel

    count, hidden, inputs = networks.w1.shape
    outputs, samples, epochs = networks.w2.shape[1], data.x.shape[1], keys.shape[1]
    curves = Curves(
        networks.w1.new_full((count, epochs), torch.nan),
        networks.w1.new_full((count, epochs), -1, dtype=torch.int32),
        networks.w1.new_empty(count, dtype=torch.int32),
    )
    # Powers of Adam's betas at the start of each epoch: the kernel multiplies on from there, in
    # float64, where 1 - 0.999 is exact; and epochs in one launch are those of several, bit by bit.
    before = -(-samples // batch) * torch.arange(epochs, device=networks.step.device)
    steps_so_far = (networks.step[:, None, None] + before[:, None]).double()
    betas = torch.tensor([BETA1, BETA2], dtype=torch.float64, device=steps_so_far.device)
    h, d, c = padded(hidden, inputs, outputs, networks.orthogonal is not None)
    default_chunk, default_warps = _suiting(count, h, d, c)
    chunk, num_warps = chunk or default_chunk, num_warps or default_warps
    bits, shift = order_shape(samples)
    optional = networks.mask1, networks.mask2, networks.orthogonal
    # What the kernel leaves out has a pointer all the same, which is never read.
    mask1, mask2, orthogonal = (networks.w1 if part is None else part for part in optional)
    with torch.cuda.device_of(networks.w1):  # Triton launches on the current device
        train_kernel[(count,)](
            networks.w1, networks.b1, networks.w2, networks.b2, *networks.m, *networks.v,
            mask1, mask2, networks.step, betas**steps_so_far, networks.lr, networks.l1, networks.l2,
            orthogonal, data.x, data.y, data.xt, data.yt, data.which, keys,
            curves.loss, curves.correct, curves.finished, epochs,
            N=samples, TESTS=data.xt.shape[1], BITS=bits, SHIFT=shift,
            D=inputs, H=hidden, C=outputs, B=batch, DP=d, HP=h, CP=c, CHUNK=chunk,
            MASK1=networks.mask1 is not None, MASK2=networks.mask2 is not None,
            ORTHOGONAL=networks.orthogonal is not None, PRECISION="tf32x3",
            num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return curves


def walk(
    networks: Networks, data: DataSets, keys: Tensor, *, batch: int = 64,
    programs: int | None = None, precision: str = "tf32x3", num_warps: int = 8,
    num_stages: int = 2,
) -> Curves:  # fmt: skip
    """Train as :func:`train` does, in one launch for every epoch, networks of several outputs.

    Inputs and hidden neurons fill whole blocks (:func:`blocks`). The programs of a network wait for
    each other, so all of a launch must find room on the GPU at once, unless ``programs`` is 1.
    """
    from fissile.bank.gpu.blocked import epoch_kernel, guess_kernel

    count, hidden, inputs = networks.w1.shape
    outputs, samples, epochs = networks.w2.shape[1], data.x.shape[1], keys.shape[1]
    tests, steps = data.xt.shape[1], -(-samples // batch)
    programs = programs or _programs(count, inputs, networks.w1.device)
    bits, shift = order_shape(samples)
    state = [networks.w1, networks.b1, networks.w2, networks.b2, *networks.m, *networks.v]
    masks = [networks.w1 if m is None else m for m in (networks.mask1, networks.mask2)]
    for mask, held in zip(masks, (state[::4], state[2::4]), strict=True):
        if mask is not networks.w1:
            for part in held:
                part.masked_fill_(mask == 0, 0)
    rows, classes = max(_LEAST_INNER, _power_of_two(batch)), padded(1, 1, outputs)[2]
    shape = {
        "D": inputs, "H": hidden, "C": outputs, "CP": classes, "DB": _INPUTS,
        "HB": min(_HIDDEN, hidden), "PRECISION": precision, "num_warps": num_warps,
        "num_stages": num_stages,
    }  # fmt: skip
    new, device = networks.w1.new_empty, networks.w1.device
    # What the programs of a network tell each other in a step.
    sums, values, da = new(count, programs, hidden, rows), *new(2, count, hidden, rows)
    dz = new(count, rows, classes)
    targets = torch.empty(count, programs, rows, dtype=torch.int32, device=device)
    losses, loss = new(count, epochs), new(count, programs)
    corrects = torch.empty(count, epochs, dtype=torch.int32, device=device)
    right = torch.empty(count, -(-tests // _TILE), dtype=torch.int32, device=device)
    betas = torch.tensor([BETA1, BETA2], dtype=torch.float64, device=device)
    alive = torch.ones(count, dtype=torch.bool, device=device)
    finished = torch.zeros_like(alive, dtype=torch.int32)
    together = {"launch_cooperative_grid": True} if programs > 1 else {}
    for epoch in range(epochs):
        before = [part.clone() for part in state]
        powers = betas ** (networks.step + epoch * steps).double().unsqueeze(-1)
        with torch.cuda.device_of(sums):
            epoch_kernel[(count, programs)](
                *state, *masks, powers, networks.lr, networks.l1, networks.l2, data.x, data.y,
                data.which, keys[:, epoch].contiguous(), sums, values, da, dz, targets,
                torch.zeros_like(finished), loss,
                N=samples, BITS=bits, SHIFT=shift, B=batch, ROWS=rows, PROGRAMS=programs,
                TILE=max(_LEAST_INNER, min(_TILE, rows // programs)),
                MASK1=networks.mask1 is not None, MASK2=networks.mask2 is not None,
                **shape, **together,
            )  # fmt: skip
            losses[:, epoch] = loss.sum(1)
            for part in (loss, *state[:4]):
                alive &= part.view(count, -1).isfinite().all(1)
            for now, then in zip(state, before, strict=True):
                now.copy_(torch.where(alive.view(-1, *[1] * (now.ndim - 1)), now, then))
            guess_kernel[(count, right.shape[1])](
                *state[:4], data.xt, data.yt, data.which, right, N=tests, ROWS=_TILE, **shape
            )
        finished += alive
        losses[:, epoch].masked_fill_(~alive, torch.nan)
        corrects[:, epoch] = right.sum(1).masked_fill(~alive, -1)
    networks.step.add_(finished * steps)
    return Curves(losses, corrects, finished)


def blocks(hidden: int, inputs: int) -> tuple[int, int]:
    """Return the sizes filled up to whole blocks, as :func:`walk` takes them."""
    wide = max(_LEAST_INNER, _power_of_two(hidden)) if hidden < _HIDDEN else _HIDDEN
    even = 2 * _INPUTS  # for two programs to share
    return -(-hidden // wide) * wide, -(-inputs // even) * even


def _programs(count: int, inputs: int, device: torch.device) -> int:
    """Return how many programs share a network, so that all of them fill the GPU once."""
    if device.type != "cuda":
        return 1  # Triton's interpreter runs them one after another
    room = torch.cuda.get_device_properties(device).multi_processor_count // count
    pieces = inputs // _INPUTS
    return max(n for n in range(1, _MOST_PROGRAMS + 1) if pieces % n == 0 and n <= max(1, room))


def padded(
    hidden: int, inputs: int, outputs: int, orthogonal: bool = False
) -> tuple[int, int, int]:
    """Return the sizes of the tiles: powers of two, large enough for each matrix product."""
    # With one output, and no penalty on W1 W1^T, no product runs over the hidden neurons.
    least = _LEAST_HIDDEN if outputs == 1 and not orthogonal else _LEAST_INNER
    return (
        max(least, _power_of_two(hidden)),
        max(_LEAST_INNER, _power_of_two(inputs)),
        1 if outputs == 1 else max(_LEAST_INNER, _power_of_two(outputs)),
    )


def _suiting(networks: int, h: int, d: int, c: int) -> tuple[int, int]:
    """Return the chunk and the warps that suit, after benchmarks/gpu_shapes.py on an H200."""
    # Few networks leave the chip idle: then more threads for each shorten its steps.
    weights = h * max(d, c)
    if weights <= 256:
        return (64, 4) if networks <= 264 else (32, 2) if networks <= 1056 else (32, 1)
    if weights <= 512:
        return (32, 4) if c > 1 else (32, 1)
    if weights <= 2048:
        return (32, 2) if h <= 32 and c == 1 else (32, 4)
    return (16, 4) if weights <= 4096 else (16, 8)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


# --- stacks of a bank, trained in common launches


def can(stack: Stack) -> bool:
    """Return whether a kernel can train a stack: it has one hidden ReLU layer."""
    if importlib.util.find_spec("triton") is None or not isinstance(stack.arm, Dense | Expand):
        return False
    if stages(stack.module) != [Stage(relu=True), Stage()] or any(
        p.dtype is not torch.float32 for p in stack.module.parameters()
    ):
        return False
    if any(isinstance(layer, DropConnectLinear) for layer in linear_layers(stack.module)):
        return False
    if any(isinstance(x, np.memmap) for data in stack.data for x in (data.x, data.x_test)):
        return False
    if sum(len(data.x) for data in stack.data) * stack.data[0].inputs >= 2**31:
        return False  # the kernel counts entries in 32 bits
    return _on_chip(stack) or (
        1 < linear_layers(stack.module)[1].out_features <= _MOST_OUTPUTS
        and stack.batch <= _MOST_BATCH
        and not _orthogonal(stack)
    )


def _on_chip(stack: Stack) -> bool:
    first, second = linear_layers(stack.module)
    return fits(first.out_features, first.in_features, second.out_features)


def together(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Sort stacks into groups that one launch can train: those whose padded sizes are the same."""
    # Every size costs a compilation of seconds: fewer and fuller launches are worth some zeros.
    groups: dict[Hashable, list[Stack]] = {}
    for stack in stacks:
        first, second = linear_layers(stack.module)
        masked = isinstance(first, SparseLinear), isinstance(second, SparseLinear)
        samples = len(stack.data[0].x), len(stack.data[0].x_test)
        key = _tile(stack), masked, second.out_features, samples, stack.batch, stack.epoch
        groups.setdefault((key, _orthogonal(stack)), []).append(stack)
    return list(groups.values())


def run(
    stacks: Sequence[Stack], until: int, on_epochs: OnEpochs, device: torch.device,
    stop: threading.Event | None = None,
) -> None:  # fmt: skip
    """Train stacks that go together; an interruption leaves them at the last recorded epoch."""
    for stack in stacks:
        stack.to(device)
    job = _Job(stacks, device)
    try:
        while stacks[0].epoch < until:
            for stack, accuracy, loss in job.launch(until):
                on_epochs(stack, accuracy, loss)
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
    finally:
        job.finish()


def _orthogonal(stack: Stack) -> bool:
    return bool(stack.hyper["orthogonal"].any())


def _tile(stack: Stack) -> tuple[int, int]:
    """Return the hidden neurons and inputs of the tiles a stack is computed in."""
    first, second = linear_layers(stack.module)
    sizes = first.out_features, first.in_features
    if not _on_chip(stack):
        return blocks(*sizes)
    return padded(*sizes, second.out_features, _orthogonal(stack))[:2]


class _Job:
    """Stacks laid out for the kernel, one after another, with zeros where a tile is wider."""

    def __init__(self, stacks: Sequence[Stack], device: torch.device) -> None:
        self.stacks, self.device = stacks, device
        self.layers = [read(stack) for stack in stacks]
        self.tile = _tile(stacks[0])
        self.networks, self.data = self._networks(), self._data()
        self.seeds = torch.cat([stack.seeds for stack in stacks]).to(device)
        self.seconds = _SLICE

    def launch(self, until: int) -> list[tuple[Stack, Tensor, Tensor]]:
        """Train some epochs and return their curves, NaN where a network has diverged."""
        start = self.stacks[0].epoch
        epochs = max(1, min(int(_SLICE / self.seconds), until - start))
        alive = torch.cat([stack.alive for stack in self.stacks])
        numbers = torch.arange(start, start + epochs, device=self.device)
        before = [tensor.clone() for tensor in self._changing()]
        begin = time.perf_counter()
        try:
            keys = order_keys(self.seeds.unsqueeze(-1), numbers).contiguous()
            kernel = train if _on_chip(self.stacks[0]) else walk
            curves = kernel(self.networks, self.data, keys, batch=self.stacks[0].batch)
            finished = curves.finished.cpu()
        except BaseException:
            self._restore(before, torch.ones_like(alive))
            raise
        self.seconds = (time.perf_counter() - begin) / epochs
        self._restore(before, ~alive)  # what diverged earlier stays as it was
        finished = torch.where(alive, finished, 0)
        gone = torch.arange(epochs) >= finished.unsqueeze(-1)
        accuracy = curves.correct.cpu().double() / self.data.xt.shape[1]
        accuracy.masked_fill_(gone, torch.nan)
        loss = curves.loss.cpu().double().masked_fill_(gone, torch.nan)
        for stack, done in zip(self.stacks, self._cut(finished), strict=True):
            stack.alive &= done == epochs
            stack.epoch += epochs
        return list(zip(self.stacks, self._cut(accuracy), self._cut(loss), strict=True))

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
        rows = rows.to(self.device)
        for now, then in zip(self._changing(), before, strict=True):
            now[rows] = then[rows]

    def _joined(self, parts: Sequence[Tensor], *shape: int) -> Tensor:
        """Return a tensor of every stack, one after another, filled up with zeros to a shape."""
        joined = parts[0].new_zeros(sum(map(len, parts)), *shape)
        for place, part in zip(self._cut(joined), parts, strict=True):
            place[tuple(map(slice, part.shape))] = part
        return joined

    def _networks(self) -> Networks:
        (hidden, inputs), outputs = self.tile, self.layers[0][1].states["weight"][0].shape[1]
        shapes = [(hidden, inputs), (hidden,), (outputs, hidden), (outputs,)]
        states = zip(*map(_matrices, self.layers), strict=True)  # w1 of all stacks, b1 of all, ...
        values = [self._joined(x, *shape) for x, shape in zip(states, 3 * shapes, strict=True)]
        (w1, b1, w2, b2), m, v = values[:4], tuple(values[4:8]), tuple(values[8:])
        masks = [
            None
            if layers[0].mask is None
            else self._joined([layer.mask.to(torch.uint8) for layer in layers], *shape)
            for layers, shape in zip(zip(*self.layers, strict=True), shapes[::2], strict=True)
        ]
        lr, l1, l2, orthogonal = (
            torch.cat([stack.hyper[name] for stack in self.stacks]).to(self.device)
            for name in HYPER
        )
        steps = [s.adam.state[next(s.module.parameters())]["step"] for s in self.stacks]
        return Networks(
            w1, b1, w2, b2, m, v, torch.cat(steps).to(self.device, torch.int64), lr, l1, l2,
            mask1=masks[0], mask2=masks[1],
            orthogonal=orthogonal if _orthogonal(self.stacks[0]) else None,
        )  # fmt: skip

    def _data(self) -> DataSets:
        sets, which = joined_data(self.stacks)

        def stacked(name: str, dtype: torch.dtype) -> Tensor:
            parts = [torch.as_tensor(getattr(data, name)).to(self.device, dtype) for data in sets]
            if parts[0].ndim > 1:  # zeros fill samples up to the inputs of the tile
                parts = [functional.pad(part, (0, self.tile[1] - part.shape[-1])) for part in parts]
            return torch.stack(parts)

        return DataSets(
            x=stacked("x", torch.float32),
            y=stacked("y", torch.int32),
            xt=stacked("x_test", torch.float32),
            yt=stacked("y_test", torch.int32),
            which=which.to(self.device, torch.int32),
        )


def _matrices(layers: Sequence[WideLayer]) -> list[Tensor]:
    """Return W1, b1, W2 and b2, then their first moments, then their second."""
    parts = [layer.states[name] for layer in layers for name in ("weight", "bias")]
    return [part[state] for state in range(3) for part in parts]
