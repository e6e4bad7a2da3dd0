"""Kernels for networks that do not fit on chip: their programs walk W1 in blocks, step after step.

Weights and moments stay in device memory, which for dozens of networks is the L2 cache. Several
programs may share a network. In a step each one

1. adds up what its share of the inputs gives to the hidden neurons, for the whole batch,
2. computes the logits of its share of the samples, and the gradient by the hidden neurons,
3. changes its share of W1 (by inputs) and of W2 (by outputs).

What the others need of it lies in device memory too, and all wait for each other after 1 and 2.
What pads a block is zero and has no gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fissile.bank.gpu.kernels import _BETA1, _BETA2, _adam, _loss, _place


@triton.jit  # type: ignore[untyped-decorator]
def _meet(counter, goal, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all programs of the network are here; what they have written is seen from now."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        here = tl.atomic_add(counter, 1, sem="acq_rel") + 1
        while here < goal:
            here = tl.atomic_add(counter, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def _halves(a):  # type: ignore[no-untyped-def]
    """Cut float32 numbers into the bits that a tensor core reads, and the rest."""
    high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, a - high


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a, b, total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a @ b + total: of three TF32 products, exact to about 21 bits, or of one."""
    if PRECISION == "tf32x3":
        a, a_low = _halves(a)
        b, b_low = _halves(b)
        total = tl.dot(a_low, b, total, input_precision="tf32")
        total = tl.dot(a, b_low, total, input_precision="tf32")
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w1, sample, first, hidden,
    COUNT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DB: tl.constexpr, HB: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what some inputs of the samples give to a block of hidden neurons, (HB, ROWS)."""
    d = tl.arange(0, DB)
    total = tl.zeros((HB, ROWS), tl.float32)
    for number in range(COUNT):
        at = first + number * DB + d
        weight = tl.load(w1 + hidden[:, None] * D + at[None, :])
        block = tl.load(x + sample[None, :] * D + at[:, None]).to(tl.float32)
        total = _dot(weight, block, total, PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _step(p_, m_, v_, at, g, here, mask_, l1, l2, rate, spread, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make a step of Adam on some weights, penalties included, where they exist."""
    p = tl.load(p_ + at, here, other=0.0, cache_modifier=".cg")
    g += l2 * p + tl.where(p > 0, l1, tl.where(p < 0, -l1, 0.0))
    if MASK:
        g = tl.where(tl.load(mask_ + at, here, other=0) != 0, g, 0.0)
    m, v = tl.load(m_ + at, here, other=0.0), tl.load(v_ + at, here, other=0.0)
    p, m, v = _adam(p, g, m, v, rate, spread)
    tl.store(p_ + at, p, here)
    tl.store(m_ + at, m, here)
    tl.store(v_ + at, v, here)


