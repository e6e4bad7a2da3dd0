"""A weight with its sign flipped by each combination of the bits of its owner.

On 16-bit weights it takes one shift per bit and one logical instruction per combination, for two
weights at a time: that is all that decoding costs. The sums of these products are the Walsh
transform of the children's sums, and a few additions undo it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot", "dots", "flips", "unfolded", "zeros"]

# Two weights in a register: a ^ (b & 0x80008000), which is lop3's table 0x78.
_FLIP = "lop3.b32 {}, {}, {}, 0x80008000, 0x78;"


def _assembly(bits: int, plane: bool) -> tuple[tl.constexpr, tl.constexpr]:
    """Return code that flips signs by the combinations 1 … 2^bits - 1, and its operands.

    Bit t of the owner is bit t of the weight, or the top bit of a 32-bit number of its own.
    """
    outputs = 2**bits - 1
    weight = f"${outputs}"
    lines = []
    for t in range(bits):
        if plane:  # the upper halves of two numbers
            first = outputs + 1 + 2 * t
            lines.append(f"prmt.b32 s{t}, ${first}, ${first + 1}, 0x7632;")
        else:
            lines.append(f"shl.b32 s{t}, {weight}, {15 - t};")
    for j in range(1, outputs + 1):
        top = j.bit_length() - 1
        before = j ^ (1 << top)
        lines.append(_FLIP.format(f"${j - 1}", f"${before - 1}" if before else weight, f"s{top}"))
    code = "{ .reg .b32 " + ", ".join(f"s{t}" for t in range(bits)) + "; " + " ".join(lines) + " }"
    return tl.constexpr(code), tl.constexpr(
        ",".join(["=&r"] * outputs + ["r"] * (1 + plane * 2 * bits))
    )


_INLINE1, _INLINE1_ = _assembly(1, plane=False)
_INLINE2, _INLINE2_ = _assembly(2, plane=False)
_INLINE3, _INLINE3_ = _assembly(3, plane=False)
_PLANE1, _PLANE1_ = _assembly(1, plane=True)
_PLANE2, _PLANE2_ = _assembly(2, plane=True)
_PLANE3, _PLANE3_ = _assembly(3, plane=True)


@triton.jit
def _flipped(w, top):  # type: ignore[no-untyped-def]
    """Flip the sign of the weights whose number has the top bit."""
    if w.dtype.primitive_bitwidth == 32:
        flipped = w.to(tl.uint32, bitcast=True) ^ (top & 0x80000000)
    else:
        flipped = w.to(tl.uint16, bitcast=True) ^ ((top >> 16) & 0x8000).to(tl.uint16)
    return flipped.to(w.dtype, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _tops(w, BIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers whose top bit is a low one of the weights."""
    if w.dtype.primitive_bitwidth == 32:
        pattern = w.to(tl.uint32, bitcast=True)
    else:
        pattern = w.to(tl.uint16, bitcast=True).to(tl.uint32)
    return pattern << (31 - BIT)


@triton.jit  # type: ignore[untyped-decorator]
def _flips_in_assembly(w, owners, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do two weights at a time."""
    PLANE: tl.constexpr = len(owners) > 0
    if BITS == 1:
        if PLANE:
            w1 = tl.inline_asm_elementwise(_PLANE1, _PLANE1_, [w, owners[0]], w.dtype, True, 2)
        else:
            w1 = tl.inline_asm_elementwise(_INLINE1, _INLINE1_, [w], w.dtype, True, 2)
        every = (w, w1)
    elif BITS == 2:
        if PLANE:
            w1, w2, w3 = tl.inline_asm_elementwise(
                _PLANE2,
                _PLANE2_,
                [w, owners[0], owners[1]],
                (w.dtype, w.dtype, w.dtype),
                True,
                2,
            )
        else:
            w1, w2, w3 = tl.inline_asm_elementwise(
                _INLINE2, _INLINE2_, [w], (w.dtype, w.dtype, w.dtype), True, 2
            )
        every = (w, w1, w2, w3)  # type: ignore[assignment]
    else:
        if PLANE:
            w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
                _PLANE3,
                _PLANE3_,
                [w, owners[0], owners[1], owners[2]],
                (w.dtype, w.dtype, w.dtype, w.dtype, w.dtype, w.dtype, w.dtype),
                True,
                2,
            )
        else:
            w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
                _INLINE3,
                _INLINE3_,
                [w],
                (w.dtype, w.dtype, w.dtype, w.dtype, w.dtype, w.dtype, w.dtype),
                True,
                2,
            )
        every = (w, w1, w2, w3, w4, w5, w6, w7)  # type: ignore[assignment]
    return every


@triton.jit  # type: ignore[untyped-decorator]
def flips(w, owners, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights as they are, and flipped by each combination of bits of their owners.

    Args:
        w: the weights.
        owners: the bits of the owners, each on top of a 32-bit number; nothing where the weights
            hold them.
        BITS: of an owner.
        ASSEMBLY: use it; Triton's interpreter has none, and there is none for 32-bit weights.
    """
    PLANE: tl.constexpr = len(owners) > 0
    if ASSEMBLY:
        every = _flips_in_assembly(w, owners, BITS)
    else:
        w1 = _flipped(w, owners[0] if PLANE else _tops(w, 0))
        if BITS == 1:
            every = (w, w1)
        else:
            top1 = owners[1] if PLANE else _tops(w, 1)
            w2, w3 = _flipped(w, top1), _flipped(w1, top1)
            if BITS == 2:
                every = (w, w1, w2, w3)
            else:
                top2 = owners[2] if PLANE else _tops(w, 2)
                w4, w5 = _flipped(w, top2), _flipped(w1, top2)
                w6, w7 = _flipped(w2, top2), _flipped(w3, top2)
                every = (w, w1, w2, w3, w4, w5, w6, w7)
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
    s0, s1 = dot(w[0], x, s[0], EXACT), dot(w[1], x, s[1], EXACT)
    if BITS == 1:
        sums = (s0, s1)
    else:
        s2, s3 = dot(w[2], x, s[2], EXACT), dot(w[3], x, s[3], EXACT)
        if BITS == 2:
            sums = (s0, s1, s2, s3)  # type: ignore[assignment]
        else:
            s4, s5 = dot(w[4], x, s[4], EXACT), dot(w[5], x, s[5], EXACT)
            s6, s7 = dot(w[6], x, s[6], EXACT), dot(w[7], x, s[7], EXACT)
            sums = (s0, s1, s2, s3, s4, s5, s6, s7)  # type: ignore[assignment]
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def zeros(SHAPE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sums of nothing."""
    z = tl.zeros(SHAPE, tl.float32)
    if BITS == 1:
        sums = (z, z)
    elif BITS == 2:
        sums = (z, z, z, z)  # type: ignore[assignment]
    else:
        sums = (z, z, z, z, z, z, z, z)  # type: ignore[assignment]
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
