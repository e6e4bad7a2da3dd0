"""CIFAR-100 as its authors pack it, or as Parquet tables of small image files.

>>> read_cifar(Path("cifar-100-python.tar.gz")).x.shape
(50000, 32, 32, 3)
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile.data.disk import reading
from fissile.data.inert import read_pickle
from fissile.data.sets import Labelled
from fissile.data.tables import rows
from fissile.errors import FileError, needs

__all__ = ["read_cifar"]

_PARTS = ("train", "test", "meta")
_MOST = 2**29  # bytes of a part; the training images are 153,600,000
_COLUMNS = {False: "fine_label", True: "coarse_label"}


def read_cifar(path: Path, *, coarse: bool = False) -> Labelled:
    """Read the archive, its unpacked folder, or a folder of tables; no pickled code is run.

    >>> read_cifar(Path("cifar-100-python"), coarse=True).names[0]
    'aquatic_mammals'
    """
    path = Path(path)
    column = _COLUMNS[coarse]
    if path.is_dir() and any(path.glob("*.parquet")):
        needs("pyarrow", "data")
        needs("PIL", "data")
        with reading(path):
            return _from_tables(path, column)
    with reading(path):
        parts = _unpacked(path) if path.is_dir() else _packed(path)
        return _from_pickles(parts, column)


def _unpacked(folder: Path) -> dict[str, bytes]:
    for part in _PARTS:
        if (folder / part).stat().st_size > _MOST:
            raise FileError(f"{part} is too large to be true; get it again")
    return {part: (folder / part).read_bytes() for part in _PARTS}


def _packed(path: Path) -> dict[str, bytes]:
    """The three parts straight out of the archive; nothing is written to disk."""
    parts: dict[str, bytes] = {}
    size = 0
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            size += member.size
            if name.is_absolute() or ".." in name.parts or size > _MOST:
                raise FileError(f"it holds {member.name[:80]!r}, refused; get the original")
            if name.parent.name != "cifar-100-python" or name.name not in _PARTS:
                continue
            file = archive.extractfile(member) if member.isreg() else None
            if file is None or name.name in parts:
                raise FileError(f"{name} is no file or there twice, refused; get the original")
            parts[name.name] = file.read()
    if missing := [part for part in _PARTS if part not in parts]:
        raise FileError(f"it holds no cifar-100-python/{missing[0]}; get the original")
    return parts


def _from_pickles(parts: dict[str, bytes], column: str) -> Labelled:
    read = {}
    for part in _PARTS:
        read[part] = _fields(read_pickle(parts.pop(part)), part)
    (x, y), (x_test, y_test) = (
        (_images(read[part].get("data")), _labels(read[part].get(f"{column}s")))
        for part in ("train", "test")
    )
    names = tuple(_plain(name) for name in read["meta"].get(f"{column}_names", []))
    return Labelled(x, y, x_test, y_test, names)


def _fields(found: Any, part: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise FileError(f"{part} holds no table; get the original")
    return {_plain(key): value for key, value in found.items()}


def _plain(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)


def _images(data: Any) -> NDArray[np.uint8]:
    """Rows of three planes as images with the colours last."""
    good = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (3072,)
    if not good:
        raise FileError("its images are not rows of 3,072 bytes; get the original")
    planes: NDArray[np.uint8] = data.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _labels(labels: Any) -> NDArray[np.int64]:
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
        labels = labels.tolist()
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise FileError("its labels are no list of whole numbers; get the original")
    return np.array(labels, dtype=np.int64)


def _from_tables(path: Path, column: str) -> Labelled:
    (x, y), (x_test, y_test) = (_table(path, part, column) for part in ("train", "test"))
    return Labelled(x, y, x_test, y_test, _names(path, column))


def _table(path: Path, part: str, column: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images: list[NDArray[np.uint8]] = []
    labels: list[Any] = []
    for batch in rows(sorted(path.glob(f"{part}-*.parquet")), ["img", column]):
        images += [_decoded(row) for row in batch.column(0).to_pylist()]
        labels += batch.column(1).to_pylist()
    if not images:
        raise FileError(f"it holds no images in {part}-*.parquet; get it again")
    return np.stack(images), _labels(labels)


def _decoded(row: Any) -> NDArray[np.uint8]:
    """One PNG or WebP of 32 x 32 colour pixels; its header is looked at before the rest."""
    from PIL import Image

    if not isinstance(row, dict) or not isinstance(row.get("bytes"), bytes):
        raise FileError("a row holds no image; get it again")
    with Image.open(io.BytesIO(row["bytes"]), formats=("PNG", "WEBP")) as image:
        if image.size != (32, 32) or image.mode != "RGB":
            raise FileError(f"an image is {image.mode} of {image.size}, not RGB of 32 x 32")
        return np.asarray(image)


def _names(path: Path, column: str) -> tuple[str, ...]:
    """From ``names.json`` beside the tables, if it is there."""
    file = path / "names.json"
    if not file.is_file():
        return ()
    if file.stat().st_size > 2**20:
        raise FileError("names.json is too large to be true; get it again")
    found = json.loads(file.read_text(encoding="utf-8"))
    names = found.get(column) if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileError(f"names.json has no list {column}; get it again")
    return tuple(names)
