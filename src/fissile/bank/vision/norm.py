"""BatchNorm, ReLU and, after a block, pooling as one function with a gradient, in Triton.

Activations are matrices of pixels by channels. A reduction over pixels is dealt to many programs;
the one that finishes last adds up all sums, in an order that is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

#: Channels and rows of one tile of a reduction, and how many programs deal the tiles among them:
#: measured on an H200, where half as many are faster for the gradient without pooling.
_CHANNELS, _ROWS, _PROGRAMS = 64, 64, 256
_BLOCK = 2048
_WARPS = 4


@dataclass(frozen=True)
class Norm:
    """A BatchNorm's tensors on the device, what follows it, and room for its reductions."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor  # the running ones
    var: Tensor
    momentum: float
    eps: float
    pool: bool
    finished: Tensor  # int32 zeros, one for every block of channels
    batch: int  # images at most; a smaller batch is dealt as if it were as large


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Normalise by the batch, activate, perhaps pool; channels-last in and out."""
    y: Tensor = _Normed.apply(x, norm.gamma, norm.beta, norm)  # type: ignore[no-untyped-call]
    return y


@torch.no_grad()
def evaluated(x: Tensor, norm: Norm) -> Tensor:
    """Normalise by the running statistics, activate, perhaps pool."""
    return _applied(x, norm, norm.mean, (norm.var + norm.eps).rsqrt())


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, norm: Norm) -> Tensor:
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        mean, spread = torch.empty(2, channels, device=x.device)
        grid, loops, height = _dealt(norm.batch * x[0, 0].numel(), channels, _ROWS, _PROGRAMS)
        partial = torch.empty(2, grid[0], channels, device=x.device)
        _stats_kernel[grid](
            x, partial, norm.finished, mean, spread, norm.mean, norm.var, rows,
            norm.momentum, norm.eps, CHUNKS=grid[0], LOOPS=loops, C=channels, BR=height,
            BC=_CHANNELS, num_warps=_WARPS,
        )  # fmt: skip
        y = _applied(x, norm, mean, spread)
        ctx.save_for_backward(x, mean, spread, gamma, beta)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, spread, gamma, beta = ctx.saved_tensors
        norm, channels = ctx.norm, x.shape[1]
        dy = slopes[0].contiguous(memory_format=torch.channels_last)
        dgamma, dbeta = torch.empty(2, channels, device=x.device)
        rows, half = dy.numel() // channels, _half_width(x, norm)
        most = norm.batch * dy[0, 0].numel()
        deal = (_ROWS // 2, _PROGRAMS) if norm.pool else (_ROWS, _PROGRAMS // 2)
        grid, loops, height = _dealt(most, channels, *deal)
        partial = torch.empty(2, grid[0], channels, device=x.device)
        _slope_kernel[grid](
            x, dy, partial, norm.finished, mean, spread, gamma, beta, dgamma, dbeta, rows,
            CHUNKS=grid[0], LOOPS=loops, C=channels, W2=half, BR=height, BC=_CHANNELS,
            num_warps=_WARPS,
        )  # fmt: skip
        dx = torch.empty_like(x)
        _back_kernel[(triton.cdiv(dy.numel(), _BLOCK),)](
            x, dy, mean, spread, gamma, beta, dgamma, dbeta, dx, dy.numel(),
            x.numel() // channels, C=channels, W2=half, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return dx, dgamma, dbeta, None


def _applied(x: Tensor, norm: Norm, mean: Tensor, spread: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    shape = (batch, channels, height // 2, width // 2) if norm.pool else x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _apply_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        x, mean, spread, norm.gamma, norm.beta, y, y.numel(), C=channels,
        W2=_half_width(x, norm), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return y


def _half_width(x: Tensor, norm: Norm) -> int:
    return x.shape[3] // 2 if norm.pool else 0


def _dealt(
    rows: int, channels: int, tallest: int, programs: int
) -> tuple[tuple[int, int], int, int]:
    """Return the grid of a reduction, how often each program loops, and its tile's height."""
    blocks, height = triton.cdiv(channels, _CHANNELS), tallest
    while height > 16 and triton.cdiv(rows, height) * blocks < programs // 2:
        height //= 2
    chunks = min(triton.cdiv(programs, blocks), triton.cdiv(rows, height))
    return (chunks, blocks), triton.cdiv(rows, chunks * height), height


