"""The bank on a GPU: one program trains one small network and keeps all of it on chip.

A network here is ``z = W2 · relu(W1 x + b1) + b2`` with a few hundred to a few thousand weights.
Its weights, both Adam moments and the activations stay in registers and shared memory over all
steps of all epochs of a launch; only the rows of the batches are read. It computes what
:func:`fissile.train.fit` computes, and no network knows of the others in its launch: the result is
bitwise the same alone and in company.

This module needs Triton; nothing else in fissile imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from fissile.errors import FissileError, whole
from fissile.order import ROUNDS, order_shape

__all__ = ["DataSets", "Networks", "Outcome", "fits", "train"]

Precision = Literal["ieee", "tf32x3", "tf32"]

#: The inner dimension of a matrix product in a kernel has at least this size.
_LEAST_INNER = 16
#: The narrowest hidden layer worth a tile of its own.
_LEAST_HIDDEN = 8
#: W1 and its two moments and gradient are four tiles of this many floats at most.
_MOST_WEIGHTS = 8192
_MOST_CLASSES = 128


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
    h, d, c = _padded(hidden, inputs, outputs)
    return h * d <= _MOST_WEIGHTS and h * c <= _MOST_WEIGHTS and c <= _MOST_CLASSES


def train(
    networks: Networks,
    data: DataSets,
    keys: Tensor,
    outcome: Outcome,
    *,
    batch: int = 64,
    precision: Precision = "ieee",
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
    betas = torch.tensor([0.9, 0.999], dtype=torch.float64, device=steps_so_far.device)
    h, d, c = _padded(hidden, inputs, outputs, networks.orthogonal is not None)
    default_chunk, default_warps = _suiting(h, d, c)
    chunk, num_warps = chunk or default_chunk, num_warps or default_warps
    if chunk < _LEAST_INNER or chunk != _power_of_two(chunk):
        raise FissileError(f"chunk={chunk} is not a power of two of at least {_LEAST_INNER}")
    bits, shift = order_shape(samples)
    nothing = networks.w1  # a pointer for what the kernel leaves out; it is never read
    with torch.cuda.device_of(networks.w1):  # Triton launches on the current device
        _train_kernel[(count,)](
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


def _padded(
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


def _suiting(h: int, d: int, c: int) -> tuple[int, int]:
    """Return the chunk and the warps at which the tiles just fit into the registers."""
    weights = h * max(d, c)
    if weights <= 256:
        return 32, 1
    return (32, 2) if weights <= 512 else (32, 4) if weights <= 1024 else (16, 8)


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


# ---- the kernel ----------------------------------------------------------------------------------
# Tiles hold W1 and W2 transposed, (inputs, hidden) and (hidden, outputs): so a batch, (rows,
# inputs), multiplies them as they are, and only the batch is transposed for the gradient. Whatever
# pads a tile is zero and has no gradient: it stays zero by itself.


@triton.jit  # type: ignore[untyped-decorator]
def _scrambled(position, m0, a0, m1, a1, m2, a2, m3, a3, BITS: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the rounds of `fissile.order` once, in 32 bits."""
    low: tl.constexpr = (1 << BITS) - 1
    position = tl.add(tl.mul(position, m0, False), a0, False) & low
    position = position ^ (position >> SHIFT)
    position = tl.add(tl.mul(position, m1, False), a1, False) & low
    position = position ^ (position >> SHIFT)
    position = tl.add(tl.mul(position, m2, False), a2, False) & low
    position = position ^ (position >> SHIFT)
    position = tl.add(tl.mul(position, m3, False), a3, False) & low
    return position ^ (position >> SHIFT)


