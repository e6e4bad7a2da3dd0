"""The second layer: only groups of weights that exist are stored, and bits say which those are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from fissile._common.llvm import BIT, BYTE, FLOAT, WHOLE, WORD, compiled
from fissile.packed.cpu.instructions import BYTES, SOURCE, Emit, instructions, signature, together

__all__ = ["bitmap_rows"]

#: Groups whose bits are read together.
GROUPS = 64


class _Groups(Emit):
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


@instructions
def _output(
    typing: Any, kind: Any, group: Any, tile: Any, w: Any, start: Any, live: Any,
    bias: Any, x: Any, y: Any, n: Any, first: Any, batch: Any, c: Any, outputs: Any, relu: Any,
) -> Any:  # fmt: skip
    """Write y[first + t, c] = sum of weight[c, j] * x[first + t, j] over the stored weights.

    The row's first group is the one whose number is at the address start.
    """
    known = [one.literal_value for one in (kind, group, tile)]

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

    return signature(kind, group, tile, numbers=12), emit


@cache
def bitmap_rows(kind: str, group: int, tile: int) -> Callable[..., None]:
    """Return a kernel for some outputs: addresses, sizes, then the first output and the end.

    Args:
        kind: the dtype of the weights; inputs, biases and results are float32.
        group: 1, 2, 4 or 8 columns that are stored together.
        tile: samples that share one reading of the weights.
    """
    source = SOURCE

    @compiled
    def rows(
        w: int, live: int, start: int, bias: int, x: int, y: int,
        outputs: int, n: int, batch: int, relu: int, lo: int, hi: int,
    ) -> None:  # fmt: skip
        assert source >= 0
        stride, blocks = (n // group + 7) // 8, (n // group + 255) // 256
        span = together(n, tile)
        for begin in range(0, batch, span):
            end = min(begin + span, batch)
            for c in range(lo, hi):
                for first in range(begin, end, tile):
                    _output(
                        kind, group, tile, w, start + 4 * c * blocks, live + c * stride,
                        bias, x, y, n, first, end, c, outputs, relu,
                    )  # fmt: skip

    return rows
