"""IDX files, plain or gzipped, as MNIST and its relatives come."""

from __future__ import annotations

import gzip
import math
import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile._common.files import most_unpacked, open_regular, reading
from fissile.data.sets import Labelled

FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
_BYTES = 0x08  # the type code of bytes, the only one these files use
_MOST = 2**30  # bytes of a file, unpacked; MNIST and its relatives have 47 million
_PIECE = 2**20


def read_idx(path: str | os.PathLike[str], most: int = _MOST) -> NDArray[np.uint8]:
    """Read the bytes of an IDX file, after checking that it claims no more than there can be."""
    with reading(path), open_regular(path) as raw:
        packed, size = raw.read(2) == b"\x1f\x8b", os.fstat(raw.fileno()).st_size
        raw.seek(0)
        with gzip.open(raw) if packed else nullcontext(raw) as file:
            return _array(file, min(most, most_unpacked(size) if packed else size))


def read_idx_folder(path: Path, names: tuple[str, ...] = (), most: int = _MOST) -> Labelled:
    """Read the four files of MNIST or a relative, gzipped or not.

    >>> read_idx_folder(Path("/usr/share/datasets/fashion-mnist")).x.shape
    (60000, 28, 28)
    """
    packed = (path / f"{name}.gz" for name in FILES)
    files = (file if file.is_file() else file.with_suffix("") for file in packed)
    x, y, x_test, y_test = (read_idx(file, most) for file in files)
    with reading(path):
        return Labelled(x, y.astype(np.int64), x_test, y_test.astype(np.int64), names)


def _array(file: BinaryIO | gzip.GzipFile, most: int) -> NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) != 4 or magic[:2] != b"\0\0":
        raise FileError("it is no IDX file: it does not begin with two zero bytes")
    if magic[2] != _BYTES or not magic[3]:
        raise FileError(f"it holds type {magic[2]:#04x} in {magic[3]} dimensions, not bytes")
    shape = struct.unpack(f">{magic[3]}I", file.read(4 * magic[3]))
    size = math.prod(shape)
    if size > most:
        raise FileError(f"it claims {size:,} bytes, more than it can hold; get it again")
    data = np.empty(size, np.uint8)  # filled piece by piece, so that nothing is held twice
    done = 0
    while piece := file.read(min(_PIECE, size - done)):
        data[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
        done += len(piece)
    if done != size:
        raise FileError(f"it is cut short: {done:,} of {size:,} bytes; get it again")
    if file.read(1):
        raise FileError(f"it goes on after the {size:,} bytes it claims; get it again")
    return data.reshape(shape)