@triton.jit  # type: ignore[untyped-decorator]
def _samples(  # type: ignore[no-untyped-def]
    x,
    y,
    position,
    m0,
    a0,
    m1,
    a1,
    m2,
    a2,
    m3,
    a3,
    N: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Read the samples at some positions of the order: inputs (rows, DP) and targets (rows,)."""
    # What is beyond the end reads the first sample: a position within always ends within.
    position = tl.where(position < N, position, 0).to(tl.uint32)
    place = _scrambled(position, m0, a0, m1, a1, m2, a2, m3, a3, BITS, SHIFT)
    if 1 << BITS != N:
        # Asking all rows whether they are done costs as much as a few scrambles: ask rarely.
        while tl.max((place >= N).to(tl.int32), axis=0) > 0:
            for _ in tl.static_range(4):
                again = _scrambled(place, m0, a0, m1, a1, m2, a2, m3, a3, BITS, SHIFT)
                place = tl.where(place >= N, again, place)
    sample = place.to(tl.int32)
    d = tl.arange(0, DP)
    at = sample[:, None] * D + d[None, :]
    inputs = tl.load(x + at, mask=d[None, :] < D, other=0) if D != DP else tl.load(x + at)
    return inputs.to(tl.float32), tl.load(y + sample)


@triton.jit  # type: ignore[untyped-decorator]
def _hidden(x, w1, b1, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return relu(W1 x + b1); it hands a NaN on, as torch does."""
    a = tl.dot(x, w1, input_precision=PRECISION) + b1[None, :]
    return tl.where(a <= 0, 0.0, a)


@triton.jit
def _adam(p, g, m, v, rate, spread):  # type: ignore[no-untyped-def]
    """Make a step of Adam: rate is lr / (1 - beta1^t), spread is 1 / sqrt(1 - beta2^t)."""
    m += (g - m) * (1 - 0.9)
    v = v * 0.999 + g * g * (1 - 0.999)
    p -= rate * (m / (tl.sqrt(v) * spread + 1e-8))
    return p, m, v


_STATE = [f"{kind}{name}_" for name in ("w1", "b1", "w2", "b2") for kind in ("", "m_", "v_")]


# Alignment must not choose the code, or a slice of a stack might round differently from the stack.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["epochs"],
    do_not_specialize_on_alignment=[
        *_STATE, "mask1_", "mask2_", "step_", "power_", "lr_", "l1_", "l2_", "orthogonal_",
        "which_", "keys_", "loss_", "correct_", "finished_",
    ],
)  # fmt: skip
def _train_kernel(  # type: ignore[no-untyped-def]
    w1_,
    b1_,
    w2_,
    b2_,
    m_w1_,
    m_b1_,
    m_w2_,
    m_b2_,
    v_w1_,
    v_b1_,
    v_w2_,
    v_b2_,
    mask1_,
    mask2_,
    step_,
    power_,
    lr_,
    l1_,
    l2_,
    orthogonal_,
    x_,
    y_,
    xt_,
    yt_,
    which_,
    keys_,
    loss_,
    correct_,
    finished_,
    epochs,
    N: tl.constexpr,
    TESTS: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    DP: tl.constexpr,
    HP: tl.constexpr,
    CP: tl.constexpr,
    CHUNK: tl.constexpr,
    MASK1: tl.constexpr,
    MASK2: tl.constexpr,
    ORTHOGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Train the network of this program, epoch by epoch, while it stays finite."""
    me = tl.program_id(0).to(tl.int64)
    rows, d, h, c = tl.arange(0, CHUNK), tl.arange(0, DP), tl.arange(0, HP), tl.arange(0, CP)
    one_output: tl.constexpr = C == 1
    parts: tl.constexpr = (B + CHUNK - 1) // CHUNK
    steps: tl.constexpr = (N + B - 1) // B

    # This network's share of every array, and where in it each number of a tile lies.
    w1_, m_w1_, v_w1_ = w1_ + me * (H * D), m_w1_ + me * (H * D), v_w1_ + me * (H * D)
    b1_, m_b1_, v_b1_ = b1_ + me * H, m_b1_ + me * H, v_b1_ + me * H
    w2_, m_w2_, v_w2_ = w2_ + me * (C * H), m_w2_ + me * (C * H), v_w2_ + me * (C * H)
    b2_, m_b2_, v_b2_ = b2_ + me * C, m_b2_ + me * C, v_b2_ + me * C
    at_w1, is_w1 = h[None, :] * D + d[:, None], (h[None, :] < H) & (d[:, None] < D)
    is_b1, is_b2 = h < H, c < C
    if one_output:
        at_w2, is_w2 = h, h < H  # (hidden,)
    else:
        at_w2 = c[None, :] * H + h[:, None]  # (hidden, outputs)
        is_w2 = (c[None, :] < C) & (h[:, None] < H)
    # A weight that does not exist is read as zero, and so are its moments.
    has_w1, has_w2 = is_w1, is_w2
    if MASK1:
        has_w1 = is_w1 & (tl.load(mask1_ + me * (H * D) + at_w1, mask=is_w1, other=0) != 0)
    if MASK2:
        has_w2 = is_w2 & (tl.load(mask2_ + me * (C * H) + at_w2, mask=is_w2, other=0) != 0)
    w1 = tl.load(w1_ + at_w1, mask=has_w1, other=0.0)
    b1 = tl.load(b1_ + h, mask=is_b1, other=0.0)
    w2 = tl.load(w2_ + at_w2, mask=has_w2, other=0.0)
    b2 = tl.load(b2_ + c, mask=is_b2, other=0.0)
    m_w1 = tl.load(m_w1_ + at_w1, mask=has_w1, other=0.0)
    m_b1 = tl.load(m_b1_ + h, mask=is_b1, other=0.0)
    m_w2 = tl.load(m_w2_ + at_w2, mask=has_w2, other=0.0)
    m_b2 = tl.load(m_b2_ + c, mask=is_b2, other=0.0)
    v_w1 = tl.load(v_w1_ + at_w1, mask=has_w1, other=0.0)
    v_b1 = tl.load(v_b1_ + h, mask=is_b1, other=0.0)
    v_w2 = tl.load(v_w2_ + at_w2, mask=has_w2, other=0.0)
    v_b2 = tl.load(v_b2_ + c, mask=is_b2, other=0.0)
    step_count = tl.load(step_ + me)
    lr, l1, l2 = tl.load(lr_ + me), tl.load(l1_ + me), 2 * tl.load(l2_ + me)

    set_ = tl.load(which_ + me).to(tl.int64)
    x, y = x_ + set_ * (N * D), y_ + set_ * N
    xt, yt = xt_ + set_ * (TESTS * D), yt_ + set_ * TESTS

    done = 0
    alive = epochs > 0
    while (done < epochs) & alive:
        epoch = me * epochs + done
        power1, power2 = tl.load(power_ + 2 * epoch), tl.load(power_ + 2 * epoch + 1)  # float64
        key = keys_ + epoch * 8
        m0, a0 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
        m1, a1 = tl.load(key + 2).to(tl.uint32), tl.load(key + 3).to(tl.uint32)
        m2, a2 = tl.load(key + 4).to(tl.uint32), tl.load(key + 5).to(tl.uint32)
        m3, a3 = tl.load(key + 6).to(tl.uint32), tl.load(key + 7).to(tl.uint32)
        # Each row gathers its own loss: one sum over rows an epoch, not one a step.
        loss_of_row = tl.zeros((CHUNK,), tl.float32)
        if PREFETCH:
            x_next, y_next = _samples(
                x, y, rows, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT, D, DP
            )
        for step in range(steps):
            share = 1.0 / tl.minimum(tl.cast(N - step * B, tl.float32), 1.0 * B)
            g_w1 = tl.zeros((DP, HP), tl.float32)
            g_b1 = tl.zeros((HP,), tl.float32)
            g_b2 = tl.zeros((CP,), tl.float32)
            g_w2 = tl.zeros((HP,), tl.float32) if one_output else tl.zeros((HP, CP), tl.float32)
            for part in range(parts):
                row = part * CHUNK + rows
                position = step * B + row
                real = (row < B) & (position < N)
                if PREFETCH:
                    # After the last chunk comes the first sample over and over; nobody uses it.
                    xb, yb = x_next, y_next
                    ahead = position + CHUNK
                    if part == parts - 1:
                        ahead = (step + 1) * B + rows
                    x_next, y_next = _samples(
                        x, y, ahead, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT, D, DP
                    )
                else:
                    xb, yb = _samples(
                        x, y, position, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT, D, DP
                    )

                # Forward, and the gradient of the mean loss by the logits.
                hidden = _hidden(xb, w1, b1, PRECISION)
                if one_output:
                    z = tl.sum(hidden * w2[None, :], axis=1) + b2
                    target = yb.to(tl.float32)
                    e = tl.exp(-tl.abs(z))
                    loss = tl.where(z <= 0, 0.0, z) - z * target + tl.log(1 + e)
                    dz = tl.where(z >= 0, 1.0, e) / (1 + e) - target
                    dz = tl.where(real, dz * share, 0.0)
                else:
                    z = tl.dot(hidden, w2, input_precision=PRECISION) + b2[None, :]
                    z = tl.where(c[None, :] < C, z, float("-inf"))
                    chosen = c[None, :] == yb[:, None]
                    top = tl.max(z, axis=1)
                    e = tl.exp(z - top[:, None])
                    total = tl.sum(e, axis=1)
                    loss = tl.log(total) + top - tl.sum(tl.where(chosen, z, 0.0), axis=1)
                    dz = e / total[:, None] - chosen.to(tl.float32)
                    dz = tl.where(real[:, None], dz * share, 0.0)
                loss_of_row += tl.where(real, loss, 0.0)

                # Backward.
                if one_output:
                    dh = dz[:, None] * w2[None, :]
                    g_w2 += tl.sum(dz[:, None] * hidden, axis=0)
                else:
                    dh = tl.dot(dz, tl.trans(w2), input_precision=PRECISION)
                    g_w2 = tl.dot(tl.trans(hidden), dz, g_w2, input_precision=PRECISION)
                g_b2 += tl.sum(dz, axis=0)
                da = tl.where(hidden > 0, dh, 0.0)
                g_w1 = tl.dot(tl.trans(xb), da, g_w1, input_precision=PRECISION)
                g_b1 += tl.sum(da, axis=0)

            # Penalties.
            g_w1 += l2 * w1 + tl.where(w1 > 0, l1, tl.where(w1 < 0, -l1, 0.0))
            g_b1 += l2 * b1
            g_w2 += l2 * w2
            g_b2 += l2 * b2
            if ORTHOGONAL:
                gram = tl.dot(tl.trans(w1), w1, input_precision=PRECISION)
                gram -= tl.where(h[:, None] == h[None, :], 1.0, 0.0)
                pull = tl.dot(w1, gram, input_precision=PRECISION)
                g_w1 += 4 * tl.load(orthogonal_ + me) * pull
            if MASK1:
                g_w1 = tl.where(has_w1, g_w1, 0.0)
            if MASK2:
                g_w2 = tl.where(has_w2, g_w2, 0.0)

            power1 *= 0.9
            power2 *= 0.999
            rate = lr / (1 - power1).to(tl.float32)
            spread = 1 / tl.sqrt((1 - power2).to(tl.float32))
            w1, m_w1, v_w1 = _adam(w1, g_w1, m_w1, v_w1, rate, spread)
            b1, m_b1, v_b1 = _adam(b1, g_b1, m_b1, v_b1, rate, spread)
            w2, m_w2, v_w2 = _adam(w2, g_w2, m_w2, v_w2, rate, spread)
            b2, m_b2, v_b2 = _adam(b2, g_b2, m_b2, v_b2, rate, spread)

        # An infinite or undefined loss of any step is still in the sum.
        loss_sum = tl.sum(loss_of_row, axis=0)
        size_sum = tl.sum(tl.sum(tl.abs(w1), axis=1), axis=0) + tl.sum(tl.abs(b1), axis=0)
        size_sum += tl.sum(tl.abs(b2), axis=0)
        if one_output:
            size_sum += tl.sum(tl.abs(w2), axis=0)
        else:
            size_sum += tl.sum(tl.sum(tl.abs(w2), axis=1), axis=0)
        alive = (tl.abs(loss_sum) < float("inf")) & (size_sum < float("inf"))
        if alive:
            tl.store(w1_ + at_w1, w1, mask=is_w1)
            tl.store(b1_ + h, b1, mask=is_b1)
            tl.store(w2_ + at_w2, w2, mask=is_w2)
            tl.store(b2_ + c, b2, mask=is_b2)
            tl.store(m_w1_ + at_w1, m_w1, mask=is_w1)
            tl.store(m_b1_ + h, m_b1, mask=is_b1)
            tl.store(m_w2_ + at_w2, m_w2, mask=is_w2)
            tl.store(m_b2_ + c, m_b2, mask=is_b2)
            tl.store(v_w1_ + at_w1, v_w1, mask=is_w1)
            tl.store(v_b1_ + h, v_b1, mask=is_b1)
            tl.store(v_w2_ + at_w2, v_w2, mask=is_w2)
            tl.store(v_b2_ + c, v_b2, mask=is_b2)
            right = tl.zeros((CHUNK,), tl.int32)
            for first in range(0, TESTS, CHUNK):
                row = first + rows
                is_x = (row[:, None] < TESTS) & (d[None, :] < D)
                xb = tl.load(xt + (row[:, None] * D + d[None, :]), mask=is_x, other=0)
                yb = tl.load(yt + row, mask=row < TESTS, other=-1)  # no guess is -1
                hidden = _hidden(xb.to(tl.float32), w1, b1, PRECISION)
                if one_output:
                    z = tl.sum(hidden * w2[None, :], axis=1) + b2
                    guess = (z > 0).to(tl.int32)
                else:
                    z = tl.dot(hidden, w2, input_precision=PRECISION) + b2[None, :]
                    z = tl.where(c[None, :] < C, z, float("-inf"))
                    guess = tl.argmax(z, axis=1)
                right += (guess == yb).to(tl.int32)
            tl.store(loss_ + epoch, loss_sum / N)
            tl.store(correct_ + epoch, tl.sum(right, axis=0))
        done += alive.to(tl.int32)
    tl.store(step_ + me, step_count + tl.cast(done, tl.int64) * steps)
    tl.store(finished_ + me, done)
