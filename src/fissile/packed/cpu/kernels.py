"""The kernels, in vector instructions: the compiler does not vectorise sums over several children.

The partitioned layer reads every weight once and adds it to the child that owns it. The masked
layer stores only the groups of weights that exist; bits tell which groups these are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from fissile._common import llvm
from fissile._common.llvm import BIT, BYTE, CACHE_LINE, FLOAT, WHOLE, WORD, Vectors, compiled

#: The kinds of weights and the bytes of each.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: How far ahead weights are asked for, where reading them is interrupted by wrong guesses.
AHEAD, LINES = 2048, 4

#: Bytes of samples that every row of weights meets before the next samples come: they stay cached.
SAMPLES = 1 << 19

#: What is kept on disk is found by the file of a kernel and by what the kernel closes over. Each
#: closes over this number, so that a change of this file or of the emitter is noticed.
_SOURCE = zlib.crc32(Path(__file__).read_bytes() + Path(llvm.__file__).read_bytes())

#: Lets compiled functions call what a function emits; numbers known beforehand stay known.
_instructions: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


def _signature(*known: Any, numbers: int) -> Any:
    """Return the type of an instruction on things known beforehand, then whole numbers."""
    return types.void(*known, *[types.int64] * numbers)


@compiled
def _together(width: int, tile: int) -> int:
    """Return how many samples of ``width`` inputs stay cached: whole tiles, at least one."""
    return max(1, SAMPLES // max(1, 4 * width * tile)) * tile


class _Emit(Vectors):
    """Emits instructions on vectors as wide as the processor's; memory is given by addresses."""

    def __init__(self, context: Any, builder: Any, kind: str, width: int = 0) -> None:
        triple, _, features = context.codegen().magic_tuple()
        super().__init__(builder, width or (16 if "+avx512f" in features else 8))
        self.kind = kind
        self._converts_halves = not triple.startswith(("x86", "i686")) or "+f16c" in features

    def address(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())

    def load(self, base: Any, index: Any, element: Any, mask: Any = None) -> Any:
        """Load a vector; entries that a mask leaves out are zero, and are not touched."""
        kind = self.vector(element)
        size = 4 if element == FLOAT else element.width // 8
        pointer = self.address(base, self.builder.mul(index, WHOLE(size)), kind)
        if mask is None:
            return self.builder.load(pointer, align=size)
        name = f"llvm.masked.load.v{self.width}{element.intrinsic_name}.p0"
        return self.call(name, kind, [pointer, WORD(size), mask, self.all(element, 0)])

    def code(self) -> Any:
        """Return the whole number that has the bits of a weight."""
        return ir.IntType(8 * BYTES[self.kind])

    def values(self, codes: Any) -> Any:
        """Turn the bits of weights into the numbers they stand for."""
        b, floats = self.builder, self.vector(FLOAT)
        if self.kind == "float32":
            return b.bitcast(codes, floats)
        if self.kind == "float16" and self._converts_halves:
            return b.fpext(b.bitcast(codes, self.vector(ir.HalfType())), floats)
        wide = b.zext(codes, self.vector(WORD))
        if self.kind == "bfloat16":
            return b.bitcast(b.shl(wide, self.all(WORD, 16)), floats)
        return self._halves(wide)

    def _halves(self, codes: Any) -> Any:
        """Convert half precision by arithmetic, for processors that have no instruction for it."""
        b, full = self.builder, self.all
        magnitude = b.shl(b.and_(codes, full(WORD, 0x7FFF)), full(WORD, 13))
        # The exponent now counts from another origin, which a multiplication sets right.
        scaled = b.fmul(b.bitcast(magnitude, self.vector(FLOAT)), full(FLOAT, 2.0**112))
        bits = b.bitcast(scaled, self.vector(WORD))
        endless = b.icmp_unsigned(">=", magnitude, full(WORD, 0x7C00 << 13))
        bits = b.select(endless, b.or_(bits, full(WORD, 0x7F800000)), bits)
        sign = b.shl(b.and_(codes, full(WORD, 0x8000)), full(WORD, 16))
        return b.bitcast(b.or_(bits, sign), self.vector(FLOAT))

    def sum(self, value: Any) -> Any:
        if self.width == 1:
            return self.builder.extract_element(value, WORD(0))
        name = f"llvm.vector.reduce.fadd.v{self.width}f32"
        return self.call(name, FLOAT, [ir.Constant(FLOAT, -0.0), value], fastmath=("reassoc",))

    def tile(self, first: Any, batch: Any, count: int) -> list[Any]:
        """Return the numbers of a tile's samples; one that is not full repeats the last sample."""
        b, last = self.builder, self.builder.sub(batch, WHOLE(1))
        numbers = [b.add(first, WHOLE(t)) for t in range(count)]
        return [b.select(b.icmp_signed("<", n, last), n, last) for n in numbers]

    def rows(self, base: Any, numbers: list[Any], width: Any) -> list[Any]:
        """Return where rows of ``width`` float32 numbers begin."""
        b, size = self.builder, self.builder.mul(width, WHOLE(4))
        return [b.add(base, b.mul(n, size)) for n in numbers]

    def totals(self, unrolled: int, tile: int) -> list[list[Any]]:
        """Return variables for the sums of every sample, twice or more where loops are unrolled."""
        zero = self.all(FLOAT, 0.0)
        return [[self.variable(zero) for _ in range(tile)] for _ in range(unrolled)]

    def write(self, copies: Sequence[Any], bias: Any, y: Any, column: Any, relu: Any) -> None:
        """Sum up what one output has gathered, add its bias if there is any, and write it."""
        b, zero, offset = self.builder, ir.Constant(FLOAT, 0.0), self.builder.shl(column, WHOLE(2))
        total = b.load(copies[0])
        for copy in copies[1:]:
            total = b.fadd(total, b.load(copy))
        result = self.variable(self.sum(total))
        with b.if_then(b.icmp_unsigned("!=", bias, WHOLE(0))):
            shift = b.load(self.address(bias, offset, FLOAT))
            b.store(b.fadd(b.load(result), shift), result)
        value = self.rectified(b.load(result), zero, b.icmp_unsigned("!=", relu, WHOLE(0)))
        b.store(value, self.address(y, offset, FLOAT))

    def fetch_ahead(self, address: Any) -> None:
        for line in range(LINES):
            self.prefetch(self.address(address, WHOLE(AHEAD + line * CACHE_LINE), BYTE))