# Alignment must not choose the code, or a slice of a stack might round differently from the stack.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["power_", "lr_", "l1_", "l2_", "which_", "keys_", "loss_"],
)
def epoch_kernel(  # type: ignore[no-untyped-def]
    w1_, b1_, w2_, b2_, m_w1_, m_b1_, m_w2_, m_b2_, v_w1_, v_b1_, v_w2_, v_b2_,
    mask1_, mask2_, power_, lr_, l1_, l2_, x_, y_, which_, keys_,
    sums_, hidden_, da_, dz_, target_, counter_, loss_,
    N: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DB: tl.constexpr, HB: tl.constexpr, CP: tl.constexpr,
    PROGRAMS: tl.constexpr, MASK1: tl.constexpr, MASK2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Train the network of this program for an epoch; each program tells the loss of its share."""
    me, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, d, h, c = tl.arange(0, ROWS), tl.arange(0, DB), tl.arange(0, HB), tl.arange(0, CP)
    steps: tl.constexpr = (N + B - 1) // B
    count: tl.constexpr = D // DB // PROGRAMS  # blocks of inputs
    tiles: tl.constexpr = max(1, ROWS // TILE // PROGRAMS)  # of samples
    some: tl.constexpr = max(16, CP // PROGRAMS)  # outputs
    first = part * (count * DB)
    mine = part * some + tl.arange(0, some)

    w1_, m_w1_, v_w1_ = w1_ + me * (H * D), m_w1_ + me * (H * D), v_w1_ + me * (H * D)
    w2_, m_w2_, v_w2_ = w2_ + me * (C * H), m_w2_ + me * (C * H), v_w2_ + me * (C * H)
    b1_, m_b1_, v_b1_ = b1_ + me * H, m_b1_ + me * H, v_b1_ + me * H
    b2_, m_b2_, v_b2_ = b2_ + me * C, m_b2_ + me * C, v_b2_ + me * C
    mask1_, mask2_ = mask1_ + me * (H * D), mask2_ + me * (C * H)
    sums_ += me * (PROGRAMS * ROWS * H)
    hidden_, da_, dz_ = hidden_ + me * (ROWS * H), da_ + me * (ROWS * H), dz_ + me * (ROWS * CP)
    target_ += (me * PROGRAMS + part) * ROWS
    lr, l1, l2 = tl.load(lr_ + me), tl.load(l1_ + me), 2 * tl.load(l2_ + me)
    power1, power2 = tl.load(power_ + 2 * me), tl.load(power_ + 2 * me + 1)  # float64

    set_ = tl.load(which_ + me).to(tl.int64)
    x, y = x_ + set_ * (N * D), y_ + set_ * N
    key = keys_ + me * 8
    m0, a0 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    m1, a1 = tl.load(key + 2).to(tl.uint32), tl.load(key + 3).to(tl.uint32)
    m2, a2 = tl.load(key + 4).to(tl.uint32), tl.load(key + 5).to(tl.uint32)
    m3, a3 = tl.load(key + 6).to(tl.uint32), tl.load(key + 7).to(tl.uint32)

    loss_of_row = tl.zeros((TILE,), tl.float32)
    for step in range(steps):
        share = 1.0 / tl.minimum(tl.cast(N - step * B, tl.float32), 1.0 * B)
        sample = _place(step * B + rows, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT)
        tl.store(target_ + rows, tl.load(y + sample))
        tl.debug_barrier()  # the last step's W1 is written
        for block in range(0, H, HB):
            total = _product(x, w1_, sample, first, block + h, count, D, ROWS, DB, HB, PRECISION)
            at_hidden = (block + h)[:, None] * ROWS + rows[None, :]
            tl.store(sums_ + part * (ROWS * H) + at_hidden, total)
        _meet(counter_ + me, (2 * step + 1) * PROGRAMS, PROGRAMS)

        for tile in range(tiles):
            row = (part * tiles + tile) * TILE + tl.arange(0, TILE)
            there = row < ROWS
            real = (row < B) & (step * B + row < N)
            z = tl.load(b2_ + c, c < C, other=float("-inf"), cache_modifier=".cg")[None, :]
            z = z + tl.zeros((TILE, CP), tl.float32)
            for block in range(0, H, HB):
                at_some = (block + h)[None, :] * ROWS + row[:, None]
                value = tl.load(b1_ + block + h, cache_modifier=".cg")[None, :]
                value = value + tl.zeros((TILE, HB), tl.float32)
                for other in tl.static_range(PROGRAMS):
                    part_of_it = sums_ + other * (ROWS * H) + at_some
                    value += tl.load(part_of_it, there[:, None], other=0.0, cache_modifier=".cg")
                value = tl.where(value <= 0, 0.0, value)  # relu; it hands a NaN on, as torch does
                tl.store(hidden_ + at_some, value, there[:, None])
                at_w2 = c[None, :] * H + (block + h)[:, None]
                weight = tl.load(w2_ + at_w2, c[None, :] < C, other=0.0, cache_modifier=".cg")
                z = _dot(value, weight, z, PRECISION)
            loss, dz = _loss(z, tl.load(target_ + row, there, other=0), real, share, C, CP)
            loss_of_row += tl.where(real, loss, 0.0)
            tl.store(dz_ + row[:, None] * CP + c[None, :], dz, there[:, None])
            tl.debug_barrier()  # the hidden neurons of this tile are written
            for block in range(0, H, HB):
                at_w2 = c[None, :] * H + (block + h)[:, None]
                weight = tl.load(w2_ + at_w2, c[None, :] < C, other=0.0, cache_modifier=".cg")
                dh = _dot(dz, tl.trans(weight), tl.zeros((TILE, HB), tl.float32), PRECISION)
                at_some = (block + h)[None, :] * ROWS + row[:, None]
                value = tl.load(hidden_ + at_some, there[:, None], other=0.0, cache_modifier=".cg")
                tl.store(da_ + at_some, tl.where(value > 0, dh, 0.0), there[:, None])
        _meet(counter_ + me, (2 * step + 2) * PROGRAMS, PROGRAMS)

        power1 *= _BETA1
        power2 *= _BETA2
        rate = lr / (1 - power1).to(tl.float32)
        spread = 1 / tl.sqrt((1 - power2).to(tl.float32))
        if part * some < C:
            is_mine = mine < C
            at_dz = rows[:, None] * CP + mine[None, :]
            my_dz = tl.load(dz_ + at_dz, is_mine[None, :], other=0.0, cache_modifier=".cg")
            g_b2 = tl.sum(my_dz, axis=0)
            _step(b2_, m_b2_, v_b2_, mine, g_b2, is_mine, b2_, 0.0, l2, rate, spread, False)
            for block in range(0, H, HB):
                at_hidden = (block + h)[:, None] * ROWS + rows[None, :]
                hidden = tl.load(hidden_ + at_hidden, cache_modifier=".cg")
                g = _dot(hidden, my_dz, tl.zeros((HB, some), tl.float32), PRECISION)
                at_mine, here = mine[None, :] * H + (block + h)[:, None], is_mine[None, :]
                _step(w2_, m_w2_, v_w2_, at_mine, g, here, mask2_, 0.0, l2, rate, spread, MASK2)
        for block in range(0, H, HB):
            da = tl.load(da_ + (block + h)[:, None] * ROWS + rows[None, :], cache_modifier=".cg")
            if (block // HB) % PROGRAMS == part:
                g_b1 = tl.sum(da, axis=1)
                _step(b1_, m_b1_, v_b1_, block + h, g_b1, h < HB, b1_, 0.0, l2, rate, spread, False)
            for number in range(count):
                inputs = first + number * DB + d
                samples = tl.load(x + sample[:, None] * D + inputs[None, :]).to(tl.float32)
                g_w1 = _dot(da, samples, tl.zeros((HB, DB), tl.float32), PRECISION)
                at_w1, here_too = (block + h)[:, None] * D + inputs[None, :], (h < HB)[:, None]
                _step(w1_, m_w1_, v_w1_, at_w1, g_w1, here_too, mask1_, l1, l2, rate, spread, MASK1)
    tl.store(loss_ + me * PROGRAMS + part, tl.sum(loss_of_row, axis=0) / N)


@triton.jit(do_not_specialize_on_alignment=["which_", "right_"])  # type: ignore[untyped-decorator]
def guess_kernel(  # type: ignore[no-untyped-def]
    w1_, b1_, w2_, b2_, x_, y_, which_, right_,
    N: tl.constexpr, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, DB: tl.constexpr, HB: tl.constexpr, CP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Count which of this program's samples its network guesses rightly."""
    me, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    set_ = tl.load(which_ + me).to(tl.int64)
    x, w1 = x_ + set_ * (N * D), w1_ + me * (H * D)
    h, c = tl.arange(0, HB), tl.arange(0, CP)
    sample = part * ROWS + tl.arange(0, ROWS)
    there = sample < N
    sample = tl.where(there, sample, 0)
    z = tl.load(b2_ + me * C + c, c < C, other=float("-inf"))[None, :]
    z = z + tl.zeros((ROWS, CP), tl.float32)
    for block in range(0, H, HB):
        total = _product(x, w1, sample, 0, block + h, D // DB, D, ROWS, DB, HB, PRECISION)
        total = tl.trans(total) + tl.load(b1_ + me * H + block + h)[None, :]
        at = me * (C * H) + c[None, :] * H + (block + h)[:, None]
        weight = tl.load(w2_ + at, c[None, :] < C, other=0.0)
        z = _dot(tl.where(total <= 0, 0.0, total), weight, z, PRECISION)
    right = there & (tl.argmax(z, axis=1) == tl.load(y_ + set_ * N + sample))
    tl.store(right_ + me * tl.num_programs(1) + part, tl.sum(right.to(tl.int32), axis=0))
