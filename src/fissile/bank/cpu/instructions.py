"""The kernel's inner loops as vector instructions.

They are written as instructions because the compiler, left alone, keeps no row of samples in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "CACHE_LINE",
    "GROUP",
    "LANES",
    "add_dots",
    "compiled",
    "inner",
    "prefetch",
    "pull",
    "push",
    "turn",
]

#: Samples per tile: one neuron's activations then fill a few vector registers.
LANES = 64
#: Dots over the samples that are summed up together.
GROUP = 8
CACHE_LINE = 64

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R], **more: bool) -> Callable[_P, _R]:
    """Compile, hold no lock, and keep NaN and infinity meaningful under fast arithmetic."""
    options: Any = {
        "nogil": True,
        "cache": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    }
    return cast(Callable[_P, _R], njit(**options | more)(function))


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile what compiled functions alone call: a way in for Python takes long to compile."""
    return compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


_tools: Any = cgutils  # it has no types


def _instructions(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what a function emits; to type checkers it may be anything."""
    return intrinsic(function)


class _Emit:
    """Emits instructions on rows of [rows, LANES] arrays, register by register."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.args = [
            context.make_array(kind)(context, builder, value).data
            if isinstance(kind, types.Array)
            else value
            for kind, value in zip(signature.args, args, strict=True)
        ]
        self.element = self.args[0].type.pointee
        #: Numbers in a register of one cache line.
        self.width = CACHE_LINE // (4 if isinstance(self.element, ir.FloatType) else 8)

    def at(self, data: Any, index: Any, width: int = 0) -> Any:
        """Return a pointer to an entry, or to a vector of so many that begins there."""
        pointer = self.builder.gep(data, [index])
        if not width:
            return pointer
        kind = ir.VectorType(self.element, width).as_pointer()
        return self.builder.bitcast(pointer, kind)

    def row(self, data: Any, row: Any) -> list[Any]:
        """Return pointers to the registers of a row."""
        start = self.builder.mul(row, row.type(LANES))
        steps = range(0, LANES, self.width)
        return [self.at(data, self.builder.add(start, start.type(i)), self.width) for i in steps]

    def load(self, pointer: Any) -> Any:
        return self.builder.load(pointer, align=self._align())

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer, align=self._align())

    def _align(self) -> int:
        return CACHE_LINE // self.width

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def variables(self, values: list[Any]) -> list[Any]:
        return [_tools.alloca_once_value(self.builder, value) for value in values]

    def add_row(self, sums: list[Any], weight: Any, data: Any, row: Any) -> None:
        """Add a row, times a number, to variables that end up in registers."""
        for total, pointer in zip(sums, self.row(data, row), strict=True):
            old = self.builder.load(total)
            self.builder.store(self.multiply_add(weight, self.load(pointer), old), total)

    def copies(self, value: Any) -> Any:
        """Return a register full of one number."""
        kind = ir.VectorType(self.element, self.width)
        single = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _word(0))
        return self.shuffle(single, single, [0] * self.width)

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), [_word(i) for i in order])
        return self.builder.shuffle_vector(a, b, mask)

    def input_of(self, col: Any, p: Any, base: Any) -> Any:
        """Return the row of the tile that a weight reads."""
        index = self.builder.load(self.builder.gep(col, [p]))
        return self.builder.add(base, self.builder.sext(index, base.type))


def _word(number: int) -> Any:
    return ir.Constant(ir.IntType(32), number)