# --- the activations that take more than a comparison, in float32

GELU, GELU_TANH = 2, 3

_HALF, _ONE = np.float32(0.5), np.float32(1)
_ROOT_HALF, _SCALE = np.float32(math.sqrt(0.5)), np.float32(math.sqrt(2 / math.pi))
_CUBE = np.float32(0.044715)


@_instructions
def _floats(typing: Any, address: Any) -> Any:
    """Return an address as a pointer to float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], FLOAT.as_pointer())

    pointer = types.CPointer(types.float32)  # type: ignore[no-untyped-call]
    return pointer(types.int64), emit


@compiled
def _activated(v: np.float32, which: int) -> np.float32:
    if which == GELU:
        return _HALF * v * (_ONE + math.erf(v * _ROOT_HALF))
    if which == GELU_TANH:
        return _HALF * v * (_ONE + math.tanh(_SCALE * (v + _CUBE * v * v * v)))
    return v / (_ONE + math.exp(-v))


def _activation(source: int) -> Callable[..., None]:
    @compiled
    def activate(y: int, outputs: int, batch: int, each: int, which: int, lo: int, hi: int) -> None:
        """Apply an activation to the outputs of some rows of weights, each of which has several."""
        assert source >= 0
        numbers = carray(_floats(y), (batch, outputs))
        for b in range(batch):
            for c in range(lo * each, hi * each):
                numbers[b, c] = _activated(numbers[b, c], which)

    return activate


#: The kernel: an address, sizes, which activation, then the first row and the end.
activate = _activation(_SOURCE)


# --- the partitioned layer


class _Owners(_Emit):
    """Reads weights and who owns them."""

    def owners(self, codes: Any, slots: int) -> list[Any]:
        """Return for every child a mask of its weights, read from their lowest bits."""
        low = self.builder.and_(codes, self.all(self.code(), slots - 1))
        return self._masks(low, slots)

    def plane_owners(self, planes: list[Any], j: Any, end: Any, slots: int) -> list[Any]:
        """Return for every child a mask of its weights, read from planes of bits."""
        b = self.builder
        # A mask has a register of its own on wide processors, elsewhere it is a vector of numbers.
        kind = BYTE if self.width == 16 else WORD
        owner = self.all(kind, 0)
        for t, plane in enumerate(planes):
            mask = self._mask(self._bits(plane, j, end), kind)
            owner = b.or_(owner, b.select(mask, self.all(kind, 1 << t), self.all(kind, 0)))
        return self._masks(owner, slots)

    def _mask(self, bits: Any, kind: Any) -> Any:
        b = self.builder
        if kind == BYTE:
            return b.bitcast(bits, self.vector(BIT))
        places = ir.Constant(self.vector(kind), [kind(1 << i) for i in range(self.width)])
        own = b.and_(self.copies(b.zext(bits, kind)), places)
        return b.icmp_unsigned("!=", own, self.all(kind, 0))

    def _masks(self, owner: Any, slots: int) -> list[Any]:
        equal, kind = self.builder.icmp_unsigned, owner.type.element
        return [equal("==", owner, self.all(kind, k)) for k in range(slots)]

    def _bits(self, plane: Any, j: Any, end: Any) -> Any:
        """Return the bits of a vector; where a row may end, no byte beyond it is touched."""
        b, kind = self.builder, ir.IntType(self.width)
        at = b.lshr(j, WHOLE(3))
        if end is None or self.width == 8:
            return b.load(self.address(plane, at, kind), align=1)
        last = b.lshr(b.sub(end, WHOLE(1)), WHOLE(3))
        after = b.add(at, WHOLE(1))
        after = b.select(b.icmp_signed("<", after, last), after, last)
        low, high = (b.load(self.address(plane, i, BYTE)) for i in (at, after))
        return b.or_(b.zext(low, kind), b.shl(b.zext(high, kind), kind(8)))

    def add(self, total: Any, mask: Any, product: Any) -> None:
        """Add where a mask says so: an infinite input must not reach the other children."""
        b = self.builder
        old = b.load(total)
        b.store(b.select(mask, b.fadd(old, product), old), total)


@_instructions
def _parent(
    typing: Any, kind: Any, slots: Any, tile: Any, plane: Any, w: Any, planes: Any, step: Any,
    bias: Any, x: Any, y: Any, d: Any, first: Any, batch: Any, child: Any, alpha: Any,
    outputs: Any, relu: Any,
) -> Any:  # fmt: skip
    """Write y[first + t, child + k] = sum of w[j] * x[first + t, j] over child k's inputs j."""
    known = [literal.literal_value for literal in (kind, slots, tile, plane)]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, children, samples, layered = known
        w, planes, step, bias, x, y, d, first, batch, child, alpha, outputs, relu = args[4:]
        on = _Owners(context, builder, name)
        # Two children alone would leave the adders waiting for each other.
        unrolled = 2 if children == 2 else 1
        numbers = on.tile(first, batch, samples)
        rows = on.rows(x, numbers, d)
        totals = on.totals(unrolled, samples * children)
        count = (children - 1).bit_length() if layered else 0
        bits = [builder.add(planes, builder.mul(step, WHOLE(t))) for t in range(count)]

        def add(j: Any, copy: list[Any], end: Any = None) -> None:
            inside = None if end is None else on.first(builder.sub(end, j))
            codes = on.load(w, j, on.code(), inside)
            values = on.values(codes)
            masks = on.plane_owners(bits, j, end, children) if bits else on.owners(codes, children)
            # What was pruned is zero and belongs to nobody, though its bits say child 0.
            live = builder.icmp_unsigned("!=", codes, on.all(on.code(), 0))
            masks[0] = builder.and_(masks[0], live)
            for t, row in enumerate(rows):
                product = builder.fmul(values, on.load(row, j, FLOAT, inside))
                for k, mask in enumerate(masks):
                    on.add(copy[t * children + k], mask, product)

        whole = builder.sub(d, builder.urem(d, WHOLE(on.width * unrolled)))
        with on.loop(WHOLE(0), whole, on.width * unrolled) as j:
            for u, copy in enumerate(totals):
                add(builder.add(j, WHOLE(u * on.width)), copy)
        with on.loop(whole, d, on.width) as j:
            add(j, totals[0], d)
        for k in range(children):
            with builder.if_then(builder.icmp_signed("<", WHOLE(k), alpha)):
                for t, row in enumerate(on.rows(y, numbers, outputs)):
                    copies = [copy[t * children + k] for copy in totals]
                    on.write(copies, bias, row, builder.add(child, WHOLE(k)), relu)
        return context.get_dummy_value()

    return _signature(kind, slots, tile, plane, numbers=13), emit


