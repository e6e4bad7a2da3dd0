"""Reading files nobody vouches for, and writing files whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fissile._common.errors import FileError, FissileError
from fissile._common.files import atomic_write

__all__ = ["IN_MEMORY", "PACKED", "printable", "reading", "replacing", "replacing_folder"]

IN_MEMORY = 2**34  # bytes of one array that may be read into memory; larger ones must be mapped
PACKED = 1032  # no deflated byte stands for more than this many, so a larger claim is a lie
_SHOWN = 300  # characters of a message
_PATH = 4096


def printable(text: str, most: int = _SHOWN) -> str:
    """A text that may come from a file, as a terminal can show it: short, and without commands.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if len(text) > most:  # the middle goes; the advice is at the end
        text = f"{text[: most - 100]} ... {text[-95:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a torn, foreign or hostile file runs into into one error that names it.

    >>> with reading("torn.npz"):
    ...     raise EOFError("no data left")
    Traceback (most recent call last):
    fissile._common.errors.FileError: torn.npz: damaged or not what it claims to be: ...
    """
    shown = printable(str(path), _PATH)
    try:
        yield
    except FissileError as error:
        raise FileError(f"{shown}: {printable(str(error))}") from None
    except FileNotFoundError as error:
        missing = printable(str(error.filename or path), _PATH)
        raise FileError(f"{missing}: there is no such file; give another") from None
    except OSError as error:
        why = printable(error.strerror or str(error))
        raise FileError(f"{shown}: cannot be read: {why}") from None
    except Exception as error:  # parsers of others raise what they like
        why = printable(str(error).strip().split("\n")[0][:200]) or type(error).__name__
        raise FileError(
            f"{shown}: damaged or not what it claims to be: {why}; get or make it again"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file beside the real one to write to; it takes the real one's place at the end.

    >>> with replacing(Path("features.npz")) as beside:
    ...     beside.write_bytes(b"...")
    """
    with atomic_write(path) as file:
        yield Path(file.name)


@contextmanager
def replacing_folder(path: Path, known: frozenset[str]) -> Iterator[Path]:
    """The same for a folder; one that holds anything but `known` files is left alone.

    >>> with replacing_folder(Path("features"), frozenset({"x.npy"})) as beside:
    ...     np.save(beside / "x.npy", x)
    """
    if path.is_dir() and (foreign := {p.name for p in path.iterdir()} - known):
        raise FileError(f"{path} holds {min(foreign)!r}, which is not ours; give another folder")
    beside: Path | None = None
    try:
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        yield beside
        for file in beside.iterdir():
            _settle(file)
        os.chmod(beside, 0o777 & ~_umask())
        _swap(beside, path)
    except OSError as error:
        raise FileError(f"could not write {path}: {error.strerror or error}") from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _swap(new: Path, path: Path) -> None:
    """Put a folder in another's place; a folder that is not empty cannot be replaced in one go."""
    old = Path(f"{new}.old")
    with suppress(FileNotFoundError):
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)


def _settle(path: Path) -> None:
    with open(path, "r+b") as written:  # Windows flushes only what may be written to
        os.fsync(written.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
