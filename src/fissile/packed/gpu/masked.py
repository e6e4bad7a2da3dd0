"""The kernels of a packed masked layer: its stored groups, found by a bitmap.

For one sample, a lane takes 32 groups, a word of the bitmap, and goes through the stored ones from
the last to the first. For several samples, a tile of the dense weight is read from the stored
groups: each lies as many groups after the first one of its row as bits are set before its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fissile.packed.gpu.partitioned import dot, finished


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
def _words(live_, rows, words, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read one word of the bitmap for each of the words; what lies beyond the row is 0."""
    if live_.dtype.element_ty == tl.int32:
        in_row: tl.constexpr = IN_ROW // 4
        word = tl.load(live_ + rows * in_row + words, mask=words < in_row, other=0)
        word = word.to(tl.uint32, bitcast=True)
    else:
        within = tl.arange(0, 4)
        byte_at = (words * 4 + rows * 0)[:, None] + within[None, :]
        at = (rows * IN_ROW + words * 0)[:, None] + byte_at
        byte = tl.load(live_ + at, mask=byte_at < IN_ROW, other=0).to(tl.uint32)
        word = tl.sum(byte << (8 * within).to(tl.uint32)[None, :], 1).to(tl.uint32)
    return word


@triton.jit  # type: ignore[untyped-decorator]
def masked_kernel(  # type: ignore[no-untyped-def]
    x_, w_, live_, start_, bias_, y_,
    N: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Compute one output for one sample."""
    LANES: tl.constexpr = 32
    UNROLL: tl.constexpr = 4
    row = tl.program_id(0)
    groups: tl.constexpr = N // GROUP
    in_row: tl.constexpr = (groups + 7) // 8
    blocks: tl.constexpr = (groups + 255) // 256
    lane, inner = tl.arange(0, LANES), tl.arange(0, GROUP)
    base = tl.load(start_ + row.to(tl.int64) * blocks)
    w_ += base.to(tl.int64) * GROUP  # from here on, 32 bits hold all offsets
    total = tl.zeros((LANES, GROUP), tl.float32)
    one = tl.full((LANES,), 1, tl.uint32)
    upcoming = _words(live_, row.to(tl.int64), lane, in_row)
    end = 0
    for chunk in range(0, groups, 32 * LANES):
        word = upcoming
        upcoming = _words(live_, row.to(tl.int64), chunk // 32 + LANES + lane, in_row)
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
                at_w = w_ + (at * GROUP)[:, None] + inner[None, :]
                w = tl.load(at_w, mask=there, other=0.0, eviction_policy="evict_first")
                col = ((chunk + lane * 32 + place) * GROUP)[:, None] + inner[None, :]
                x = tl.load(x_ + col, mask=there, other=0.0)
                total += w.to(tl.float32) * x.to(tl.float32)
            done += UNROLL
    out = tl.sum(tl.sum(total, 1), 0)
    if BIAS:
        out += tl.load(bias_ + row).to(tl.float32)
    tl.store(y_ + row, finished(out, ACTIVATION).to(y_.dtype.element_ty))


# --- several samples, and the layer written out


@triton.jit
def _along(rows, cols):  # type: ignore[no-untyped-def]
    """Give a number of each row the dimensions of the columns, (1, …)."""
    return rows[:, None, None] if len(cols.shape) == 3 else rows[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(  # type: ignore[no-untyped-def]
    w_, word, at, cols, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Read columns of 32 groups for each word; its first stored one is number `at` from w_ on."""
    bit = (1 << (cols // GROUP)).to(tl.uint32)
    word = _along(word, cols)
    rank = _along(at, cols) + count(word & (bit - 1), ASSEMBLY)
    offset = rank.to(tl.int64) * GROUP
    stored = (word & bit) != 0
    # The compiler cannot see through the count that a group is read in one piece. It must be told
    # here: what a function is told of its arguments is lost.
    if len(cols.shape) == 3:
        offset = tl.max_constancy(tl.multiple_of(offset, [1, 1, GROUP]), [1, 1, GROUP])
        stored = tl.max_constancy(stored, [1, 1, GROUP])
        w = tl.load(w_ + offset + cols % GROUP, mask=stored, other=0.0)
    else:
        offset = tl.max_constancy(tl.multiple_of(offset, [1, GROUP]), [1, GROUP])
        stored = tl.max_constancy(stored, [1, GROUP])
        at_w = w_ + offset + cols % GROUP
        w = tl.load(at_w, mask=stored, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit  # type: ignore[untyped-decorator]
def _columns(GROUP: tl.constexpr, STEP: tl.constexpr, DEALT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the columns of STEP groups, (1, …); where they are dealt, in runs of 4 groups."""
    if DEALT:
        runs = tl.arange(0, STEP // 4) * (4 * GROUP)
        cols = runs[None, :, None] + tl.arange(0, 4 * GROUP)[None, None, :]
    else:
        cols = tl.arange(0, STEP * GROUP)[None, :]
    return cols


@triton.jit  # type: ignore[untyped-decorator]
def _dealt(tile, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reorder runs of 4 groups so that 4 lanes multiply one group each.

    A lane of a warp gives the matrix units pairs of columns: 0 and 1, 8 and 9, … for the first. If
    these are the columns of one group, no weight has to leave the lane that read it.
    """
    if len(tile.shape) == 3:
        rows: tl.constexpr = tile.shape[0]
        runs: tl.constexpr = tile.shape[1]
        pairs = tl.reshape(tile, (rows, runs, 4, GROUP // 2, 2))
        tile = tl.reshape(tl.permute(pairs, (0, 1, 3, 2, 4)), (rows, runs * 4 * GROUP))
    return tile


@triton.jit(do_not_specialize=["B", "C"])  # type: ignore[untyped-decorator]
def masked_tiles_kernel(  # type: ignore[no-untyped-def]
    x_, w_, live_, start_, bias_, y_, B, C,
    N: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ASSEMBLY: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, DEALT: tl.constexpr,
):  # fmt: skip
    """Compute BC outputs for BB samples from PART blocks of 256 groups, STEP at a time.

    The sums of each part go to y_, one part after the other.
    """
    groups: tl.constexpr = N // GROUP
    in_row: tl.constexpr = (groups + 7) // 8
    blocks: tl.constexpr = (groups + 255) // 256
    rows = tl.program_id(1) * BC + tl.arange(0, BC)
    samples = tl.program_id(0) * BB + tl.arange(0, BB)
    # What is beyond the end reads the last row again, and is not stored.
    at_rows = tl.minimum(rows, C - 1).to(tl.int64)
    at_samples = tl.minimum(samples, B - 1).to(tl.int64)
    first = tl.program_id(2) * PART
    base = tl.load(start_ + (tl.program_id(1) * BC).to(tl.int64) * blocks + first)
    at = tl.load(start_ + at_rows * blocks + first) - base
    w_ += base.to(tl.int64) * GROUP
    cols = _columns(GROUP, STEP, DEALT)
    x_cols = cols
    if DEALT and ASSEMBLY:
        # Hidden from the compiler, or it would let a lane read more than a group.
        inner = cols % GROUP
        x_cols = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [cols - inner], tl.int32, True, 1
        )
        x_cols = tl.max_constancy(tl.multiple_of(x_cols, [1, 1, GROUP]), [1, 1, GROUP]) + inner
    x_at = x_ + _along(at_samples, cols) * N + x_cols
    total = tl.zeros((BC, BB), tl.float32)
    upcoming = _words(live_, at_rows, first * 8, in_row)
    for turn in range(0, PART * 256, STEP):
        group = first * 256 + turn
        if DEALT:
            word = upcoming
            upcoming = _words(live_, at_rows, (group + STEP) // 32, in_row)
        else:  # the compiler reads it ahead of time, like all the rest
            word = _words(live_, at_rows, group // 32, in_row)
        if STEP < 32:
            word = (word >> (group % 32).to(tl.uint32)) & (2**STEP - 1)
        w = _decoded(w_, word, at, cols, GROUP, ASSEMBLY)
        at += count(word, ASSEMBLY)
        if groups % (PART * 256) == 0:
            x = tl.load(x_at + group * GROUP)
        else:
            x = tl.load(x_at + group * GROUP, mask=cols < N - group * GROUP, other=0.0)
        x = tl.permute(_dealt(x, GROUP), (1, 0))
        total = dot(_dealt(w, GROUP), x, total, not ASSEMBLY)
    if BIAS:
        total += tl.load(bias_ + at_rows).to(tl.float32)[:, None]
    total = finished(total, ACTIVATION)
    y_at = (tl.program_id(2) * B + samples).to(tl.int64)[None, :] * C + rows[:, None]
    there = (rows < C)[:, None] & (samples < B)[None, :]
    tl.store(y_ + y_at, total.to(y_.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["SIZE", "C"])  # type: ignore[untyped-decorator]
def parts_kernel(  # type: ignore[no-untyped-def]
    parts_, bias_, y_, SIZE, C,
    PARTS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of BLOCK of the outputs of all samples, SIZE in number."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ + part * SIZE.to(tl.int64) + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ + at % C, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ + at, finished(total, ACTIVATION).to(y_.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def masked_written_kernel(  # type: ignore[no-untyped-def]
    w_, live_, start_, out_,
    N: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write BLOCKS blocks of 256 groups of one row."""
    groups: tl.constexpr = N // GROUP
    in_row: tl.constexpr = (groups + 7) // 8
    blocks: tl.constexpr = (groups + 255) // 256
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    words = tl.program_id(0) * BLOCKS * 8 + tl.arange(0, BLOCKS * 8)
    word = _words(live_, row, words, in_row)
    counts = tl.reshape(count(word, ASSEMBLY), (BLOCKS, 8))
    start = tl.load(start_ + row * blocks + block, mask=block < blocks, other=0)
    at = start[:, None] + tl.cumsum(counts, 1) - counts
    cols = _columns(GROUP, 32, False)
    w = _decoded(w_, word, tl.reshape(at, (BLOCKS * 8,)), cols, GROUP, ASSEMBLY)
    cells = words[:, None] * (32 * GROUP) + cols
    tl.store(out_ + row * N + cells, w, mask=cells < N)
