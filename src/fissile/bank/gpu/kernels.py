"""The kernel that trains one network in one program.

Tiles hold W1 and W2 transposed, (inputs, hidden) and (hidden, outputs): so a batch, (rows,
inputs), multiplies them as they are, and only the batch is transposed for the gradient. Whatever
pads a tile is zero and has no gradient: it stays zero by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fissile.bank.step import BETA1, BETA2, EPS, LOG_BETA1, LOG_BETA2

# A kernel reads a global only if it is declared constant.
_BETA1, _BETA2, _EPS = tl.constexpr(BETA1), tl.constexpr(BETA2), tl.constexpr(EPS)
_LOG_BETA1, _LOG_BETA2 = tl.constexpr(LOG_BETA1), tl.constexpr(LOG_BETA2)


@triton.jit  # type: ignore[untyped-decorator]
def _scrambled(position, m0, a0, m1, a1, m2, a2, m3, a3, BITS: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the rounds of `fissile._common.random` once, in 32 bits."""
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
def _place(  # type: ignore[no-untyped-def]
    position, m0, a0, m1, a1, m2, a2, m3, a3, N: tl.constexpr, BITS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the samples at some positions of the order."""
    # What is beyond the end reads the first sample: a position within always ends within.
    position = tl.where(position < N, position, 0).to(tl.uint32)
    place = _scrambled(position, m0, a0, m1, a1, m2, a2, m3, a3, BITS, SHIFT)
    if 1 << BITS != N:
        # Asking all rows whether they are done costs as much as a few scrambles: ask rarely.
        while tl.max((place >= N).to(tl.int32), axis=0) > 0:
            for _ in tl.static_range(4):
                again = _scrambled(place, m0, a0, m1, a1, m2, a2, m3, a3, BITS, SHIFT)
                place = tl.where(place >= N, again, place)
    return place.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _samples(  # type: ignore[no-untyped-def]
    x, y, position, m0, a0, m1, a1, m2, a2, m3, a3,
    N: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Read the samples at some positions of the order: inputs (rows, DP) and targets (rows,)."""
    sample = _place(position, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT)
    d = tl.arange(0, DP)
    at = sample[:, None] * D + d[None, :]
    inputs = tl.load(x + at, mask=d[None, :] < D, other=0) if D != DP else tl.load(x + at)
    return inputs.to(tl.float32), tl.load(y + sample)


@triton.jit  # type: ignore[untyped-decorator]
def _hidden(x, w1, b1, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return relu(W1 x + b1); it hands a NaN on, as torch does."""
    a = tl.dot(x, w1, input_precision=PRECISION) + b1[None, :]
    return tl.where(a <= 0, 0.0, a)


@triton.jit  # type: ignore[untyped-decorator]
def _logits(hidden, w2, b2, C: tl.constexpr, CP: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return W2 h + b2: (rows,) for one output, else (rows, CP) with -inf in the padding."""
    if C == 1:
        z = tl.sum(hidden * w2[None, :], axis=1) + b2
    else:
        z = tl.dot(hidden, w2, input_precision=PRECISION) + b2[None, :]
        z = tl.where(tl.arange(0, CP)[None, :] < C, z, float("-inf"))
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _loss(z, y, real, share, C: tl.constexpr, CP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the loss of each row, and the gradient of the mean loss by the logits."""
    if C == 1:
        target = y.to(tl.float32)
        e = tl.exp(-tl.abs(z))
        loss = tl.where(z <= 0, 0.0, z) - z * target + tl.log(1 + e)
        dz = tl.where(z >= 0, 1.0, e) / (1 + e) - target
        dz = tl.where(real, dz * share, 0.0)
    else:
        chosen = tl.arange(0, CP)[None, :] == y[:, None]
        top = tl.max(z, axis=1)
        e = tl.exp(z - top[:, None])
        total = tl.sum(e, axis=1)
        loss = tl.log(total) + top - tl.sum(tl.where(chosen, z, 0.0), axis=1)
        dz = e / total[:, None] - chosen.to(tl.float32)
        dz = tl.where(real[:, None], dz * share, 0.0)
    return loss, dz


@triton.jit
def _load(p, m, v, at, here):  # type: ignore[no-untyped-def]
    """Read a parameter and its two moments, zero where there is none."""
    return (
        tl.load(p + at, mask=here, other=0.0),
        tl.load(m + at, mask=here, other=0.0),
        tl.load(v + at, mask=here, other=0.0),
    )


@triton.jit
def _store(p_, m_, v_, at, here, p, m, v):  # type: ignore[no-untyped-def]
    """Write a parameter and its two moments."""
    tl.store(p_ + at, p, mask=here)
    tl.store(m_ + at, m, mask=here)
    tl.store(v_ + at, v, mask=here)


@triton.jit
def _moments(g, m, v):  # type: ignore[no-untyped-def]
    """Return Adam's means of the gradient and of its square after a step."""
    m += (g - m) * (1 - _BETA1)
    v = v * _BETA2 + g * g * (1 - _BETA2)
    return m, v


@triton.jit
def _adam(p, g, m, v, rate, spread):  # type: ignore[no-untyped-def]
    """Make a step of Adam: rate is lr / (1 - beta1^t), spread is 1 / sqrt(1 - beta2^t)."""
    m, v = _moments(g, m, v)
    p -= rate * (m / (tl.sqrt(v) * spread + _EPS))
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
def train_kernel(  # type: ignore[no-untyped-def]
    w1_, b1_, w2_, b2_,
    m_w1_, m_b1_, m_w2_, m_b2_,
    v_w1_, v_b1_, v_w2_, v_b2_,
    mask1_, mask2_, step_, power_, lr_, l1_, l2_, orthogonal_,
    x_, y_, xt_, yt_, which_, keys_,
    loss_, correct_, finished_, epochs,
    N: tl.constexpr, TESTS: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
    MASK1: tl.constexpr, MASK2: tl.constexpr, ORTHOGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    w1, m_w1, v_w1 = _load(w1_, m_w1_, v_w1_, at_w1, has_w1)
    b1, m_b1, v_b1 = _load(b1_, m_b1_, v_b1_, h, is_b1)
    w2, m_w2, v_w2 = _load(w2_, m_w2_, v_w2_, at_w2, has_w2)
    b2, m_b2, v_b2 = _load(b2_, m_b2_, v_b2_, c, is_b2)
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
                xb, yb = _samples(
                    x, y, position, m0, a0, m1, a1, m2, a2, m3, a3, N, BITS, SHIFT, D, DP
                )

                # Forward, and the gradient of the mean loss by the logits.
                hidden = _hidden(xb, w1, b1, PRECISION)
                z = _logits(hidden, w2, b2, C, CP, PRECISION)
                loss, dz = _loss(z, yb, real, share, C, CP)
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

            power1 *= _BETA1
            power2 *= _BETA2
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
            _store(w1_, m_w1_, v_w1_, at_w1, is_w1, w1, m_w1, v_w1)
            _store(b1_, m_b1_, v_b1_, h, is_b1, b1, m_b1, v_b1)
            _store(w2_, m_w2_, v_w2_, at_w2, is_w2, w2, m_w2, v_w2)
            _store(b2_, m_b2_, v_b2_, c, is_b2, b2, m_b2, v_b2)
            right = tl.zeros((CHUNK,), tl.int32)
            for first in range(0, TESTS, CHUNK):
                row = first + rows
                is_x = (row[:, None] < TESTS) & (d[None, :] < D)
                xb = tl.load(xt + (row[:, None] * D + d[None, :]), mask=is_x, other=0)
                yb = tl.load(yt + row, mask=row < TESTS, other=-1)  # no guess is -1
                hidden = _hidden(xb.to(tl.float32), w1, b1, PRECISION)
                z = _logits(hidden, w2, b2, C, CP, PRECISION)
                guess = (z > 0).to(tl.int32) if one_output else tl.argmax(z, axis=1)
                right += (guess == yb).to(tl.int32)
            tl.store(loss_ + epoch, loss_sum / N)
            tl.store(correct_ + epoch, tl.sum(right, axis=0))
        done += alive.to(tl.int32)
    tl.store(step_ + me, step_count + tl.cast(done, tl.int64) * steps)
    tl.store(finished_ + me, done)


# --- steps of sparse and of convolutional networks


@triton.jit  # type: ignore[untyped-decorator]
def masked_adam_kernel(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, mask, lr, decay, penalty, unbias, per, total,
    MASKED: tl.constexpr, L1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a step of `fissile.bank.step.masked_adam`; a network has ``per`` weights."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < total
    network = at // per
    rate = tl.load(lr + network, here, 0.0)
    w = tl.load(weight + at, here, 0.0)
    g = tl.load(gradient + at, here, 0.0)
    if MASKED:
        on = tl.load(mask + at, here, 0) != 0
        g = tl.where(on, g, 0.0)
    m = tl.load(mean + at, here, 0.0)
    v = tl.load(square + at, here, 0.0)
    m = m + (1 - _BETA1) * (g - m)
    v = _BETA2 * v + (1 - _BETA2) * g * g
    root = tl.sqrt_rn(v / tl.load(unbias + 1)) + _EPS
    w = w * (1 - rate * tl.load(decay + network, here, 0.0))
    w = w - m / root * (rate / tl.load(unbias))
    if L1:
        left = tl.abs(w) - rate * tl.load(penalty + network, here, 0.0) / root
        w = tl.where(left > 0, tl.where(w > 0, left, -left), 0.0)
    if MASKED:
        w = tl.where(on, w, 0.0)
    tl.store(weight + at, w, here)
    tl.store(mean + at, m, here)
    tl.store(square + at, v, here)


@triton.jit  # type: ignore[untyped-decorator]
def logit_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, targets, smooth, gradient, plans, outputs, batch,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute :func:`fissile.bank.step.logit_gradient` for several outputs."""
    network = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, WIDE)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = (rows < outputs) & (columns < batch)
    at = rows * batch + columns
    size = outputs * batch
    z = tl.load(logits + network * size + at, here, float("-inf"))
    z = tl.where(columns < batch, z, 0.0)  # no column may be empty
    e = tl.exp(z - tl.max(z, 0)[None, :])
    share = e / tl.sum(e, 0)[None, :]
    y = tl.load(targets + network // plans * size + at, here, 0.0)
    spread = tl.load(smooth + network)
    off = (share - y * (1 - spread) - spread / outputs) / batch
    tl.store(gradient + network * size + at, off, here)


# Whatever the head's width, it is one program: a second could not be compiled while a graph is
# being recorded.
@triton.jit(do_not_specialize=["begin", "end", "kernels", "size"])  # type: ignore[untyped-decorator]
def flat_adam_kernel(  # type: ignore[no-untyped-def]
    weights, low, low_grads, grads, means, squares, counters, lr, decay, l1, begin, end, kernels,
    size, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a step of Adam on all weights of a convolutional network, which lie in one tensor.

    The first ``kernels`` weights are of convolutions: their gradients are of low precision. L1
    acts on the weights from ``begin`` to ``end``. COPY also rounds the kernels to low precision.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    step = (tl.load(counters + 1) + 1).to(tl.float64)
    # Powers of the betas from their logarithms, in double: in single, 1 - beta2 loses digits.
    rate = (lr / (1 - tl.exp(step * _LOG_BETA1))).to(tl.float32)
    root = tl.sqrt((1 - tl.exp(step * _LOG_BETA2)).to(tl.float32))
    p = tl.load(weights + at, mask=there, other=0.0)
    g = tl.load(low_grads + at, mask=at < kernels, other=0.0).to(tl.float32)
    g += tl.load(grads + at, mask=there & (at >= kernels), other=0.0) + decay * p
    sign = tl.where(p > 0, 1.0, tl.where(p < 0, -1.0, 0.0))
    g += tl.where((at >= begin) & (at < end), l1 * sign, 0.0)
    m = tl.load(means + at, mask=there, other=0.0)
    m, v = _moments(g, m, tl.load(squares + at, mask=there, other=0.0))
    p -= rate * (m / (tl.sqrt(v) / root + _EPS))
    tl.store(means + at, m, mask=there)
    tl.store(squares + at, v, mask=there)
    tl.store(weights + at, p, mask=there)
    if COPY:
        tl.store(low + at, p.to(low.dtype.element_ty), mask=at < kernels)
