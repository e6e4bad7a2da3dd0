"""A few files out of a ``.tar.gz``, read block by block: nothing it claims is believed unseen.

>>> unpacked(Path("cifar-100-python.tar.gz"), {"cifar-100-python/meta"}, most=2**28).keys()
dict_keys(['cifar-100-python/meta'])
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath
from typing import IO

from fissile._common.errors import FileError

__all__ = ["unpacked"]

_BLOCK = 512
_PIECE = 2**16
_MEMBERS = 1000  # a header costs its sender next to nothing, and us time
# No links, devices or sparse files, and none of the headers that say how long they are themselves.
_KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)


def unpacked(path: Path, wanted: Set[str], most: int) -> dict[str, bytes]:
    """The wanted files of an archive that holds `most` bytes or less; nothing goes to the disk.

    >>> unpacked(Path("a.tar.gz"), {"a/readme"}, most=2**20)
    {'a/readme': b'hello'}
    """
    found: dict[str, bytes] = {}
    with gzip.open(path) as file:
        for member in _members(file, most):  # type: ignore[arg-type]
            name = str(PurePosixPath(member.name))
            padding = -member.size % _BLOCK
            if name not in wanted:
                _skip(file, member.size + padding)  # type: ignore[arg-type]
                continue
            if member.isdir() or name in found:
                raise FileError(f"{name} is no file or there twice, refused; get the original")
            found[name] = file.read(member.size)
            if len(found[name]) != member.size:
                raise FileError(f"{name} is cut short; get it again")
            _skip(file, padding)  # type: ignore[arg-type]
    return found


def _members(file: IO[bytes], most: int) -> Iterator[tarfile.TarInfo]:
    """The headers, one after another; the caller reads what lies between them."""
    for _ in range(_MEMBERS):
        block = file.read(_BLOCK)
        if not block.strip(b"\0"):
            return _drain(file, most)
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        name = PurePosixPath(member.name)
        most -= max(member.size, 0)
        good = member.type in _KINDS and member.size >= 0 and most >= 0
        # A folder has no contents; some readers would skip them and others take them for headers.
        if not good or (member.isdir() and member.size) or name.is_absolute() or ".." in name.parts:
            raise FileError(f"it holds {member.name[:80]!r}, refused; get the original")
        yield member
    raise FileError(f"it holds more than {_MEMBERS:,} files, refused; get the original")


def _skip(file: IO[bytes], size: int) -> None:
    while size > 0:
        piece = file.read(min(size, _PIECE))
        if not piece:
            raise FileError("it is cut short; get it again")
        size -= len(piece)


def _drain(file: IO[bytes], most: int) -> None:
    """Read to the end: only there does the checksum speak."""
    while piece := file.read(_PIECE):
        most -= len(piece)
        if most < 0:
            raise FileError("it goes on after its end, refused; get the original")
