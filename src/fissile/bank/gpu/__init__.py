"""The bank on a GPU: one program trains one small network and keeps all of it on chip.

A network here is ``z = W2 · relu(W1 x + b1) + b2`` with a few hundred to a few thousand weights.
Its weights, both Adam moments and the activations stay in registers and shared memory over all
steps of all epochs of a launch; only the rows of the batches are read. It computes what
:func:`fissile.bank.loop.fit` computes, and no network knows of the others in its launch: the result
is the same alone and in company, to the bit where the launches have the same settings.

This module needs Triton; nothing else in fissile imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fissile._common.errors import FissileError, whole
from fissile._common.random import ROUNDS, order_shape
from fissile.bank.gpu.kernels import train_kernel
from fissile.bank.step import BETA1, BETA2

__all__ = ["DataSets", "Networks", "Outcome", "fits", "padded", "train"]

Precision = Literal["ieee", "tf32x3", "tf32"]

#: The inner dimension of a matrix product in a kernel has at least this size.
_LEAST_INNER = 16
#: The narrowest hidden layer worth a tile of its own.
_LEAST_HIDDEN = 8
#: W1 and its two moments and gradient are four tiles of this many floats at most.
_MOST_WEIGHTS = 8192
_MOST_CLASSES = 128
#: Beyond, a batch no longer fits beside the weights, and the kernel lost its lead when tried.
_MOST_INPUTS = 256


@dataclass(frozen=True)
class Networks:
    """A stack of networks with their optimizers; :func:`train` changes it in place.

    A weight whose mask is 0 does not exist: its gradient is dropped, it and its moments are 0.
    """

    w1: Tensor  # (networks, hidden, inputs), float32 like all that follow
    b1: Tensor  # (networks, hidden)
    w2: Tensor  # (networks, outputs, hidden)
    b2: Tensor  # (networks, outputs)
    m: tuple[Tensor, Tensor, Tensor, Tensor]  # Adam's first moments of w1, b1, w2, b2
    v: tuple[Tensor, Tensor, Tensor, Tensor]  # and the second
    step: Tensor  # (networks,), int64: how many steps Adam has made
    lr: Tensor  # (networks,)
    l1: Tensor  # (networks,), on W1
    l2: Tensor  # (networks,), on all parameters
    mask1: Tensor | None = None  # (networks, hidden, inputs), uint8
    mask2: Tensor | None = None  # (networks, outputs, hidden), uint8
    orthogonal: Tensor | None = None  # (networks,); None leaves the penalty out of the kernel


@dataclass(frozen=True)
class DataSets:
    """The data sets and which of them each network learns.

    Inputs may also be ``uint8`` or ``bfloat16``: what is Boolean is exact there, and a quarter or
    half of the bytes are read.
    """

    x: Tensor  # (sets, samples, inputs)
    y: Tensor  # (sets, samples), int32
    xt: Tensor  # (sets, tests, inputs)
    yt: Tensor  # (sets, tests), int32
    which: Tensor  # (networks,), int32


@dataclass(frozen=True)
class Outcome:
    """What a launch found out; epochs a network did not finish hold NaN and -1."""

    loss: Tensor  # (networks, epochs), float32: the mean task loss of the samples, no penalties
    correct: Tensor  # (networks, epochs), int32: test samples classified rightly after the epoch
    finished: Tensor  # (networks,), int32: epochs before the first that was not finite

    @classmethod
    def empty(cls, networks: int, epochs: int, device: torch.device | str) -> Outcome:
        """Return room for the outcome of a launch."""
        return cls(
            torch.empty(networks, epochs, device=device),
            torch.empty(networks, epochs, dtype=torch.int32, device=device),
            torch.empty(networks, dtype=torch.int32, device=device),
        )


def fits(hidden: int, inputs: int, outputs: int) -> bool:
    """Tell whether a network of these sizes is one the kernel is meant for.

    >>> fits(8, 32, 1)
    True
    >>> fits(1024, 784, 10)
    False
    """
    h, d, c = padded(hidden, inputs, outputs)
    return d <= _MOST_INPUTS and h * max(d, c) <= _MOST_WEIGHTS and c <= _MOST_CLASSES


def train(
    networks: Networks,
    data: DataSets,
    keys: Tensor,
    outcome: Outcome,
    *,
    batch: int = 64,
    precision: Precision = "tf32x3",
    chunk: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 1,
    registers: int | None = None,
    prefetch: bool = False,
) -> None:
    """Train every network of a stack for some epochs, in place, in one launch.

    >>> keys = torch.stack([order_keys(seeds, epoch) for epoch in range(25)], 1)
    >>> train(networks, data, keys, outcome)

    Args:
        networks: what is trained. A network whose loss or parameters stop being finite is left as
            it was after its last finished epoch.
        data: what it is trained and tested on.
        keys: of the order of samples, (networks, epochs, rounds, 2), int64.
        outcome: where the losses and accuracies go.
        batch: samples of a step; the last of an epoch takes what is left.
        precision: of the matrix products.
        chunk: samples that are on chip at a time, a power of two of at least 16; by default, like
            num_warps, what suits the size of the networks.
        num_warps: of 32 threads, for each network.
        num_stages: how far Triton may pipeline loads.
        registers: the most a thread may use; fewer let more networks run at a time.
        prefetch: read the next chunk before computing with this one.
    """
    whole("batch", batch, least=1)
    _check(networks, data, keys, outcome)
    count, hidden, inputs = networks.w1.shape
    outputs, samples, epochs = networks.w2.shape[1], data.x.shape[1], keys.shape[1]
    outcome.loss.fill_(float("nan"))
    outcome.correct.fill_(-1)
    # Powers of Adam's betas at the start of each epoch: the kernel multiplies on from there, in
    # float64, where 1 - 0.999 is exact; and epochs in one launch are those of several, bit by bit.
    before = -(-samples // batch) * torch.arange(epochs, device=networks.step.device)
    steps_so_far = (networks.step[:, None, None] + before[:, None]).double()
    betas = torch.tensor([BETA1, BETA2], dtype=torch.float64, device=steps_so_far.device)
    h, d, c = padded(hidden, inputs, outputs, networks.orthogonal is not None)
    default_chunk, default_warps = _suiting(count, h, d, c)
    chunk, num_warps = chunk or default_chunk, num_warps or default_warps
    if chunk < _LEAST_INNER or chunk != _power_of_two(chunk):
        raise FissileError(f"chunk={chunk} is not a power of two of at least {_LEAST_INNER}")
    if chunk > 32 and num_warps > 4:  # Triton 3.6 compiles some of these to wrong addresses
        raise FissileError("chunks of more than 32 samples need at most 4 warps")
    bits, shift = order_shape(samples)
    nothing = networks.w1  # a pointer for what the kernel leaves out; it is never read
    with torch.cuda.device_of(networks.w1):  # Triton launches on the current device
        train_kernel[(count,)](
            networks.w1,
            networks.b1,
            networks.w2,
            networks.b2,
            *networks.m,
            *networks.v,
            nothing if networks.mask1 is None else networks.mask1,
            nothing if networks.mask2 is None else networks.mask2,
            networks.step,
            betas**steps_so_far,
            networks.lr,
            networks.l1,
            networks.l2,
            nothing if networks.orthogonal is None else networks.orthogonal,
            data.x,
            data.y,
            data.xt,
            data.yt,
            data.which,
            keys,
            outcome.loss,
            outcome.correct,
            outcome.finished,
            epochs,
            N=samples,
            TESTS=data.xt.shape[1],
            BITS=bits,
            SHIFT=shift,
            D=inputs,
            H=hidden,
            C=outputs,
            B=batch,
            DP=d,
            HP=h,
            CP=c,
            CHUNK=chunk,
            MASK1=networks.mask1 is not None,
            MASK2=networks.mask2 is not None,
            ORTHOGONAL=networks.orthogonal is not None,
            PRECISION=precision,
            PREFETCH=prefetch,
            num_warps=num_warps,
            num_stages=num_stages,
            maxnreg=registers,
        )


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
    """Return the chunk and the warps that suit, after benchmarks/gpu_shapes.py on an H200.

    Up to 2048 weights they were timed alone on the chip; beyond, only roughly, side by side.
    Few networks leave the chip idle: then more threads for each shorten its steps.
    """
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


def _check(networks: Networks, data: DataSets, keys: Tensor, outcome: Outcome) -> None:
    """Refuse what the kernel would read or write beyond its end."""
    if networks.w1.ndim != 3 or networks.w2.ndim != 3 or data.x.ndim != 3 or keys.ndim != 4:
        raise FissileError("w1, w2 and x must have three dimensions and keys four")
    n, h, d = networks.w1.shape
    c, (s, samples, _), tests, epochs = networks.w2.shape[1], data.x.shape, data.xt, keys.shape[1]
    f, i = torch.float32, torch.int32
    weights = (n, h, d), (n, h), (n, c, h), (n, c)
    expected: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        "step": (networks.step, (n,), torch.int64),
        "lr": (networks.lr, (n,), f),
        "l1": (networks.l1, (n,), f),
        "l2": (networks.l2, (n,), f),
        "orthogonal": (networks.orthogonal, (n,), f),
        "mask1": (networks.mask1, weights[0], torch.uint8),
        "mask2": (networks.mask2, weights[2], torch.uint8),
        "x": (data.x, (s, samples, d), None),
        "y": (data.y, (s, samples), i),
        "xt": (data.xt, (s, tests.shape[1], d), data.x.dtype),
        "yt": (data.yt, (s, tests.shape[1]), i),
        "which": (data.which, (n,), i),
        "keys": (keys, (n, epochs, ROUNDS, 2), torch.int64),
        "loss": (outcome.loss, (n, epochs), f),
        "correct": (outcome.correct, (n, epochs), i),
        "finished": (outcome.finished, (n,), i),
    }
    parameters = networks.w1, networks.b1, networks.w2, networks.b2
    for prefix, tensors in (("", parameters), ("m of ", networks.m), ("v of ", networks.v)):
        for name, one, shape in zip(("w1", "b1", "w2", "b2"), tensors, weights, strict=True):
            expected[prefix + name] = (one, shape, f)
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is not None:
            _check_tensor(name, tensor, shape, dtype or tensor.dtype, networks.w1.device)
    if min(n, epochs, samples) < 1:
        raise FissileError("nothing to train: give at least one network, epoch and sample")
    if max(data.x[0].numel(), data.xt[0].numel()) >= 2**31:
        raise FissileError("a data set of 2**31 numbers or more is too large for the kernel")
    if not fits(h, d, c):
        raise FissileError(
            f"{d} inputs, {h} hidden neurons and {c} outputs do not fit on chip; train such "
            "networks another way"
        )


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise FissileError(
            f"{name} must be {list(shape)}, {dtype}; got {list(tensor.shape)}, {tensor.dtype}"
        )
    if not tensor.is_contiguous() or tensor.device != device:
        raise FissileError(f"{name} must be contiguous and on {device}, like w1")
