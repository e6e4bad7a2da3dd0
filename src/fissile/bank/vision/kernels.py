"""Kernels for a training step: gathering a batch, BatchNorm with ReLU (and pooling), Adam.

Activations are matrices of pixels by channels, as channels-last tensors lie in memory. A reduction
over pixels is dealt to many programs; the one that finishes last adds up what all have found, so
that no second launch is needed and the sum does not depend on who came first.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adam_kernel", "apply_kernel", "back_kernel", "gather_kernel", "slope_kernel"]
__all__ += ["stats_kernel"]


@triton.jit  # type: ignore[untyped-decorator]
def gather_kernel(  # type: ignore[no-untyped-def]
    images, labels, order, counters, scale, out, target, H: tl.constexpr, W: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the next images of the order: bytes to numbers, each pixel with its 3x3 neighbours.

    A row below zero, ``~row``, stands for the mirrored image.
    """
    i = tl.program_id(0)
    row = tl.load(order + tl.load(counters) + i)
    mirrored = row < 0
    row = tl.where(mirrored, -1 - row, row)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, ROOM)  # 3 rows x 3 columns x 3 colours; the rest is zero
    colour = entry % 3
    y = (pixel // W)[:, None] + (entry // 9)[None, :] - 1
    x = (pixel % W)[:, None] + (entry // 3 % 3)[None, :] - 1
    real = (pixel < H * W)[:, None] & (entry < 27)[None, :]
    real = real & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    column = tl.where(mirrored, W - 1 - x, x)
    at = row * (H * W * 3) + (y * W + column) * 3 + colour[None, :]
    value = tl.load(images + at, mask=real, other=0).to(tl.float32)
    factor, shift = tl.load(scale + colour), tl.load(scale + 3 + colour)
    value = tl.where(real, value * factor[None, :] + shift[None, :], 0.0)
    at = (i * H * W + pixel)[:, None] * ROOM + entry[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(pixel < H * W)[:, None])
    if tl.program_id(1) == 0:
        tl.store(target + i, tl.load(labels + row))


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
def stats_kernel(  # type: ignore[no-untyped-def]
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
def apply_kernel(  # type: ignore[no-untyped-def]
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
def slope_kernel(  # type: ignore[no-untyped-def]
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
def back_kernel(  # type: ignore[no-untyped-def]
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


# Whatever the head's width, it is one program: a second could not be compiled while a graph is
# being recorded.
@triton.jit(do_not_specialize=["begin", "end", "kernels", "size"])  # type: ignore[untyped-decorator]
def adam_kernel(  # type: ignore[no-untyped-def]
    weights, low, low_grads, grads, means, squares, counters, lr, decay, l1, begin, end, kernels,
    size, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a step of Adam on all weights; L1 acts between begin and end; COPY also rounds them.

    The first weights are kernels of convolutions: their gradients are of low precision.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    step = (tl.load(counters + 1) + 1).to(tl.float64)
    # Powers of the betas from their logarithms, in double: 1 - 0.999 would lose digits in single.
    rate = (lr / (1 - tl.exp(step * -0.10536051565782628))).to(tl.float32)
    root = tl.sqrt((1 - tl.exp(step * -0.0010005003335835335)).to(tl.float32))
    p = tl.load(weights + at, mask=there, other=0.0)
    g = tl.load(low_grads + at, mask=at < kernels, other=0.0).to(tl.float32)
    g += tl.load(grads + at, mask=there & (at >= kernels), other=0.0) + decay * p
    sign = tl.where(p > 0, 1.0, tl.where(p < 0, -1.0, 0.0))
    g += tl.where((at >= begin) & (at < end), l1 * sign, 0.0)
    m = tl.load(means + at, mask=there, other=0.0)
    m += (g - m) * (1 - 0.9)
    v = tl.load(squares + at, mask=there, other=0.0) * 0.999 + g * g * (1 - 0.999)
    p -= rate * (m / (tl.sqrt(v) / root + 1e-8))
    tl.store(means + at, m, mask=there)
    tl.store(squares + at, v, mask=there)
    tl.store(weights + at, p, mask=there)
    if COPY:
        tl.store(low + at, p.to(low.dtype.element_ty), mask=at < kernels)
