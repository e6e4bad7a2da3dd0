"""The errors fissile raises on purpose: each says what was wrong and what to do."""

from __future__ import annotations

import operator
from typing import SupportsIndex

__all__ = ["FileError", "FissileError", "whole"]


class FissileError(ValueError):
    """Something given to fissile cannot be right; the message says what, and what to do."""


class FileError(FissileError):
    """A file is torn, foreign or hostile, or could not be written."""


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
