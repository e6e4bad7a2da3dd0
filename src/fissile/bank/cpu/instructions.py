"""The kernel's inner loops as vector instructions.

The compiler, left alone, keeps no row of samples in registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fissile._common import llvm
from fissile._common.llvm import BIT, BYTE, CACHE_LINE, WHOLE, WORD, Vectors

#: Samples per tile: one neuron's activations then fill a few vector registers.
LANES = 64
#: Dots over the samples that are summed up together.
GROUP = 8
#: Neurons with the same inputs that go through side by side: they share what is loaded.
SIDE_BY_SIDE = 4

_P = ParamSpec("_P")
_R = TypeVar("_R")
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic  # it has no types


def compiled(function: Callable[_P, _R], **more: bool) -> Callable[_P, _R]:
    """Compile with fast arithmetic in which NaN and infinity keep their meaning."""
    return llvm.compiled(function, fastmath={"reassoc", "contract", "nsz", "arcp"}, **more)


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile an internal function without a Python wrapper, which is slow to build."""
    return compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _instructions(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what a function of an ``_Emit`` and arguments emits."""

    def typed(typing: Any, *kinds: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            on = _Emit(context, builder, signature, args)
            function(on, *on.args)
            return context.get_dummy_value()

        return types.void(*kinds), emit

    typed.__name__ = function.__name__
    typed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return _intrinsic(typed)


@_intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """Return the number in double precision that has the bits of a whole number."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), emit


class _Emit(Vectors):
    """Emits instructions on rows of [rows, LANES] arrays, register by register."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.args = [
            context.make_array(kind)(context, builder, value).data
            if isinstance(kind, types.Array)
            else value
            for kind, value in zip(signature.args, args, strict=True)
        ]
        self.element = self.args[0].type.pointee
        self.size = 4 if isinstance(self.element, ir.FloatType) else 8
        super().__init__(builder, CACHE_LINE // self.size)
        # Vectors of sums that stay in registers: in half of 32, or of 16 that are half as wide.
        self.room = 16 if "+avx512f" in context.codegen().magic_tuple()[2] else 4

    def at(self, data: Any, index: Any, width: int = 0) -> Any:
        """Return a pointer to the vector that begins at an entry."""
        kind = self.vector(self.element, width).as_pointer()
        return self.builder.bitcast(self.builder.gep(data, [index]), kind)

    def row(self, data: Any, row: Any) -> list[Any]:
        """Return pointers to the registers of a row."""
        start = self.builder.mul(row, row.type(LANES))
        steps = range(0, LANES, self.width)
        return [self.at(data, self.builder.add(start, start.type(i))) for i in steps]

    def load(self, pointer: Any) -> Any:
        return self.builder.load(pointer, align=self.size)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer, align=self.size)

    def entry(self, data: Any, index: Any) -> Any:
        """Return one number."""
        return self.builder.load(self.builder.gep(data, [index]))

    def following(self, r: Any, rows: int) -> list[Any]:
        """Return some numbers from r on."""
        return [self.builder.add(r, r.type(i)) for i in range(rows)]

    def passes(self, rows: int) -> list[range]:
        """Cut a row's vectors into parts, so that sums for some rows stay in registers."""
        count = LANES // self.width
        step = max(1, self.room // rows)
        return [range(i, min(count, i + step)) for i in range(0, count, step)]

    def add_products(
        self, sums: list[list[Any]], weights: list[Any], data: Any, row: Any, part: range
    ) -> None:
        """Add part of a row, times a number each, to lists of variables kept in registers."""
        values = [self.load(self.row(data, row)[i]) for i in part]
        for totals, weight in zip(sums, map(self.copies, weights), strict=True):
            for total, value in zip(totals, values, strict=True):
                old = self.builder.load(total)
                self.builder.store(self.multiply_add(weight, value, old), total)

    def input_of(self, col: Any, p: Any, base: Any) -> Any:
        """Return the row of the tile that a weight reads."""
        return self.builder.add(base, self.builder.sext(self.entry(col, p), base.type))


def _pushing(rows: int) -> Any:
    def push(
        on: _Emit, tile: Any, inputs: Any, r: Any, base: Any, w: Any, col: Any, begin: Any,
        end: Any, b: Any, cut: Any,
    ) -> None:  # fmt: skip
        """Set tile[inputs + r] to the sum of w[p] * tile[base + col[p]] over the weights of r.

        The sum begins with b[r], or with the row itself if cut & 1; a ReLU follows if cut & 2.
        """
        builder = on.builder
        zero = on.all(on.element, 0.0)
        goes_on = builder.trunc(cut, BIT)
        relu = builder.trunc(builder.lshr(cut, cut.type(1)), BIT)
        neurons = on.following(r, rows)
        starts = [on.entry(begin, n) for n in neurons]
        places = [on.row(tile, builder.add(inputs, n)) for n in neurons]
        first = [on.copies(on.entry(b, n)) for n in neurons]
        count = builder.sub(on.entry(end, r), starts[0])
        for part in on.passes(rows):
            sums = [
                [on.variable(builder.select(goes_on, on.load(place[i]), bias)) for i in part]
                for place, bias in zip(places, first, strict=True)
            ]
            with on.loop(WHOLE(0), count) as p:
                row = on.input_of(col, builder.add(starts[0], p), base)
                weights = [on.entry(w, builder.add(start, p)) for start in starts]
                on.add_products(sums, weights, tile, row, part)
            for totals, place in zip(sums, places, strict=True):
                for total, i in zip(totals, part, strict=True):
                    on.store(on.rectified(builder.load(total), zero, relu), place[i])

    return _instructions(push)


#: For one neuron, and for several that list the same inputs.
push, push_together = _pushing(1), _pushing(SIDE_BY_SIDE)


def _pulling(rows: int) -> Any:
    def pull(
        on: _Emit, delta: Any, r: Any, w: Any, slot: Any, target: Any, outptr: Any, tile: Any,
        inputs: Any, rectified: Any, grad: Any, biased: Any,
    ) -> None:  # fmt: skip
        """Set delta[r] to the sum of w[slot[q]] * delta[target[q]] over what comes from r.

        No gradient passes where a ReLU is off, that is where tile[inputs + r] is zero. What does is
        summed up and added to grad[r], if there is a bias.
        """
        builder = on.builder
        zero = on.all(on.element, 0.0)
        neurons = on.following(r, rows)
        starts = [on.entry(outptr, n) for n in neurons]
        count = builder.sub(on.entry(outptr, builder.add(r, r.type(1))), starts[0])
        wholes = [zero] * rows
        for part in on.passes(rows):
            sums = [[on.variable(zero) for _ in part] for _ in neurons]
            with on.loop(WHOLE(0), count) as q:
                row = on.input_of(target, builder.add(starts[0], q), r.type(0))
                slots = [on.input_of(slot, builder.add(start, q), r.type(0)) for start in starts]
                on.add_products(sums, [on.entry(w, p) for p in slots], delta, row, part)
            for k, (n, totals) in enumerate(zip(neurons, sums, strict=True)):
                acts, to = on.row(tile, builder.add(inputs, n)), on.row(delta, n)
                for total, i in zip(totals, part, strict=True):
                    value = builder.load(total)
                    fires = builder.fcmp_unordered(">", on.load(acts[i]), zero)
                    closed = builder.select(fires, value, zero)
                    value = builder.select(builder.trunc(rectified, BIT), closed, value)
                    on.store(value, to[i])
                    wholes[k] = builder.fadd(wholes[k], value)
        for n, whole in zip(neurons, wholes, strict=True):
            while whole.type.count > 1:
                half = whole.type.count // 2
                low, high = on.shuffle(whole, whole, range(half)), range(half, 2 * half)
                whole = builder.fadd(low, on.shuffle(whole, whole, high))
            total = builder.extract_element(whole, WORD(0))
            to = builder.gep(grad, [n])
            old = builder.load(to)
            added = builder.select(builder.trunc(biased, BIT), total, total.type(0.0))
            builder.store(builder.fadd(old, added), to)

    return _instructions(pull)


pull, pull_together = _pulling(1), _pulling(SIDE_BY_SIDE)


def _dotting(rows: int) -> Any:
    def add_dots(
        on: _Emit, grad: Any, tile: Any, base: Any, col: Any, begin: Any, end: Any, delta: Any,
        r: Any,
    ) -> None:  # fmt: skip
        """grad[p] += dot of delta[r] and tile[base + col[p]] over the weights of r, in groups."""
        builder = on.builder
        neurons = on.following(r, rows)
        starts = [on.entry(begin, n) for n in neurons]
        held = [[on.load(pointer) for pointer in on.row(delta, n)] for n in neurons]
        count = builder.sub(on.entry(end, r), starts[0])
        last = builder.sub(count, count.type(1))

        def products(i: Any) -> list[Any]:
            """Multiply the samples of an input with those of each neuron, a register for each."""
            # Beyond the end the last one is repeated, and not added.
            i = builder.select(builder.icmp_signed("<", i, count), i, last)
            row = on.row(tile, on.input_of(col, builder.add(starts[0], i), base))
            inputs = [on.load(pointer) for pointer in row]
            totals = []
            for values in held:
                total = builder.fmul(values[0], inputs[0])
                for d, x in zip(values[1:], inputs[1:], strict=True):
                    total = on.multiply_add(d, x, total)
                totals.append(total)
            return totals

        def dots(i: Any, group: int) -> list[Any]:
            """Sum up a group of products: two registers become one as soon as both are there."""
            if group == 1:
                return products(i)
            half = group // 2
            first, second = dots(i, half), dots(builder.add(i, i.type(half)), half)
            return [_neighbours(on, a, b, group) for a, b in zip(first, second, strict=True)]

        with on.loop(WHOLE(0), count, GROUP) as i:
            counted = on.first(builder.sub(count, i), GROUP)
            zero = on.all(on.element, 0.0, GROUP)
            for start, sums in zip(starts, dots(i, GROUP), strict=True):
                while sums.type.count > GROUP:
                    sums = _neighbours(on, sums, None, GROUP)
                to = on.at(grad, builder.add(start, i), GROUP)
                kept = builder.select(counted, sums, zero)
                on.store(builder.fadd(on.load(to), kept), to)

    return _instructions(add_dots)


def _neighbours(on: _Emit, a: Any, b: Any, group: int) -> Any:
    """Add neighbours in two vectors, which shrink into one of a group of sums; or in one alone.

    First neighbours within lanes of 16 bytes, for which shuffles are fast, then whole lanes.
    """
    lane, width = 16 // on.size, a.type.count
    run = 1 if group <= lane else lane  # how many entries move as one
    part = lane // 2 if run == 1 else width  # how many of a vector lie side by side
    even = [i for i in range(width) if i // run % 2 == 0]
    order = [
        i + of
        for k in range(0, len(even), part)
        for of in ((0,) if b is None else (0, width))
        for i in even[k : k + part]
    ]
    b = a if b is None else b
    return on.builder.fadd(on.shuffle(a, b, order), on.shuffle(a, b, [i + run for i in order]))


# Dots need a register each: fewer neurons fit.
add_dots, add_dots_together = _dotting(1), _dotting(SIDE_BY_SIDE // 2)


@_instructions
def prefetch(on: _Emit, x: Any, index: Any) -> None:
    """Ask for the cache line of an entry of x, counted through all rows."""
    builder = on.builder
    on.prefetch(builder.bitcast(builder.gep(x, [index]), BYTE.as_pointer()))


@_instructions
def turn(on: _Emit, tile: Any, x: Any, width: Any, rows: Any, lane: Any, feature: Any) -> None:
    """tile[feature + i, lane + k] = x[rows[lane + k], feature + i] for a square of i and k."""
    builder = on.builder
    size, whole = on.width, lane.type
    square = []
    for k in range(size):
        sample = builder.load(builder.gep(rows, [builder.add(lane, whole(k))]))
        begin = builder.add(builder.mul(sample, width), feature)
        square.append(on.load(on.at(x, begin)))
    low = [i // 2 + size * (i % 2) for i in range(size)]
    high = [i + size // 2 for i in low]
    for _ in range(size.bit_length() - 1):
        # A perfect shuffle of rows and entries; after log2(size) of them the square is turned.
        pairs = zip(square[: size // 2], square[size // 2 :], strict=True)
        square = [on.shuffle(a, b, how) for a, b in pairs for how in (low, high)]
    for i, values in enumerate(square):
        row = builder.mul(builder.add(feature, whole(i)), whole(LANES))
        on.store(values, on.at(tile, builder.add(row, lane)))
