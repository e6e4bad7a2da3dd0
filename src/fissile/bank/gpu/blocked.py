"""Kernels for networks that do not fit on chip: their programs walk W1 in blocks, step after step.

Weights and moments stay in device memory, which for dozens of networks is the L2 cache. A program
owns some of a network's inputs: what it alone reads and writes of W1. Once a step the programs of a
network meet, to add up what their inputs give to the hidden neurons. All then compute the logits;
each changes its share of W2, in the second of two copies, as its partners still read the first.

Blocks of W1 are transposed, (inputs, hidden), and those of W2, (hidden, outputs), as in
``fissile.bank.gpu.kernels``. What pads a block is zero and has no gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fissile.bank.gpu.kernels import _BETA1, _BETA2, _adam, _load, _loss, _place, _store


@triton.jit
def _meet(counter, goal):  # type: ignore[no-untyped-def]
    """Wait until all programs of the network have been here, and see what they have written."""
    tl.debug_barrier()
    here = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while here < goal:
        here = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w1, sample, first, hidden,
    COUNT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DB: tl.constexpr, HB: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what some inputs of the samples give to a block of hidden neurons, (ROWS, HB)."""
    d = tl.arange(0, DB)
    total = tl.zeros((ROWS, HB), tl.float32)
    for number in range(COUNT):
        begin = first + number * DB
        block = tl.load(x + sample[:, None] * D + (begin + d)[None, :]).to(tl.float32)
        weight = tl.load(w1 + hidden[None, :] * D + (begin + d)[:, None])
        total = tl.dot(block, weight, total, input_precision=PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _gathered(sums, at, bias, size: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return relu of the programs' sums and the bias; it hands a NaN on, as torch does."""
    total = bias[None, :] + tl.load(sums + at, cache_modifier=".cg")
    for program in tl.static_range(1, PROGRAMS):
        total += tl.load(sums + program * size + at, cache_modifier=".cg")
    return tl.where(total <= 0, 0.0, total)


# Alignment must not choose the code, or a slice of a stack might round differently from the stack.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["power_", "lr_", "l1_", "l2_", "which_", "keys_", "loss_"],
)
def epoch_kernel(  # type: ignore[no-untyped-def]
    w1_, b1_, w2_, b2_, m_w1_, m_b1_, m_w2_, m_b2_, v_w1_, v_b1_, v_w2_, v_b2_,
    mask1_, mask2_, power_, lr_, l1_, l2_, x_, y_, which_, keys_, sums_, counter_, loss_,
    N: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, DB: tl.constexpr, HB: tl.constexpr, CP: tl.constexpr,
    PROGRAMS: tl.constexpr, MASK1: tl.constexpr, MASK2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Train the network of this program for an epoch. W2 ends in copy ``steps % 2``."""
    me, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    networks = tl.num_programs(0).to(tl.int64)
    rows, d, h, c = tl.arange(0, ROWS), tl.arange(0, DB), tl.arange(0, HB), tl.arange(0, CP)
    steps: tl.constexpr = (N + B - 1) // B
    size: tl.constexpr = ROWS * H
    count: tl.constexpr = D // DB // PROGRAMS  # blocks of inputs
    first = part * (count * DB)

    w1_, m_w1_, v_w1_ = w1_ + me * (H * D), m_w1_ + me * (H * D), v_w1_ + me * (H * D)
    mask1_, mask2_ = mask1_ + me * (H * D), mask2_ + me * (C * H)
    m_w2_, v_w2_ = m_w2_ + me * (C * H), v_w2_ + me * (C * H)
    # Every program has a b1 and a b2 of its own: they all come to the same.
    own = me * PROGRAMS + part
    b1_, m_b1_, v_b1_ = b1_ + own * H, m_b1_ + own * H, v_b1_ + own * H
    b2_, m_b2_, v_b2_ = b2_ + own * C, m_b2_ + own * C, v_b2_ + own * C
    is_b2 = c < C
    b2, m_b2, v_b2 = _load(b2_, m_b2_, v_b2_, c, is_b2)
    lr, l1, l2 = tl.load(lr_ + me), tl.load(l1_ + me), 2 * tl.load(l2_ + me)
    power1, power2 = tl.load(power_ + 2 * me), tl.load(power_ + 2 * me + 1)  # float64

    set_ = tl.load(which_ + me).to(tl.int64)
    x, y = x_ + set_ * (N * D), y_ + set_ * N
    key = keys_ + me * 8
    m0, a0 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    m1, a1 = tl.load(key + 2).to(tl.uint32), tl.load(key + 3).to(tl.uint32)
    m2, a2 = tl.load(key + 4).to(tl.uint32), tl.load(key + 5).to(tl.uint32)
    m3, a3 = tl.load(key + 6).to(tl.uint32), tl.load(key + 7).to(tl.uint32)

    loss_of_row = tl.zeros((ROWS,), tl.float32)
    for step in range(steps):
        position = step * B + rows
        real = (rows < B) & (position < N)
        share = 1.0 / tl.minimum(tl.cast(N - step * B, tl.float32), 1.0 * B)
        sample = _place(position, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT)
        target = tl.load(y + sample)
        turn = step % 2
        sums = sums_ + (me * 2 + turn) * (PROGRAMS * size)
        w2 = w2_ + (turn * networks + me) * (C * H)
        new_w2 = w2_ + ((1 - turn) * networks + me) * (C * H)

        # What this program's inputs give, and, when all have given theirs, the logits.
        tl.debug_barrier()  # the last step's W1 is written
        for block in range(0, H, HB):
            total = _product(x, w1_, sample, first, block + h, count, D, ROWS, DB, HB, PRECISION)
            tl.store(sums + part * size + rows[:, None] * H + (block + h)[None, :], total)
        if PROGRAMS > 1:
            _meet(counter_ + me, (step + 1) * PROGRAMS)
        else:
            tl.debug_barrier()
        z = tl.zeros((ROWS, CP), tl.float32) + b2[None, :]
        for block in range(0, H, HB):
            at = rows[:, None] * H + (block + h)[None, :]
            hidden = _gathered(sums, at, tl.load(b1_ + block + h), size, PROGRAMS)
            at_w2 = c[None, :] * H + (block + h)[:, None]
            weight = tl.load(w2 + at_w2, mask=is_b2[None, :], other=0.0, cache_modifier=".cg")
            z = tl.dot(hidden, weight, z, input_precision=PRECISION)
        z = tl.where(is_b2[None, :], z, float("-inf"))
        loss, dz = _loss(z, target, real, share, C, CP)
        loss_of_row += tl.where(real, loss, 0.0)

        power1 *= _BETA1
        power2 *= _BETA2
        rate = lr / (1 - power1).to(tl.float32)
        spread = 1 / tl.sqrt((1 - power2).to(tl.float32))
        b2, m_b2, v_b2 = _adam(b2, tl.sum(dz, axis=0) + l2 * b2, m_b2, v_b2, rate, spread)
        for block in range(0, H, HB):
            at = rows[:, None] * H + (block + h)[None, :]
            b1, m_b1, v_b1 = _load(b1_, m_b1_, v_b1_, block + h, h < HB)
            hidden = _gathered(sums, at, b1, size, PROGRAMS)
            at_w2 = c[None, :] * H + (block + h)[:, None]
            weight = tl.load(w2 + at_w2, mask=is_b2[None, :], other=0.0, cache_modifier=".cg")
            dh = tl.dot(dz, tl.trans(weight), input_precision=PRECISION)
            da = tl.where(hidden > 0, dh, 0.0)
            if (block // HB) % PROGRAMS == part:
                g = tl.dot(tl.trans(hidden), dz, input_precision=PRECISION) + l2 * weight
                if MASK2:
                    g = tl.where(tl.load(mask2_ + at_w2, is_b2[None, :], other=0) != 0, g, 0.0)
                m = tl.load(m_w2_ + at_w2, is_b2[None, :], other=0.0)
                v = tl.load(v_w2_ + at_w2, is_b2[None, :], other=0.0)
                weight, m, v = _adam(weight, g, m, v, rate, spread)
                tl.store(new_w2 + at_w2, weight, is_b2[None, :])
                tl.store(m_w2_ + at_w2, m, is_b2[None, :])
                tl.store(v_w2_ + at_w2, v, is_b2[None, :])
            b1, m_b1, v_b1 = _adam(b1, tl.sum(da, axis=0) + l2 * b1, m_b1, v_b1, rate, spread)
            tl.debug_barrier()  # every thread has read b1
            _store(b1_, m_b1_, v_b1_, block + h, h < HB, b1, m_b1, v_b1)
            for number in range(count):
                input = first + number * DB + d
                xb = tl.load(x + sample[:, None] * D + input[None, :]).to(tl.float32)
                at_w1 = (block + h)[None, :] * D + input[:, None]
                w = tl.load(w1_ + at_w1)
                m = tl.load(m_w1_ + at_w1)
                v = tl.load(v_w1_ + at_w1)
                g = tl.dot(tl.trans(xb), da, input_precision=PRECISION)
                g += l2 * w + tl.where(w > 0, l1, tl.where(w < 0, -l1, 0.0))
                if MASK1:
                    g = tl.where(tl.load(mask1_ + at_w1) != 0, g, 0.0)
                w, m, v = _adam(w, g, m, v, rate, spread)
                tl.store(w1_ + at_w1, w)
                tl.store(m_w1_ + at_w1, m)
                tl.store(v_w1_ + at_w1, v)
    tl.debug_barrier()
    _store(b2_, m_b2_, v_b2_, c, is_b2, b2, m_b2, v_b2)
    if part == 0:
        tl.store(loss_ + me, tl.sum(loss_of_row, axis=0) / N)


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
    h, c = tl.arange(0, HB), tl.arange(0, CP)
    sample = part * ROWS + tl.arange(0, ROWS)
    there = sample < N
    sample = tl.where(there, sample, 0)
    z = tl.zeros((ROWS, CP), tl.float32)
    for block in range(0, H, HB):
        x, w1 = x_ + set_ * (N * D), w1_ + me * (H * D)
        total = _product(x, w1, sample, 0, block + h, D // DB, D, ROWS, DB, HB, PRECISION)
        total += tl.load(b1_ + me * H + block + h)[None, :]
        at = me * (C * H) + c[None, :] * H + (block + h)[:, None]
        weight = tl.load(w2_ + at, mask=c[None, :] < C, other=0.0)
        z = tl.dot(tl.where(total <= 0, 0.0, total), weight, z, input_precision=PRECISION)
    z += tl.load(b2_ + me * C + c, mask=c < C, other=float("-inf"))[None, :]
    right = there & (tl.argmax(z, axis=1) == tl.load(y_ + set_ * N + sample))
    tl.store(right_ + me * tl.num_programs(1) + part, tl.sum(right.to(tl.int32), axis=0))
