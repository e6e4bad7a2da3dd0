"""The kernel of a packed masked layer for one sample: its stored groups, found by a bitmap.

A lane takes 32 groups, a word of the bitmap, and goes through the stored ones from the last to the
first: the highest bit says which inputs a group multiplies, and its values lie one group before
those of the step before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fissile.packed.gpu.activation import finished

__all__ = ["bitmap_kernel", "count"]


@triton.jit  # type: ignore[untyped-decorator]
def count(word, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the bits of 32-bit words."""
    if ASSEMBLY:
        set_ = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], tl.int32, True, 1)
    else:
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        word = (word + (word >> 4)) & 0x0F0F0F0F
        word = word + (word >> 8)
        set_ = ((word + (word >> 16)) & 63).to(tl.int32)
    return set_


@triton.jit  # type: ignore[untyped-decorator]
def _highest(word, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place of the highest bit of 32-bit words; of 0, any place within."""
    if ASSEMBLY:
        place = tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [word], tl.int32, True, 1)
        place = place & 31
    else:
        word = word | (word >> 1)
        word = word | (word >> 2)
        word = word | (word >> 4)
        word = word | (word >> 8)
        word = word | (word >> 16)
        place = tl.maximum(count(word, False) - 1, 0)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def _words(live_, first, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a word from each byte on; what lies beyond the row is 0."""
    at = first[:, None] + tl.arange(0, 4)[None, :]
    byte = tl.load(live_ + at, mask=at < BYTES, other=0).to(tl.uint32)
    return tl.sum(byte << (8 * tl.arange(0, 4))[None, :].to(tl.uint32), 1).to(tl.uint32)


@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def bitmap_kernel(  # type: ignore[no-untyped-def]
    x_,
    w_,
    live_,
    start_,
    bias_,
    y_,
    C,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute one output for one sample."""
    row = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    groups: tl.constexpr = N // GROUP
    in_row: tl.constexpr = (groups + 7) // 8
    blocks: tl.constexpr = (groups + 255) // 256
    lane, inner = tl.arange(0, LANES), tl.arange(0, GROUP)
    x_ += sample * N
    live_ += row.to(tl.int64) * in_row
    base = tl.load(start_ + row.to(tl.int64) * blocks)
    w_ += base.to(tl.int64) * GROUP  # from here on, 32 bits hold all offsets
    total = tl.zeros((LANES, GROUP), tl.float32)
    one = tl.full((LANES,), 1, tl.uint32)
    upcoming = _words(live_, lane * 4, in_row)
    end = 0
    for chunk in range(0, groups, 32 * LANES):
        word = upcoming
        upcoming = _words(live_, chunk // 8 + 4 * LANES + lane * 4, in_row)
        counted = count(word, ASSEMBLY)
        at = end + tl.cumsum(counted, 0)
        end += tl.sum(counted, 0)
        most = tl.max(counted, 0)
        done = 0
        while done < most:
            for _ in tl.static_range(UNROLL):
                there = (word != 0)[:, None]
                place = _highest(word, ASSEMBLY)
                word = word & ((one << place.to(tl.uint32)) - 1)
                at -= 1
                w = tl.load(
                    w_ + (at * GROUP)[:, None] + inner[None, :],
                    mask=there,
                    other=0.0,
                    eviction_policy="evict_first",
                ).to(tl.float32)
                col = ((chunk + lane * 32 + place) * GROUP)[:, None] + inner[None, :]
                total += w * tl.load(x_ + col, mask=there, other=0.0).to(tl.float32)
            done += UNROLL
    out = tl.sum(tl.sum(total, 1), 0)
    if BIAS:
        out += tl.load(bias_ + row).to(tl.float32)
    tl.store(y_ + sample * C + row, finished(out, ACTIVATION).to(y_.dtype.element_ty))
