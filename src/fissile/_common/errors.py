"""The errors fissile raises on purpose: each says what was wrong and what to do."""

from __future__ import annotations

import importlib.util
import operator
import sys
from typing import SupportsIndex

import torch


class FissileError(ValueError):
    """An argument cannot be right; the message says what is wrong and what to do.

    >>> try:
    ...     whole("alpha", 0, least=1)
    ... except FissileError as error:
    ...     print(error)
    alpha=0 is not a whole number of at least 1; give one
    """


class FileError(FissileError):
    r"""A file is torn, foreign or hostile, or could not be written.

    >>> print(FileError("a bell" + chr(7)))  # no text out of a file commands the terminal
    a bell\x07
    """

    def __str__(self) -> str:
        return printable(super().__str__(), 4500, keep="")


def printable(text: str, most: int | None = None, keep: str = "\n\t\xa0") -> str:
    r"""Return a text in which nothing is a command to the terminal or turns its direction.

    >>> print(printable("a \x1b[31mred\x1b[0m name"))
    a \x1b[31mred\x1b[0m name

    Of a text longer than ``most`` the middle goes: the advice of an error is at its end.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most - 100]} ... {text[-95:]}"
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none.

    >>> first_line(ValueError("too large", 5))
    "('too large', 5)"
    """
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def whole(name: str, value: SupportsIndex, *, least: int) -> int:
    """Return a whole number of at least ``least`` as an int, or say what is wrong with it.

    >>> whole("alpha", 2, least=1)
    2
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise FissileError(f"{name}={value!r} is not a whole number of at least {least}; give one")
    return number


def needs(module: str, extra: str) -> None:
    """Raise an error that says how to install an optional package, where it is missing."""
    if importlib.util.find_spec(module) is None:
        # pip finds what is installed without an index, be it a clone or a wheel.
        command = f"{sys.executable} -m pip install 'fissile[{extra}]'"
        raise FissileError(f"this needs {module}: {command}")


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that networks can be trained on, or raise an error that says why not.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise FissileError(f"cannot train on {str(device)!r} here: {first_line(error)}") from None
