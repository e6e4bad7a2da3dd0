"""The kernels of a packed partitioned layer: the children's sums out of the parents' weights.

A weight's sign is flipped by each combination of the bits of its owner. On 16-bit weights that
takes one shift per bit and one logical instruction per combination, for two weights at a time. The
sums of these products are the Walsh transform of the children's sums, and a few additions undo it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def finished(a, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply an activation in float32; a NaN stays one, as in torch."""
    if ACTIVATION == "relu":
        a = tl.where(a <= 0, 0.0, a)
    elif ACTIVATION == "gelu":
        a = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif ACTIVATION == "silu":
        a = a * tl.sigmoid(a)
    return a


# --- weights with flipped signs


@triton.jit  # type: ignore[untyped-decorator]
def _flipped(w, top, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Flip the sign of the weights whose number has the top bit."""
    if ASSEMBLY:  # two at a time: w ^ (top & 0x80008000), which is lop3's table 0x78
        flipped = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x80008000, 0x78;", "=r,r,r", [w, top], w.dtype, True, 2
        )
    elif w.dtype.primitive_bitwidth == 32:
        flipped = (w.to(tl.uint32, bitcast=True) ^ (top & 0x80000000)).to(w.dtype, bitcast=True)
    else:
        flipped = (w.to(tl.uint16, bitcast=True) ^ (top & 0x8000)).to(w.dtype, bitcast=True)
    return flipped


@triton.jit  # type: ignore[untyped-decorator]
def _top_of_weight(w, BIT: tl.constexpr, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whole numbers as wide as the weights whose top bit is a low one of the weights."""
    if ASSEMBLY:  # two at a time; what one shifts into the other is below its top bit
        code: tl.constexpr = f"shl.b32 $0, $1, {15 - BIT};"
        top = tl.inline_asm_elementwise(code, "=r,r", [w], tl.uint16, True, 2)
    elif w.dtype.primitive_bitwidth == 32:
        top = w.to(tl.uint32, bitcast=True) << (31 - BIT)
    else:
        top = w.to(tl.uint16, bitcast=True) << (15 - BIT)
    return top


@triton.jit
def _top_of_owner(owner, w):  # type: ignore[no-untyped-def]
    """Return whole numbers as wide as the weights with the top bits of 32-bit numbers."""
    return owner if w.dtype.primitive_bitwidth == 32 else (owner >> 16).to(tl.uint16)


@triton.jit  # type: ignore[untyped-decorator]
def flips(w, owners, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights as they are, and flipped by each combination of bits of their owners.

    The bits of the owners are on top of 32-bit numbers, or in the weights if ``owners`` is empty.
    Assembly is for 16-bit weights on a GPU; Triton's interpreter has none.
    """
    every = (w,)
    for t in tl.static_range(BITS):
        top = _top_of_owner(owners[t], w) if len(owners) > 0 else _top_of_weight(w, t, ASSEMBLY)
        for j in tl.static_range(2**t):
            every = every + (_flipped(every[j], top, ASSEMBLY),)  # type: ignore[assignment]  # noqa: RUF005
    return every


@triton.jit  # type: ignore[untyped-decorator]
def dot(w, x, total, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a product of matrices to their sum, with float32 as exact as it is."""
    if EXACT:  # Triton's interpreter multiplies the bit patterns of bfloat16
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, x, total, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def dots(w, x, s, BITS: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the product of each of the weights to the sum of its own."""
    sums = ()
    for j in tl.static_range(2**BITS):
        sums = sums + (dot(w[j], x, s[j], EXACT),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def zeros(SHAPE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sums of nothing."""
    sums = ()
    for _ in tl.static_range(2**BITS):
        sums = sums + (tl.zeros(SHAPE, tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def unfolded(s, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the children's sums, (parents, samples, children); a first dimension is summed.

    That comes last, once for all children: it makes warps wait for each other.
    """
    s0, s1 = s[0] + s[1], s[0] - s[1]
    if BITS == 1:
        sums = tl.join(s0, s1)
    else:
        s2, s3 = s[2] + s[3], s[2] - s[3]
        s0, s1, s2, s3 = s0 + s2, s1 + s3, s0 - s2, s1 - s3
        if BITS == 2:
            sums = tl.join(tl.join(s0, s2), tl.join(s1, s3))
        else:
            s4, s5, s6, s7 = s[4] + s[5], s[4] - s[5], s[6] + s[7], s[6] - s[7]
            s4, s5, s6, s7 = s4 + s6, s5 + s7, s4 - s6, s5 - s7
            even = tl.join(tl.join(s0 + s4, s0 - s4), tl.join(s2 + s6, s2 - s6))
            odd = tl.join(tl.join(s1 + s5, s1 - s5), tl.join(s3 + s7, s3 - s7))
            sums = tl.join(even, odd)
    if len(s0.shape) == 3:
        shape: tl.constexpr = (s0.shape[0], s0.shape[1], s0.shape[2], 2**BITS)
        sums = _summed(tl.permute(tl.reshape(sums, shape), (1, 2, 3, 0)))
    else:
        sums = tl.reshape(sums, (s0.shape[0], s0.shape[1], 2**BITS))
    return sums * (1 / 2**BITS)


@triton.jit
def _summed(sums):  # type: ignore[no-untyped-def]
    """Sum over the last dimension, pair by pair: so each lane gets both, and adds them itself."""
    a: tl.constexpr = sums.shape[0]
    b: tl.constexpr = sums.shape[1]
    c: tl.constexpr = sums.shape[2]
    half: tl.constexpr = sums.shape[3] // 2
    one, other = tl.split(tl.reshape(sums, (a, b, c, half, 2)))
    both = one + other
    return _summed(both) if half > 1 else tl.reshape(both, (a, b, c))


# --- the layer


@triton.jit  # type: ignore[untyped-decorator]
def _owners(  # type: ignore[no-untyped-def]
    planes_, rows, words, shifts, D: tl.constexpr, WHOLE: tl.constexpr
):
    """Read a bit of the owners of 32 weights for each word; it goes to the top of a number.

    `shifts` are 31 … 0, and were read from memory: an arange here would keep the compiler from
    doing all this where the matrix units want the weights, and each flipped copy of them would
    have to get there on its own.
    """
    in_plane: tl.constexpr = (D + 7) // 8
    if planes_.dtype.element_ty == tl.int32:
        in_row: tl.constexpr = in_plane // 4
        at = _cells(rows * in_row, words)
        if WHOLE:
            word = tl.load(planes_ + at)
        else:
            word = tl.load(planes_ + at, mask=_cells(rows * 0, words) < in_row, other=0)
        word = word.to(tl.uint32, bitcast=True)
    else:
        word = _word_of_bytes(planes_ + _cells(rows * in_plane, words * 4), words * 4, in_plane)
    if len(words.shape) == 2:
        bits = word[:, :, :, None] << shifts[None, None, None, :]
        bits = tl.reshape(bits, (word.shape[0], word.shape[1], word.shape[2] * 32))
    else:
        bits = word[:, :, None] << shifts[None, None, :]
        bits = tl.reshape(bits, (word.shape[0], word.shape[1] * 32))
    return bits


@triton.jit  # type: ignore[untyped-decorator]
def _word_of_bytes(at, first, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read words from any byte on; what lies beyond the row is 0."""
    word = tl.zeros(at.shape, tl.uint32)
    for place in tl.static_range(4):
        there = _cells(tl.zeros((at.shape[-2],), tl.int32), first + place) < IN_ROW
        word |= tl.load(at + place, mask=there, other=0).to(tl.uint32) << (8 * place)
    return word


@triton.jit
def _cells(rows, cols):  # type: ignore[no-untyped-def]
    """Return rows + cols for every pair; where there are several runs of cols, they come first."""
    if len(cols.shape) == 2:
        cells = rows[None, :, None] + cols[:, None, :]
    else:
        cells = rows[:, None] + cols[None, :]
    return cells


@triton.jit  # type: ignore[untyped-decorator]
def _columns(BD: tl.constexpr, DEEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's columns, in DEEP runs."""
    if DEEP > 1:
        cols = (tl.arange(0, DEEP) * BD)[:, None] + tl.arange(0, BD)[None, :]
    else:
        cols = tl.arange(0, BD)
    return cols


@triton.jit(do_not_specialize=["B"])  # type: ignore[untyped-decorator]
def partitioned_kernel(  # type: ignore[no-untyped-def]
    x_, w_, planes_, shifts_, bias_, y_, B, H,
    D: tl.constexpr, ALPHA: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ASSEMBLY: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr, BB: tl.constexpr, TWICE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Compute the children of BH parents for BB samples, or twice BB.

    The inputs of a tile are DEEP runs of BD: where there are several, each is multiplied by a warp
    of its own, and the sums meet at the end.
    """
    step: tl.constexpr = BD * DEEP
    rows = tl.program_id(1) * BH + tl.arange(0, BH)
    samples = tl.program_id(0) * (2 * BB if TWICE else BB) + tl.arange(0, BB)
    cols = _columns(BD, DEEP)
    # What is beyond the end reads the last row again, and is not stored.
    at_rows = tl.minimum(rows, H - 1).to(tl.int64)
    w_at = w_ + _cells(at_rows * D, cols)
    x_at = x_ + _cells(samples.to(tl.int64) * D, cols)
    x_samples = _cells(samples, cols * 0)
    if PLANE:
        in_plane: tl.constexpr = (D + 7) // 8
        # A plane of words is a quarter as long as one of bytes.
        length: tl.constexpr = in_plane // 4 if planes_.dtype.element_ty == tl.int32 else in_plane
        shifts = tl.load(shifts_ + tl.arange(0, 32)).to(tl.uint32)
        in_step = _columns(BD // 32, DEEP)
    s = zeros((DEEP, BH, BB) if DEEP > 1 else (BH, BB), BITS)
    s2 = zeros((DEEP, BH, BB) if DEEP > 1 else (BH, BB), BITS)
    for d in range(0, D, step):
        if D % step == 0:
            w = tl.load(w_at, eviction_policy="evict_first")
            there = x_samples < B
            there2 = x_samples + BB < B
        else:
            w = tl.load(w_at, mask=_cells(rows * 0, cols + d) < D, other=0.0)
            near = _cells(samples * 0, cols + d) < D
            there = near & (x_samples < B)
            there2 = near & (x_samples + BB < B)
        owners = ()
        if PLANE:
            words = d // 32 + in_step
            for t in tl.static_range(BITS):
                plane_ = planes_ + t * H.to(tl.int64) * length
                read = _owners(plane_, at_rows, words, shifts, D, D % step == 0)
                owners = owners + (read,)  # type: ignore[assignment]  # noqa: RUF005
        ws = flips(w, owners, BITS, ASSEMBLY)
        x = tl.load(x_at, mask=there, other=0.0)
        s = dots(ws, _turned(x), s, BITS, not ASSEMBLY)
        if TWICE:
            x = tl.load(x_at + BB * D, mask=there2, other=0.0)
            s2 = dots(ws, _turned(x), s2, BITS, not ASSEMBLY)
        w_at += step
        x_at += step

    _store(unfolded(s, BITS), rows, samples, bias_, y_, B, H, ALPHA, BIAS, ACTIVATION)
    if TWICE:
        _store(unfolded(s2, BITS), rows, samples + BB, bias_, y_, B, H, ALPHA, BIAS, ACTIVATION)


@triton.jit
def _turned(x):  # type: ignore[no-untyped-def]
    """Return a tile with its samples last."""
    return tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else tl.permute(x, (1, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    sums, rows, samples, bias_, y_, B, H,
    ALPHA: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add the biases, apply the activation and store (parents, samples, children)."""
    child = tl.arange(0, sums.shape[2])
    outputs = rows[:, None] * ALPHA + child[None, :]
    there = (rows < H)[:, None] & (child < ALPHA)[None, :]
    if BIAS:
        sums += tl.load(bias_ + outputs, mask=there, other=0.0).to(tl.float32)[:, None, :]
    at = (samples.to(tl.int64) * H * ALPHA)[None, :, None] + outputs[:, None, :]
    out = finished(sums, ACTIVATION).to(y_.dtype.element_ty)
    tl.store(y_ + at, out, mask=there[:, None, :] & (samples < B)[None, :, None])


@triton.jit  # type: ignore[untyped-decorator]
def partitioned_written_kernel(  # type: ignore[no-untyped-def]
    w_, planes_, out_, H,
    D: tl.constexpr, ALPHA: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Write the rows of the children of one parent."""
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = cols < D
    w = tl.load(w_ + row * D + cols, mask=inside, other=0.0)
    if PLANE:
        in_plane: tl.constexpr = (D + 7) // 8
        at = planes_ + row * in_plane + cols // 8
        owner = tl.zeros((BD,), tl.int32)
        for t in tl.static_range(BITS):
            byte = tl.load(at + t * H.to(tl.int64) * in_plane, mask=inside, other=0)
            owner |= ((byte.to(tl.int32) >> (cols % 8)) & 1) << t
    elif w.dtype.primitive_bitwidth == 32:
        owner = w.to(tl.int32, bitcast=True) & (2**BITS - 1)
    else:
        owner = w.to(tl.int16, bitcast=True) & (2**BITS - 1)
    for k in tl.static_range(ALPHA):
        tl.store(out_ + (row * ALPHA + k) * D + cols, tl.where(owner == k, w, 0.0), mask=inside)
