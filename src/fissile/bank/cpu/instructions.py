"""The kernel's inner loops as vector instructions.

The compiler, left alone, keeps no row of samples in registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fissile._common import llvm
from fissile._common.llvm import BIT, BYTE, CACHE_LINE, WORD, Vectors

#: Samples per tile: one neuron's activations then fill a few vector registers.
LANES = 64
#: Dots over the samples that are summed up together.
GROUP = 8

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
            result = function(on, *on.args)
            return context.get_dummy_value() if result is None else result

        none = function.__annotations__["return"] == "None"
        returned = types.void if none else kinds[0].dtype
        return returned(*kinds), emit

    typed.__name__ = function.__name__
    typed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return intrinsic(typed)


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

    def add_row(self, sums: list[Any], weight: Any, data: Any, row: Any) -> None:
        """Add a row, times a number, to variables that end up in registers."""
        for total, pointer in zip(sums, self.row(data, row), strict=True):
            old = self.builder.load(total)
            self.builder.store(self.multiply_add(weight, self.load(pointer), old), total)

    def input_of(self, col: Any, p: Any, base: Any) -> Any:
        """Return the row of the tile that a weight reads."""
        index = self.builder.load(self.builder.gep(col, [p]))
        return self.builder.add(base, self.builder.sext(index, base.type))


@_instructions
def push(
    on: _Emit, tile: Any, r: Any, base: Any, w: Any, col: Any, lo: Any, hi: Any, b: Any, cut: Any
) -> None:
    """Set tile[r] to the sum of w[p] * tile[base + col[p]] over lo <= p < hi, in registers.

    The sum begins with b, or with tile[r] itself if cut & 1; a ReLU follows if cut & 2.
    """
    builder = on.builder
    row, zero = on.row(tile, r), on.all(on.element, 0.0)
    goes_on = builder.trunc(cut, BIT)
    relu = builder.trunc(builder.lshr(cut, cut.type(1)), BIT)
    sums = [on.variable(builder.select(goes_on, on.load(q), on.copies(b))) for q in row]
    with on.loop(lo, hi) as p:
        weight = on.copies(builder.load(builder.gep(w, [p])))
        on.add_row(sums, weight, tile, on.input_of(col, p, base))
    for total, pointer in zip(sums, row, strict=True):
        on.store(on.rectified(builder.load(total), zero, relu), pointer)


@_instructions
def pull(
    on: _Emit, delta: Any, r: Any, w: Any, slot: Any, source: Any, lo: Any, hi: Any,
    tile: Any, t: Any, rectified: Any,
) -> Any:  # fmt: skip
    """Set delta[r] to the sum of w[slot[q]] * delta[source[q]] over lo <= q < hi; return its sum.

    No gradient passes where a ReLU is off, that is where tile[t] is zero.
    """
    builder = on.builder
    zero = on.all(on.element, 0.0)
    sums = [on.variable(zero) for _ in range(LANES // on.width)]
    with on.loop(lo, hi) as q:
        weight = on.copies(builder.load(builder.gep(w, [on.input_of(slot, q, lo.type(0))])))
        on.add_row(sums, weight, delta, on.input_of(source, q, lo.type(0)))
    whole = zero
    for total, to, act in zip(sums, on.row(delta, r), on.row(tile, t), strict=True):
        value = builder.load(total)
        closed = builder.select(builder.fcmp_unordered(">", on.load(act), zero), value, zero)
        value = builder.select(builder.trunc(rectified, BIT), closed, value)
        on.store(value, to)
        whole = builder.fadd(whole, value)
    while whole.type.count > 1:
        half = whole.type.count // 2
        low, high = on.shuffle(whole, whole, range(half)), range(half, 2 * half)
        whole = builder.fadd(low, on.shuffle(whole, whole, high))
    return builder.extract_element(whole, WORD(0))


@_instructions
def add_dots(
    on: _Emit, grad: Any, tile: Any, base: Any, col: Any, lo: Any, hi: Any, delta: Any, r: Any
) -> None:
    """grad[p] += dot of delta[r] and tile[base + col[p]] for lo <= p < hi, a group at a time."""
    builder = on.builder
    held = [on.load(pointer) for pointer in on.row(delta, r)]

    def dot(p: Any) -> Any:
        pointers = on.row(tile, on.input_of(col, p, base))
        total = builder.fmul(held[0], on.load(pointers[0]))
        for d, pointer in zip(held[1:], pointers[1:], strict=True):
            total = on.multiply_add(d, on.load(pointer), total)
        return total

    last = builder.sub(hi, hi.type(1))
    with on.loop(lo, hi, GROUP) as p:
        # Beyond the end the last dot is repeated, and not added.
        places = [builder.add(p, p.type(i)) for i in range(GROUP)]
        clamped = [builder.select(builder.icmp_signed("<", q, hi), q, last) for q in places]
        sums = _sums(on, [dot(q) for q in clamped])
        to = on.at(grad, p, GROUP)
        counted, zero = on.first(builder.sub(hi, p), GROUP), on.all(on.element, 0.0, GROUP)
        on.store(builder.fadd(on.load(to), builder.select(counted, sums, zero)), to)


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
