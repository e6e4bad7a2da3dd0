"""Reading files no further than they may go, and writing them whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal

from fissile._common.errors import FileError, FissileError, first_line, printable

IN_MEMORY = 2**34  # bytes of one array that may be read into memory; larger ones must be mapped
_SHOWN = 300  # characters of a message
_PATH = 4096


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading, or refuse what is none: a device has no end, a FIFO may not begin.

    >>> with open_regular("names.json") as file:
    ...     file.read(9)
    b'["cat", "'
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError("it is not a regular file; give one")
    return file


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a regular file, or refuse one that has more than ``most``.

    >>> read_bounded("names.json", 2**20)
    b'["cat", "dog"]'
    """
    with open_regular(path) as file:
        # Never more than the file has: Python makes room for as much as it is asked for.
        data = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > most:
        raise FileError(f"{Path(path).name} has more than {most:,} bytes; get it again")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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
        why = printable(first_line(error), 200)
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
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["wb", "w"] = "wb"
) -> Iterator[IO[Any]]:
    """Open a temporary file that takes the place of ``path`` when the block ends without an error.

    >>> with atomic_write("model.json", "w") as file:
    ...     file.write("{}")

    After an error, of whatever kind, the old file is as it was and the temporary one is gone. A new
    file has the permissions that the process's umask allows; an existing one keeps its own. Code
    that wants a path may write to ``file.name``.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}")
    try:
        # Mode "x" creates the file with 0o666, which the kernel masks: os.umask is not needed.
        text = None if "b" in mode else "utf-8"
        with open(temporary, mode.replace("w", "x"), encoding=text) as file:
            existing = target if target.exists() else temporary
            permissions = stat.S_IMODE(existing.stat().st_mode)
            os.chmod(temporary, permissions | stat.S_IWUSR)  # before others could read anything
            yield file
        with open(temporary, "r+b") as written:  # again, since the block may have renamed another
            os.fsync(written.fileno())
        os.chmod(temporary, permissions)
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise FileError(f"could not write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # the folder may be missing; the error above says so
            temporary.unlink(missing_ok=True)


def move_finished(made: Path, folder: Path, last: str) -> None:
    """Move all files from one folder to another on the same disk, the one named ``last`` last.

    >>> move_finished(Path("report.new"), Path("report"), last="index.html")

    Everything is safe on the disk before the first old file is replaced.
    """
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for name in files:
        with open(made / name, "rb") as written:
            os.fsync(written.fileno())
        (folder / name).parent.mkdir(exist_ok=True)
    for name in sorted(files, key=lambda name: name.name == last):
        os.replace(made / name, folder / name)


@contextmanager
def replacing_folder(path: Path, known: frozenset[str]) -> Iterator[Path]:
    """Make a folder that replaces `path` at the end; one with other than `known` files is kept."""
    if path.is_dir() and (foreign := {p.name for p in path.iterdir()} - known):
        raise FileError(f"{path} holds {min(foreign)!r}, which is not ours; give another folder")
    name = f".{path.name[:64]}.{secrets.token_hex(8)}"
    beside, old = (path.with_name(f"{name}.{end}") for end in ("new", "old"))
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


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a power failure, where the file system can."""
    with suppress(OSError):  # Windows opens no folders; the file is in place already
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