@triton.jit  # type: ignore[untyped-decorator]
def _hand_in(  # type: ignore[no-untyped-def]
    partial, chunk, channel, keep, first, second, CHUNKS: tl.constexpr, C: tl.constexpr
):
    """Leave a program's two sums where the last one finds them."""
    tl.store(partial + chunk * C + channel, first, mask=keep)
    tl.store(partial + (CHUNKS + chunk) * C + channel, second, mask=keep)
    tl.debug_barrier()  # all threads have stored before one of them says so


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    partial, channel, keep, CHUNKS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr
):
    """Return the two sums over all programs."""
    first = tl.zeros((32, BC), tl.float32)
    second = tl.zeros((32, BC), tl.float32)
    for start in tl.static_range(0, CHUNKS, 32):  # unrolled: many loads are on their way at once
        chunk = start + tl.arange(0, 32)
        there = (chunk < CHUNKS)[:, None] & keep[None, :]
        at = partial + chunk[:, None] * C + channel[None, :]
        first += tl.load(at, mask=there, other=0.0)
        second += tl.load(at + CHUNKS * C, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _stats_kernel(  # type: ignore[no-untyped-def]
    x, partial, finished, mean_, spread_, running_mean, running_var, rows, momentum, eps,
    CHUNKS: tl.constexpr, LOOPS: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Find every channel's mean and 1 / deviation over the pixels, and move the running ones."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    channel = block * BC + tl.arange(0, BC)
    keep = channel < C
    # Sums of x - x[0]: where the mean is far from zero, those of x would lose the variance.
    origin = tl.load(x + channel, mask=keep, other=0.0).to(tl.float32)
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for outer in range(0, LOOPS, 4):
        for inner in tl.static_range(4 if LOOPS > 4 else LOOPS):
            row = ((outer + inner) * CHUNKS + chunk) * BR + tl.arange(0, BR)
            there = (row < rows)[:, None] & keep[None, :]
            value = tl.load(x + row[:, None] * C + channel[None, :], mask=there, other=0.0)
            value = tl.where(there, value.to(tl.float32) - origin[None, :], 0.0)
            first += value
            second += value * value
    _hand_in(partial, chunk, channel, keep, tl.sum(first, 0), tl.sum(second, 0), CHUNKS, C)
    if tl.atomic_add(finished + block, 1) == CHUNKS - 1:
        total, squares = _add_up(partial, channel, keep, CHUNKS, C, BC)
        offset = total / rows
        mean = origin + offset
        variance = tl.maximum(squares / rows - offset * offset, 0.0)
        tl.store(mean_ + channel, mean, mask=keep)
        tl.store(spread_ + channel, 1 / tl.sqrt(variance + eps), mask=keep)
        old = tl.load(running_mean + channel, mask=keep)
        tl.store(running_mean + channel, old + momentum * (mean - old), mask=keep)
        old = tl.load(running_var + channel, mask=keep)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_var + channel, old + momentum * (unbiased - old), mask=keep)
        tl.store(finished + block, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _window(pooled, W2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first pixel of the 2x2 window that a pooled pixel stands for."""
    return (pooled // W2) * (4 * W2) + (pooled % W2) * 2


@triton.jit
def _unit(x, at, there, mean, spread):  # type: ignore[no-untyped-def]
    return (tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mean) * spread


@triton.jit  # type: ignore[untyped-decorator]
def _larger(best, unit, which, other, number: tl.constexpr, gamma, beta):  # type: ignore[no-untyped-def]
    """Keep the larger of two activations, the first among equals, with where it was."""
    z = other * gamma + beta
    wins = z > best
    return tl.where(wins, z, best), tl.where(wins, other, unit), tl.where(wins, number, which)


@triton.jit  # type: ignore[untyped-decorator]
def _pooled(x, at, there, mean, spread, gamma, beta, C: tl.constexpr, W2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a window's largest activation, its normalised input, and which of the four it is."""
    unit = _unit(x, at, there, mean, spread)
    best, which = unit * gamma + beta, tl.zeros_like(at)
    other = _unit(x, at + C, there, mean, spread)
    best, unit, which = _larger(best, unit, which, other, 1, gamma, beta)
    other = _unit(x, at + 2 * W2 * C, there, mean, spread)
    best, unit, which = _larger(best, unit, which, other, 2, gamma, beta)
    other = _unit(x, at + 2 * W2 * C + C, there, mean, spread)
    return _larger(best, unit, which, other, 3, gamma, beta)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_kernel(  # type: ignore[no-untyped-def]
    x, mean_, spread_, gamma_, beta_, y, size, C: tl.constexpr, W2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise, scale, shift, cut off below zero; W2 > 0 also pools, to images of that width."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, channel = at < size, at % C
    mean, spread = tl.load(mean_ + channel), tl.load(spread_ + channel)
    gamma, beta = tl.load(gamma_ + channel), tl.load(beta_ + channel)
    if W2 > 0:
        source = _window(at // C, W2) * C + channel
        z, _, _ = _pooled(x, source, there, mean, spread, gamma, beta, C, W2)
    else:
        z = _unit(x, at, there, mean, spread) * gamma + beta
    z = tl.where(z <= 0, 0.0, z)  # hands a NaN on
    tl.store(y + at, z.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _slope_kernel(  # type: ignore[no-untyped-def]
    x, dy, partial, finished, mean_, spread_, gamma_, beta_, dgamma, dbeta, rows,
    CHUNKS: tl.constexpr, LOOPS: tl.constexpr, C: tl.constexpr, W2: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Find the gradients of scale and shift: sums over the pixels (pooled ones if W2 > 0)."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    channel = block * BC + tl.arange(0, BC)
    keep = channel < C
    mean, spread = tl.load(mean_ + channel, mask=keep), tl.load(spread_ + channel, mask=keep)
    gamma, beta = tl.load(gamma_ + channel, mask=keep), tl.load(beta_ + channel, mask=keep)
    mean, spread, gamma, beta = mean[None, :], spread[None, :], gamma[None, :], beta[None, :]
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for outer in range(0, LOOPS, 2):
        for inner in tl.static_range(2 if LOOPS > 2 else LOOPS):
            row = ((outer + inner) * CHUNKS + chunk) * BR + tl.arange(0, BR)
            there = (row < rows)[:, None] & keep[None, :]
            if W2 > 0:
                at = _window(row, W2)[:, None] * C + channel[None, :]
                z, unit, _ = _pooled(x, at, there, mean, spread, gamma, beta, C, W2)
            else:
                unit = _unit(x, row[:, None] * C + channel[None, :], there, mean, spread)
                z = unit * gamma + beta
            slope = tl.load(dy + row[:, None] * C + channel[None, :], mask=there, other=0.0)
            slope = tl.where(z <= 0, 0.0, slope.to(tl.float32))
            first += slope * unit
            second += slope
    _hand_in(partial, chunk, channel, keep, tl.sum(first, 0), tl.sum(second, 0), CHUNKS, C)
    if tl.atomic_add(finished + block, 1) == CHUNKS - 1:
        by_scale, by_shift = _add_up(partial, channel, keep, CHUNKS, C, BC)
        tl.store(dgamma + channel, by_scale, mask=keep)
        tl.store(dbeta + channel, by_shift, mask=keep)
        tl.store(finished + block, 0)


@triton.jit
def _store_dx(dx, x, at, there, slope, mean, spread, gamma, dg, db):  # type: ignore[no-untyped-def]
    """Store the gradient of one pixel; dg and db are the means that BatchNorm takes away."""
    unit = _unit(x, at, there, mean, spread)
    value = gamma * spread * (slope - db - unit * dg)
    tl.store(dx + at, value.to(dx.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _back_kernel(  # type: ignore[no-untyped-def]
    x, dy, mean_, spread_, gamma_, beta_, dgamma, dbeta, dx, size, pixels, C: tl.constexpr,
    W2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the gradient of the input; with pooling, of the four pixels of every window."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, channel = at < size, at % C
    mean, spread = tl.load(mean_ + channel), tl.load(spread_ + channel)
    gamma, beta = tl.load(gamma_ + channel), tl.load(beta_ + channel)
    dg, db = tl.load(dgamma + channel) / pixels, tl.load(dbeta + channel) / pixels
    slope = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    if W2 > 0:
        source = _window(at // C, W2) * C + channel
        z, _, which = _pooled(x, source, there, mean, spread, gamma, beta, C, W2)
        slope = tl.where(z <= 0, 0.0, slope)
        for i in tl.static_range(4):
            place = source + (i // 2) * (2 * W2 * C) + (i % 2) * C
            part = tl.where(which == i, slope, 0.0)
            _store_dx(dx, x, place, there, part, mean, spread, gamma, dg, db)
    else:
        z = _unit(x, at, there, mean, spread) * gamma + beta
        slope = tl.where(z <= 0, 0.0, slope)
        _store_dx(dx, x, at, there, slope, mean, spread, gamma, dg, db)
