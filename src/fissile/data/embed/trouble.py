"""What foreign code raises, as one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fissile._common.errors import FissileError

__all__ = ["foreign", "reason"]


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn whatever foreign code runs into into one error that says what failed.

    >>> with foreign("item 3 of train could not be encoded"):
    ...     raise RuntimeError("no such layer")
    Traceback (most recent call last):
    fissile._common.errors.FissileError: item 3 of train could not be encoded: no such layer
    """
    try:
        yield
    except FissileError:
        raise
    except Exception as error:
        raise FissileError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return what an error says, in one line.

    >>> reason(RuntimeError("no network\\n  try again"))
    'no network try again'
    """
    return " ".join(str(error).split()) or type(error).__name__
