"""Reading pickles without running them: plain data and numpy arrays, and nothing else.

>>> read_pickle(pickle.dumps({"labels": [1, 2]}))
{'labels': [1, 2]}

A pickle is a program for a small machine with a stack. This is that machine without the parts that
import or call anything: the few names numpy writes are symbols that only mean something here.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError

__all__ = ["read_pickle"]

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_SYMBOLS = {
    **{(module, "_reconstruct"): "array" for module in _MULTIARRAY},
    **{(module, "_frombuffer"): "buffer" for module in _NUMERIC},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
_DTYPES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"}
# What old Python wrote as text of unknown encoding is bytes; the rest is what it says.
_BYTES = {"SHORT_BINSTRING", "BINSTRING"}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MARK = object()
_MOST = 2**20  # operations; the training part of CIFAR-100 takes some 200,000
_CONTAINERS = 2**12  # lists, tables and tuples; it takes some twenty
_DIMENSIONS = 8
_MAKERS = {"EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE"}


class _Symbol(str):
    """A name that stands for itself and can do nothing."""


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code = code


class _Array:
    """An array that is still to be filled, as the machine makes it in two steps."""

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None


def read_pickle(data: bytes) -> Any:
    """What a pickle of protocol 2 to 5 holds, if it is plain data; nothing in it is ever run.

    >>> read_pickle(b"cos\\nsystem\\nU\\x04date\\x85R.")
    Traceback (most recent call last):
    fissile._common.errors.FileError: it contains code (os system), refused; ...
    """
    machine = _Machine(len(data))
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count > _MOST:
            raise FileError("it takes more steps than honest data; get it from its home page")
        if opcode.name == "STOP":
            return _filled(machine.pop())
        machine.step(opcode.name, argument)
    raise FileError("it is cut short; get it again")


def _filled(value: Any) -> Any:
    """Put arrays in the places of those that were to be filled, one level down: all we read."""
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items() if not isinstance(item, dict)}
    if isinstance(value, _Array):
        if value.value is None:
            raise FileError("it holds an array without contents; get it again")
        return value.value
    return value


class _Machine:
    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.left = size  # bytes that may still be made out of text; honest pickles need no more
        self.containers = 0

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise FileError("it takes what is not there; get it again")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise FileError("it fills something that cannot be filled; get it again")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise FileError("it closes what was never opened; get it again")

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _BYTES:
            self.stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.top(object)
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif (step := _STEPS.get(name)) is not None:
            self.count(name)
            step(self)
        elif name == "GLOBAL":
            self.stack.append(_symbol(*argument.split(" ", 1)))
        elif name not in ("PROTO", "FRAME"):
            raise FileError(f"it contains code ({name}), refused; get it from its home page")

    def count(self, name: str) -> None:
        self.containers += name in _MAKERS
        if self.containers > _CONTAINERS:
            raise FileError("it holds more lists and tables than honest data; get the original")

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top(object)

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_symbol(module, name))

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def append(self) -> None:
        item = self.pop()
        self.top(list).append(item)

    def appends(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(isinstance(k, str | bytes | int) for k in keys):
            raise FileError("it has a key that is no text or number; get it again")
        self.top(dict).update(zip(keys, values, strict=True))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def reduce(self) -> None:
        """Do what one of numpy's names asks for, with our own hands."""
        arguments, symbol = self.pop(), self.pop()
        if not isinstance(symbol, _Symbol) or not isinstance(arguments, tuple):
            raise FileError("it contains code (REDUCE), refused; get it from its home page")
        if symbol == "array":
            self.stack.append(_Array())
        elif symbol == "buffer" and len(arguments) == 4:
            raw, dtype, shape, order = arguments
            array = _Array()
            array.value = _array(raw, dtype, shape, fortran=order == "F")
            self.stack.append(array)
        elif symbol == "dtype" and arguments:
            self.stack.append(_dtype(arguments[0]))
        elif symbol == "encode" and _is_latin(arguments):
            self.left -= len(arguments[0])
            if self.left < 0:
                raise FileError("it grows beyond its size; get it again")
            self.stack.append(arguments[0].encode("latin-1"))
        else:
            raise FileError(f"it uses numpy's {symbol} oddly, refused; get it again")

    def build(self) -> None:
        state = self.pop()
        if not isinstance(state, tuple) or not self.stack:
            raise FileError("it contains code (BUILD), refused; get it from its home page")
        target = self.stack[-1]
        if isinstance(target, _Array) and len(state) == 5:
            _, shape, dtype, fortran, raw = state
            target.value = _array(raw, dtype, shape, fortran=bool(fortran))
        elif isinstance(target, _Dtype) and len(state) >= 2:
            if state[1] not in ("|", "<", b"|", b"<"):
                raise FileError("it holds big-endian numbers; get the original file")
        else:
            raise FileError("it contains code (BUILD), refused; get it from its home page")


_STEPS: dict[str, Callable[[_Machine], None]] = {
    "MARK": lambda m: m.stack.append(_MARK),
    "EMPTY_LIST": lambda m: m.stack.append([]),
    "EMPTY_DICT": lambda m: m.stack.append({}),
    "TUPLE": lambda m: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m: m.tuple_of(1),
    "TUPLE2": lambda m: m.tuple_of(2),
    "TUPLE3": lambda m: m.tuple_of(3),
    "MEMOIZE": _Machine.memoize,
    "STACK_GLOBAL": _Machine.stack_global,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda m: m.set_items(m.since_mark()),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


def _is_latin(arguments: tuple[Any, ...]) -> bool:
    text, *code = arguments or (None,)
    return isinstance(text, str) and code in (["latin1"], ["latin-1"])


def _symbol(module: Any, name: Any) -> _Symbol:
    # Only texts are looked up or shown: tuples within tuples, each shared by the next, would be
    # hashed and written out 2**depth times.
    if not isinstance(module, str) or not isinstance(name, str):
        raise FileError("it contains code (STACK_GLOBAL), refused; get it from its home page")
    if (module, name) not in _SYMBOLS:
        shown = f"{module} {name}"[:80]
        raise FileError(f"it contains code ({shown}), refused; get it from its home page")
    return _Symbol(_SYMBOLS[module, name])


def _dtype(code: Any) -> _Dtype:
    if not isinstance(code, str | bytes):
        raise FileError("it holds an array of no known type, refused; get it again")
    text = code.decode("latin-1") if isinstance(code, bytes) else code
    if text not in _DTYPES:
        raise FileError(f"it holds an array of {text[:20]!r}, refused; get it again")
    return _Dtype(text)


def _array(raw: Any, dtype: Any, shape: Any, *, fortran: bool) -> NDArray[Any]:
    """The array over the bytes that are there; its shape must account for all of them."""
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _Dtype):
        raise FileError("it holds an array that is not made of bytes, refused; get it again")
    few = isinstance(shape, tuple) and len(shape) <= _DIMENSIONS  # their product stays a number
    if not few or not all(type(n) is int and n >= 0 for n in shape):
        raise FileError("it holds an array of no shape; get it again")
    kind = np.dtype("<" + dtype.code)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise FileError(f"it holds {len(raw):,} bytes for the shape {shape}; get it again")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")
