"""Pickles of plain data and numpy arrays, read without running anything they name.

>>> read_pickle(pickle.dumps({"labels": [1, 2]}))
{'labels': [1, 2]}

A first pass over the bytes refuses every operation that plain data does not need, and whatever
would take more time or memory than the file's own length explains. Then Python's unpickler reads
them. The few names that numpy writes stand for the functions below, which check what they get.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError

__all__ = ["read_pickle"]

_PLAIN = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "SHORT_BINSTRING",
    "BINSTRING", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "BUILD",
}  # fmt: skip
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAKERS = _TUPLES | {"EMPTY_LIST", "EMPTY_DICT", "REDUCE"}
_PUTS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"BINGET", "LONG_BINGET"}
_ALLOWED = _PLAIN | _MAKERS | _PUTS | _GETS
_STEPS = 2**20  # operations; the training part of CIFAR-100 takes some 200,000
_CONTAINERS = 2**12  # lists, tables and tuples; it takes some twenty
_DIMENSIONS = 8
_DTYPES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"}


def read_pickle(data: bytes) -> Any:
    """Return what a pickle of protocol 2 to 5 holds, if it is plain data.

    >>> read_pickle(b"cos\\nsystem\\nU\\x04date\\x85R.")
    Traceback (most recent call last):
    fissile._common.errors.FileError: it contains code (os system), refused; ...
    """
    _check(data)
    return _filled(_Unpickler(data).load())


def _check(data: bytes) -> None:
    """Refuse operations and claims that honest data does not make; nothing is built yet."""
    containers, is_tuple = 0, False  # whether the value on top of the stack is a tuple
    memo: dict[Any, bool] = {}  # whether a remembered value is one
    for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        containers += name in _MAKERS
        if name not in _ALLOWED:
            raise _code(name)
        if step > _STEPS:
            raise FileError("it takes more steps than honest data; get it from its home page")
        if containers > _CONTAINERS:
            raise FileError("it holds more lists and tables than honest data; get the original")
        if name in _PUTS:
            place = len(memo) if argument is None else argument
            if place > _STEPS:  # the unpickler makes room for all places before it
                raise FileError("it remembers more than honest data; get the original")
            memo[place] = is_tuple
        elif name in _GETS and memo.get(argument):
            # Tuples within tuples, each shared by the next, would be hashed 2**depth times.
            raise FileError("it uses a tuple twice, refused; get the original")
        elif name not in ("PROTO", "FRAME"):
            is_tuple = name in _TUPLES


class _Unpickler(pickle.Unpickler):
    """Python's unpickler with our own functions in place of numpy's."""

    def __init__(self, data: bytes) -> None:
        # Text of unknown encoding, which Python 2 wrote, is read as bytes.
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._left = len(data)  # bytes that may be made out of text; honest pickles need no more

    def find_class(self, module: str, name: str) -> Any:
        """Return a function of ours for a name that numpy writes, and refuse all others."""
        functions: dict[str, Callable[..., Any]] = {
            "numpy.core.multiarray _reconstruct": lambda *_: _Array(),
            "numpy._core.multiarray _reconstruct": lambda *_: _Array(),
            "numpy.core.numeric _frombuffer": _from_buffer,
            "numpy._core.numeric _frombuffer": _from_buffer,
            "numpy ndarray": _refuse,  # only ever an argument
            "numpy dtype": _Dtype,
            "_codecs encode": self._encode,
        }
        if (function := functions.get(f"{module} {name}")) is None:
            raise _code(f"{module} {name}"[:80])
        return _Function(function)

    def _encode(self, text: Any, code: Any) -> bytes:
        if not isinstance(text, str) or code not in ("latin1", "latin-1"):
            raise FileError("it encodes text oddly, refused; get it again")
        self._left -= len(text)
        if self._left < 0:
            raise FileError("it grows beyond its size; get it again")
        return text.encode("latin-1")


class _Function:
    """A function that a pickle can call and, unlike Python's own, cannot change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _code("BUILD")


class _Dtype:
    """The type of an array's numbers; the pickle adds their byte order later."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str | bytes):
            raise FileError("it holds an array of no known type, refused; get it again")
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if text not in _DTYPES:
            raise FileError(f"it holds an array of {text[:20]!r}, refused; get it again")
        self.dtype = np.dtype(f"<{text}")

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2:
            raise _code("BUILD")
        if state[1] not in ("|", "<", b"|", b"<"):
            raise FileError("it holds big-endian numbers; get the original file")


class _Array:
    """An array; a pickle makes it empty and then gives it its contents."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _code("BUILD")
        _, shape, dtype, fortran, raw = state
        self.value = _values(raw, dtype, shape, fortran=fortran is True)


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.value = _values(raw, dtype, shape, fortran=order == "F")
    return array


def _values(raw: Any, dtype: Any, shape: Any, *, fortran: bool) -> NDArray[Any]:
    """Return the array over the bytes that are there; its shape must account for all of them."""
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _Dtype):
        raise FileError("it holds an array that is not made of bytes, refused; get it again")
    few = isinstance(shape, tuple) and len(shape) <= _DIMENSIONS  # their product stays a number
    if not few or not all(type(n) is int and n >= 0 for n in shape):
        raise FileError("it holds an array of no shape; get it again")
    if math.prod(shape) * dtype.dtype.itemsize != len(raw):
        raise FileError(f"it holds {len(raw):,} bytes for the shape {shape}; get it again")
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if fortran else "C")


def _filled(value: Any) -> Any:
    """Return the value with real arrays, one level down: CIFAR's tables are no deeper."""
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items() if not isinstance(item, dict)}
    if isinstance(value, _Array):
        if value.value is None:
            raise FileError("it holds an array without contents; get it again")
        return value.value
    return value


def _refuse(*_: Any) -> Any:
    raise _code("numpy ndarray")


def _code(what: str) -> FileError:
    return FileError(f"it contains code ({what}), refused; get it from its home page")
