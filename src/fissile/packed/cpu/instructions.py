"""What the kernels are written with: vectors, addresses and how weights are read from memory.

Inner loops are emitted as vector instructions because the compiler, left alone, does not vectorise
sums that are dealt out to several children.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fissile._common import llvm
from fissile._common.llvm import BYTE, CACHE_LINE, FLOAT, WHOLE, WORD, Vectors, compiled

__all__ = [
    "BYTES",
    "GELU",
    "GELU_TANH",
    "SILU",
    "SOURCE",
    "Emit",
    "bend",
    "get",
    "instructions",
    "put",
    "signature",
    "together",
]


#: The kinds of weights and the bytes of each.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: How far ahead weights are asked for, where reading them is interrupted by wrong guesses.
AHEAD, LINES = 2048, 4

#: Bytes of samples that every row of weights meets before the next samples come: they stay cached.
SAMPLES = 1 << 19

#: What is kept on disk is found by the file of a kernel and by what the kernel closes over. Each
#: closes over this number, so that a change of this file or of the emitter is noticed.
SOURCE = zlib.crc32(Path(__file__).read_bytes() + Path(llvm.__file__).read_bytes())


def instructions(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what a function emits; numbers known beforehand stay known."""
    return intrinsic(prefer_literal=True)(function)


def signature(*known: Any, numbers: int) -> Any:
    """Return the type of an instruction on things known beforehand, then whole numbers."""
    return types.void(*known, *[types.int64] * numbers)


@compiled
def together(width: int, tile: int) -> int:
    """Return how many samples of ``width`` inputs stay cached: whole tiles, at least one."""
    return max(1, SAMPLES // max(1, 4 * width * tile)) * tile


class Emit(Vectors):
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
        """Sum a vector up."""
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
        """Ask for weights that come soon."""
        for line in range(LINES):
            self.prefetch(self.address(address, WHOLE(AHEAD + line * CACHE_LINE), BYTE))


@instructions
def get(typing: Any, base: Any, index: Any) -> Any:
    """Return a float32 from memory."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, index = args
        return builder.load(builder.gep(builder.inttoptr(base, FLOAT.as_pointer()), [index]))

    return types.float32(types.int64, types.int64), emit


@instructions
def put(typing: Any, base: Any, index: Any, value: Any) -> Any:
    """Write a float32 to memory."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, index, value = args
        pointer = builder.gep(builder.inttoptr(base, FLOAT.as_pointer()), [index])
        builder.store(value, pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


# --- the activations that take more than a comparison, in float32

GELU, GELU_TANH, SILU = 2, 3, 4

_HALF, _ONE = np.float32(0.5), np.float32(1)
_ROOT_HALF, _SCALE = np.float32(math.sqrt(0.5)), np.float32(math.sqrt(2 / math.pi))
_CUBE = np.float32(0.044715)


@compiled
def _bent(v: np.float32, which: int) -> np.float32:
    if which == GELU:
        return _HALF * v * (_ONE + math.erf(v * _ROOT_HALF))
    if which == GELU_TANH:
        return _HALF * v * (_ONE + math.tanh(_SCALE * (v + _CUBE * v * v * v)))
    return v / (_ONE + math.exp(-v))


def _bending(source: int) -> Callable[..., None]:
    @compiled
    def bend(y: int, outputs: int, batch: int, each: int, which: int, lo: int, hi: int) -> None:
        """Apply an activation to the outputs of some rows of weights, each of which has several."""
        assert source >= 0
        for b in range(batch):
            for c in range(lo * each, hi * each):
                at = b * outputs + c
                put(y, at, _bent(get(y, at), which))

    return bend


#: The kernel: an address, sizes, which activation, then the first row and the end.
bend = _bending(SOURCE)