@_instructions
def push(
    typing: Any, tile: Any, r: Any, base: Any, w: Any, col: Any, lo: Any, hi: Any, b: Any, cut: Any
) -> Any:
    """Set tile[r] to the sum of w[p] * tile[base + col[p]] over lo <= p < hi, in registers.

    The sum begins with b, or with tile[r] itself if cut & 1; a ReLU follows if cut & 2.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        tile, r, base, w, col, lo, hi, b, cut = on.args
        row, zero = on.row(tile, r), on.copies(ir.Constant(on.element, 0.0))
        goes_on = builder.trunc(cut, ir.IntType(1))
        rectified = builder.trunc(builder.lshr(cut, cut.type(1)), ir.IntType(1))
        sums = on.variables([builder.select(goes_on, on.load(q), on.copies(b)) for q in row])
        with _tools.for_range_slice(builder, lo, hi, lo.type(1), lo.type) as (p, _):
            weight = on.copies(builder.load(builder.gep(w, [p])))
            on.add_row(sums, weight, tile, on.input_of(col, p, base))
        for total, pointer in zip(sums, row, strict=True):
            value = builder.load(total)
            negative = builder.fcmp_ordered("<", value, zero)  # NaN is not, and stays
            kept = builder.select(negative, zero, value)
            on.store(builder.select(rectified, kept, value), pointer)
        return context.get_dummy_value()

    return types.void(tile, r, base, w, col, lo, hi, b, cut), emit


@_instructions
def pull(
    typing: Any, delta: Any, r: Any, w: Any, slot: Any, source: Any, lo: Any, hi: Any,
    tile: Any, t: Any, rectified: Any,
) -> Any:  # fmt: skip
    """Set delta[r] to the sum of w[slot[q]] * delta[source[q]] over lo <= q < hi; return its sum.

    No gradient passes where a ReLU is off, that is where tile[t] is zero.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        delta, r, w, slot, source, lo, hi, tile, t, rectified = on.args
        zero = on.copies(ir.Constant(on.element, 0.0))
        sums = on.variables([zero] * (LANES // on.width))
        with _tools.for_range_slice(builder, lo, hi, lo.type(1), lo.type) as (q, _):
            weight = on.copies(builder.load(builder.gep(w, [on.input_of(slot, q, lo.type(0))])))
            on.add_row(sums, weight, delta, on.input_of(source, q, lo.type(0)))
        whole = zero
        for total, to, act in zip(sums, on.row(delta, r), on.row(tile, t), strict=True):
            value = builder.load(total)
            closed = builder.select(builder.fcmp_unordered(">", on.load(act), zero), value, zero)
            value = builder.select(builder.trunc(rectified, ir.IntType(1)), closed, value)
            on.store(value, to)
            whole = builder.fadd(whole, value)
        while whole.type.count > 1:
            half = whole.type.count // 2
            low, high = on.shuffle(whole, whole, range(half)), range(half, 2 * half)
            whole = builder.fadd(low, on.shuffle(whole, whole, high))
        return builder.extract_element(whole, _word(0))

    sig = delta.dtype(delta, r, w, slot, source, lo, hi, tile, t, rectified)
    return sig, emit


@_instructions
def add_dots(
    typing: Any, grad: Any, tile: Any, base: Any, col: Any, lo: Any, hi: Any, delta: Any, r: Any
) -> Any:
    """grad[p] += dot of delta[r] and tile[base + col[p]] for lo <= p < hi, a group at a time."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        grad, tile, base, col, lo, hi, delta, r = on.args
        held = [on.load(pointer) for pointer in on.row(delta, r)]

        def dot(p: Any) -> Any:
            pointers = on.row(tile, on.input_of(col, p, base))
            total = builder.fmul(held[0], on.load(pointers[0]))
            for d, pointer in zip(held[1:], pointers[1:], strict=True):
                total = on.multiply_add(d, on.load(pointer), total)
            return total

        last = builder.sub(hi, hi.type(1))
        size = hi.type(GROUP)
        with _tools.for_range_slice(builder, lo, hi, size, lo.type) as (p, _):
            # Beyond the end the last dot is repeated, and not added.
            places = [builder.add(p, p.type(i)) for i in range(GROUP)]
            clamped = [builder.select(builder.icmp_signed("<", q, hi), q, last) for q in places]
            sums = _sums(on, [dot(q) for q in clamped])
            to = on.at(grad, p, GROUP)
            counted = _below(on, builder.sub(hi, p))
            zero = ir.Constant(sums.type, [ir.Constant(on.element, 0.0)] * GROUP)
            on.store(builder.fadd(on.load(to), builder.select(counted, sums, zero)), to)
        return context.get_dummy_value()

    return types.void(grad, tile, base, col, lo, hi, delta, r), emit


def _sums(on: _Emit, vectors: list[Any]) -> Any:
    """Sum every vector up: neighbours are added while two vectors shrink into one."""
    while len(vectors) > 1 or vectors[0].type.count > GROUP:
        width = vectors[0].type.count
        pairs = pairwise(vectors) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        count = 2 * width if len(vectors) > 1 else width
        pairs = list(pairs)[::2]
        even, odd = range(0, count, 2), range(1, count, 2)
        vectors = [on.builder.fadd(on.shuffle(a, b, even), on.shuffle(a, b, odd)) for a, b in pairs]
    return vectors[0]


def _below(on: _Emit, count: Any) -> Any:
    """Mark the members of a group whose number is below a count."""
    kind = ir.VectorType(count.type, GROUP)
    numbers = ir.Constant(kind, [count.type(i) for i in range(GROUP)])
    single = on.builder.insert_element(ir.Constant(kind, ir.Undefined), count, _word(0))
    return on.builder.icmp_signed("<", numbers, on.shuffle(single, single, [0] * GROUP))


@_instructions
def prefetch(typing: Any, x: Any, index: Any) -> Any:
    """Ask for the cache line of an entry of x, counted through all rows."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        x, index = on.args
        pointer = builder.bitcast(on.at(x, index), _tools.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        function = _tools.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, _word(0), _word(3), _word(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.void(x, index), emit


@_instructions
def turn(typing: Any, tile: Any, x: Any, width: Any, rows: Any, lane: Any, feature: Any) -> Any:
    """tile[feature + i, lane + k] = x[rows[lane + k], feature + i] for a square of i and k."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        tile, x, width, rows, lane, feature = on.args
        size, whole = on.width, lane.type
        square = []
        for k in range(size):
            sample = builder.load(builder.gep(rows, [builder.add(lane, whole(k))]))
            begin = builder.add(builder.mul(sample, width), feature)
            square.append(on.load(on.at(x, begin, size)))
        low = [i // 2 + size * (i % 2) for i in range(size)]
        high = [i + size // 2 for i in low]
        for _ in range(size.bit_length() - 1):
            # A perfect shuffle of rows and entries; after log2(size) of them the square is turned.
            pairs = zip(square[: size // 2], square[size // 2 :], strict=True)
            square = [on.shuffle(a, b, how) for a, b in pairs for how in (low, high)]
        for i, values in enumerate(square):
            row = builder.mul(builder.add(feature, whole(i)), whole(LANES))
            on.store(values, on.at(tile, builder.add(row, lane), size))
        return context.get_dummy_value()

    return types.void(tile, x, width, rows, lane, feature), emit