@cache
def partitioned_rows(kind: str, slots: int, tile: int, plane: bool) -> Callable[..., None]:
    """Return a kernel for some parents: addresses, sizes, then the first parent and the end.

    Of 2, 4 or 8 slots, alpha are children; the samples of a tile share one reading of the weights.
    """
    size, layered, source = BYTES[kind], int(plane), _SOURCE

    @compiled
    def rows(
        w: int, planes: int, bias: int, x: int, y: int,
        h: int, d: int, batch: int, alpha: int, relu: int, lo: int, hi: int,
    ) -> None:  # fmt: skip
        assert source >= 0
        stride, span = (d + 7) // 8, _together(d, tile)
        for begin in range(0, batch, span):
            end = min(begin + span, batch)
            for i in range(lo, hi):
                for first in range(begin, end, tile):
                    _parent(
                        kind, slots, tile, layered, w + i * d * size, planes + i * stride,
                        h * stride, bias, x, y, d, first, end, i * alpha, alpha, h * alpha, relu,
                    )  # fmt: skip

    return rows


# --- the masked layer

#: Groups whose bits are read together.
GROUPS = 64


class _Groups(_Emit):
    """Goes through the stored groups of one row."""

    def __init__(
        self, context: Any, builder: Any, kind: str, group: int, w: Any, width: int = 0
    ) -> None:
        super().__init__(context, builder, kind, width)
        self.group = group
        self.stored = self.variable(w)

    @contextmanager
    def words(self, live: Any, n: Any) -> Iterator[tuple[Any, Any]]:
        """Loop over the bits of 64 groups at a time; the last ones are read byte by byte."""
        b, span = self.builder, GROUPS * self.group
        word = self.variable(WHOLE(0))
        end = b.lshr(b.add(b.udiv(n, WHOLE(self.group)), WHOLE(7)), WHOLE(3))
        with self.loop(WHOLE(0), n, span) as j:
            at = b.udiv(j, WHOLE(8 * self.group))
            after = b.add(at, WHOLE(GROUPS // 8))
            with b.if_else(b.icmp_signed("<=", after, end), likely=True) as (full, rest):
                with full:
                    b.store(b.load(self.address(live, at, WHOLE), align=1), word)
                with rest:
                    b.store(WHOLE(0), word)
                    with self.loop(at, end, 1) as i:
                        byte = b.zext(b.load(self.address(live, i, BYTE)), WHOLE)
                        place = b.shl(b.sub(i, at), WHOLE(3))
                        b.store(b.or_(b.load(word), b.shl(byte, place)), word)
            self.fetch_ahead(b.load(self.stored))
            yield j, word

    def advance(self, groups: Any) -> None:
        size = WHOLE(self.group * BYTES[self.kind])
        b = self.builder
        b.store(b.add(b.load(self.stored), b.mul(groups, size)), self.stored)

    def add(self, values: Any, inputs: list[Any], totals: list[Any]) -> None:
        for row, total in zip(inputs, totals, strict=True):
            self.builder.store(self.multiply_add(values, row, self.builder.load(total)), total)

    def walk(self, j: Any, word: Any, rows: list[Any], totals: list[list[Any]]) -> None:
        """Go from one stored group to the next; a vector is one group."""
        b = self.builder
        count = self.call("llvm.ctpop.i64", WHOLE, [b.load(word)])
        several = len(totals)

        def take(copy: list[Any]) -> None:
            left = b.load(word)
            place = self.call("llvm.cttz.i64", WHOLE, [left, BIT(1)])
            b.store(b.and_(left, b.sub(left, WHOLE(1))), word)
            values = self.values(self.load(b.load(self.stored), WHOLE(0), self.code()))
            self.advance(WHOLE(1))
            column = b.add(j, b.mul(place, WHOLE(self.group)))
            self.add(values, [self.load(row, column, FLOAT) for row in rows], copy)

        even = b.sub(count, b.urem(count, WHOLE(several)))
        with self.loop(WHOLE(0), even, several):
            for copy in totals:
                take(copy)
        with self.loop(even, count, 1):
            take(totals[0])

    def spread(self, j: Any, word: Any, rows: list[Any], totals: list[list[Any]]) -> None:
        """Spread stored weights out over the columns they belong to; a vector is many groups."""
        b, groups = self.builder, self.width // self.group
        left = b.load(word)
        code, lanes = self.vector(self.code()), ir.IntType(self.width)
        name = f"llvm.masked.expandload.v{self.width}{self.code().intrinsic_name}"
        for place in range(GROUPS // groups):
            bits = b.and_(b.lshr(left, WHOLE(place * groups)), WHOLE((1 << groups) - 1))
            mask = b.bitcast(self._lanes(bits, lanes), self.vector(BIT))
            pointer = b.inttoptr(b.load(self.stored), self.code().as_pointer())
            codes = self.call(name, code, [pointer, mask, self.all(self.code(), 0)])
            self.advance(self.call("llvm.ctpop.i64", WHOLE, [bits]))
            column = b.add(j, WHOLE(place * self.width))
            inputs = [self.load(row, column, FLOAT, mask) for row in rows]
            self.add(self.values(codes), inputs, totals[place % len(totals)])

    def _lanes(self, bits: Any, lanes: Any) -> Any:
        """Repeat every bit as often as its group has columns, by a table."""
        b, groups = self.builder, self.width // self.group
        if self.group == 1:
            return b.trunc(bits, lanes)
        ones = (1 << self.group) - 1
        entries = [
            sum(ones << (self.group * i) for i in range(groups) if bits >> i & 1)
            for bits in range(1 << groups)
        ]
        kind, name = ir.ArrayType(lanes, len(entries)), f"lanes.{self.width}.{self.group}"
        table = b.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(b.module, kind, name)
            table.global_constant, table.linkage = True, "internal"
            table.initializer = ir.Constant(kind, entries)
        return b.load(b.gep(table, [WHOLE(0), bits], inbounds=True))


def _spreads(context: Any, kind: str, group: int) -> bool:
    """Return whether the processor spreads weights by one instruction, and it pays."""
    features = context.codegen().magic_tuple()[2]
    needed = "+avx512f" if kind == "float32" else "+avx512vbmi2"
    return group <= 2 and needed in features


@_instructions
def _output(
    typing: Any, kind: Any, group: Any, tile: Any, w: Any, start: Any, live: Any,
    bias: Any, x: Any, y: Any, n: Any, first: Any, batch: Any, c: Any, outputs: Any, relu: Any,
) -> Any:  # fmt: skip
    """Write y[first + t, c] = sum of weight[c, j] * x[first + t, j] over the stored weights."""
    known = [literal.literal_value for literal in (kind, group, tile)]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, columns, samples = known
        w, start, live, bias, x, y, n, first, batch, c, outputs, relu = args[3:]
        before = builder.zext(builder.load(builder.inttoptr(start, WORD.as_pointer())), WHOLE)
        w = builder.add(w, builder.mul(before, WHOLE(columns * BYTES[name])))
        spreads = _spreads(context, name, columns)
        on = _Groups(context, builder, name, columns, w, 0 if spreads else columns)
        numbers, totals = on.tile(first, batch, samples), on.totals(2, samples)
        rows = on.rows(x, numbers, n)
        with on.words(live, n) as (j, word):
            (on.spread if spreads else on.walk)(j, word, rows, totals)
        for row, copies in zip(
            on.rows(y, numbers, outputs), zip(*totals, strict=True), strict=True
        ):
            on.write(copies, bias, row, c, relu)
        return context.get_dummy_value()

    return _signature(kind, group, tile, numbers=12), emit


@cache
def masked_rows(kind: str, group: int, tile: int) -> Callable[..., None]:
    """Return a kernel for some outputs: addresses, sizes, then the first output and the end."""
    source = _SOURCE

    @compiled
    def rows(
        w: int, live: int, start: int, bias: int, x: int, y: int,
        outputs: int, n: int, batch: int, relu: int, lo: int, hi: int,
    ) -> None:  # fmt: skip
        assert source >= 0
        stride, blocks = (n // group + 7) // 8, (n // group + 255) // 256
        span = _together(n, tile)
        for begin in range(0, batch, span):
            end = min(begin + span, batch)
            for c in range(lo, hi):
                for first in range(begin, end, tile):
                    _output(
                        kind, group, tile, w, start + 4 * c * blocks, live + c * stride,
                        bias, x, y, n, first, end, c, outputs, relu,
                    )  # fmt: skip

    return rows
