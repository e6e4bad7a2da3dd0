"""Errors of SQLite, the system and damaged rows, turned into ones that say what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fissile._common.errors import FileError

__all__ = ["UNTOUCHED", "advised", "undamaged"]

_KEPT = "what was stored is kept: {}, then run again; finished trials are not repeated"
UNTOUCHED = "it was left as it is: put a whole copy in its place, or give another folder"
_RIGHTS = "see that you may write to the folder and its files, or give another folder"
_ADVICE = {
    sqlite3.SQLITE_FULL: _KEPT.format("free some space"),
    sqlite3.SQLITE_IOERR: _KEPT.format("see whether the disk is full or failing"),
    sqlite3.SQLITE_BUSY: _KEPT.format("wait for the process that writes to it"),
    sqlite3.SQLITE_CORRUPT: f"it is damaged; {UNTOUCHED}",
    sqlite3.SQLITE_NOTADB: f"it is no store of fissile; {UNTOUCHED}",
    sqlite3.SQLITE_READONLY: _RIGHTS,
    sqlite3.SQLITE_CANTOPEN: _RIGHTS,
}


@contextmanager
def advised(file: Path) -> Iterator[None]:
    """Turn an error of SQLite or the system into one that says what to do."""
    try:
        yield
    except UnicodeDecodeError:  # not even SQLite's message about the damage could be read
        raise FileError(f"{file}: {_ADVICE[sqlite3.SQLITE_CORRUPT]}") from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the bits above are details
        advice = _ADVICE.get(code, "open the store again, and if that is no help, another folder")
        raise FileError(f"{file}: {_line(error)}; {advice}") from None
    except OSError as error:
        raise FileError(f"{file}: {error.strerror or error}; {_RIGHTS}") from None


@contextmanager
def undamaged(file: Path, what: str) -> Iterator[None]:
    """Turn any error while reading what is stored into one that names it."""
    try:
        yield
    except Exception as error:  # whatever bad bytes run into, it becomes one clear error
        raise FileError(f"{file}: {what} is damaged ({_line(error)}); {UNTOUCHED}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
