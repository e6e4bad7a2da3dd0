"""Vector instructions for numba's compiled functions, emitted through LLVM.

The compiler, left alone, neither keeps rows in registers nor vectorises sums over several children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from llvmlite import ir
from numba import njit
from numba.core import cgutils

BIT, BYTE, WORD, WHOLE = (ir.IntType(bits) for bits in (1, 8, 32, 64))
FLOAT = ir.FloatType()
#: Bytes that a processor reads from memory at once.
CACHE_LINE = 64

_P = ParamSpec("_P")
_R = TypeVar("_R")
_tools: Any = cgutils  # it has no types


def compiled(function: Callable[_P, _R], **more: Any) -> Callable[_P, _R]:
    """Compile on the first call, keep the result on disk, and hold no lock while running."""
    options: Any = {"nogil": True, "cache": True, "error_model": "numpy"}
    return cast(Callable[_P, _R], njit(**options | more)(function))


class Vectors:
    """Emits instructions on vectors of ``width`` numbers."""

    def __init__(self, builder: Any, width: int) -> None:
        self.builder, self.width = builder, width

    def vector(self, element: Any, width: int = 0) -> Any:
        """Return the type of a vector, of another width if one is given."""
        return ir.VectorType(element, width or self.width)

    def all(self, element: Any, value: float, width: int = 0) -> Any:
        """Return a constant vector full of one number."""
        kind = self.vector(element, width)
        return ir.Constant(kind, [ir.Constant(element, value)] * kind.count)

    def copies(self, value: Any, width: int = 0) -> Any:
        """Return a vector full of one value."""
        kind = self.vector(value.type, width)
        single = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, WORD(0))
        return self.shuffle(single, single, [0] * kind.count)

    def first(self, count: Any, width: int = 0) -> Any:
        """Mark the entries of a vector whose number is below a count."""
        kind = self.vector(WHOLE, width)
        numbers = ir.Constant(kind, [WHOLE(i) for i in range(kind.count)])
        return self.builder.icmp_signed("<", numbers, self.copies(count, width))

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        """Return the entries of two vectors that ``order`` names, counted through both."""
        mask = ir.Constant(self.vector(WORD, len(order)), [WORD(i) for i in order])
        return self.builder.shuffle_vector(a, b, mask)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, as one instruction where there is one."""
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def rectified(self, value: Any, zero: Any, condition: Any) -> Any:
        """Return the ReLU of a value if a condition holds, else the value."""
        negative = self.builder.fcmp_ordered("<", value, zero)  # NaN is not, and stays
        return self.builder.select(condition, self.builder.select(negative, zero, value), value)

    def call(self, name: str, result: Any, args: list[Any], **how: Any) -> Any:
        """Call one of LLVM's functions."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = _tools.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, args, **how)

    def prefetch(self, pointer: Any) -> None:
        """Ask for the cache line that a pointer to bytes is in: to read, soon, as data."""
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, WORD(0), WORD(3), WORD(1)])

    def variable(self, value: Any) -> Any:
        """Return a variable, which ends up in a register."""
        return _tools.alloca_once_value(self.builder, value)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """Emit the block once, as the body of a loop; yield the loop's index."""
        slices = _tools.for_range_slice(self.builder, start, stop, WHOLE(step), WHOLE)
        with slices as (index, _):
            yield index
