"""Reading files nobody vouches for, and writing where other processes may."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fissile._common.errors import FileError, FissileError, printable

IN_MEMORY = 2**34  # bytes of one array that may be read into memory; larger ones must be mapped
_SHOWN = 300  # characters of a message
_PATH = 4096


def most_unpacked(size: int) -> int:
    """Return how many bytes a packed file of that size may stand for, in memory.

    Equal numbers cost next to nothing in a packed file, and features are not equal.
    """
    return int(min(IN_MEMORY, 2**24 + 100 * size))


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error that a torn, foreign or hostile file causes into one that names it."""
    shown = printable(str(path), _PATH)
    try:
        yield
    except FissileError as error:
        raise FileError(f"{shown}: {printable(str(error), _SHOWN)}") from None
    except FileNotFoundError as error:
        missing = printable(str(error.filename or path), _PATH)
        raise FileError(f"{missing}: there is no such file; give another") from None
    except OSError as error:
        why = printable(error.strerror or str(error), _SHOWN)
        raise FileError(f"{shown}: cannot be read: {why}") from None
    except Exception as error:  # parsers of others raise what they like
        why = printable(str(error).strip().split("\n")[0], 200) or type(error).__name__
        raise FileError(
            f"{shown}: damaged or not what it claims to be: {why}; get or make it again"
        ) from None


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Keep other processes out with a lock file, or raise an error with the message `busy`."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise FileError(busy) from None
    except OSError:  # a disk without locks, or one that cannot be written to, as will show
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows deletes it at the release
                path.unlink(missing_ok=True)
            lock.release()


@contextmanager
def replacing_folder(path: Path, known: frozenset[str]) -> Iterator[Path]:
    """Make a folder that replaces `path` at the end; one with other than `known` files is kept."""
    if path.is_dir() and (foreign := {p.name for p in path.iterdir()} - known):
        raise FileError(f"{path} holds {min(foreign)!r}, which is not ours; give another folder")
    beside, old = (
        path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.{end}") for end in ("new", "old")
    )
    try:
        beside.mkdir()
        yield beside
        for file in beside.iterdir():
            with open(file, "r+b") as written:  # Windows flushes only what may be written to
                os.fsync(written.fileno())
        # A folder that is not empty cannot be replaced in one go.
        with suppress(FileNotFoundError):
            os.rename(path, old)
        os.rename(beside, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise FileError(f"could not write {path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
