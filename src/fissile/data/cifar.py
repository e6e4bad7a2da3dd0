"""CIFAR-100 as its authors pack it, or as Parquet tables of small image files; its superclasses."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import most_unpacked, open_regular, read_bounded, reading
from fissile.data.sets import Labelled
from fissile.data.tables import rows, total

#: The names of the 20 superclasses, by coarse label.
SUPERCLASSES = (
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables",
    "household_electrical_devices", "household_furniture", "insects", "large_carnivores",
    "large_man-made_outdoor_things", "large_natural_outdoor_scenes",
    "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates", "people",
    "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)  # fmt: skip
#: The coarse label of each of the 100 fine labels (Krizhevsky 2009).
COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
    6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip

_PARTS = ("train", "test", "meta")
#: The md5 of each part, as published with torchvision.
_ORIGINALS = frozenset({
    "16019d7e3df5f24257cddd939b257f8d", "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "7973b15100ade9c7d40fb424638fde48",
})  # fmt: skip
_MOST = 2**28  # bytes of all parts; they have 186 million
_MEMBERS = 1000  # of the archive; a header costs its sender next to nothing, and us time
_ROWS = 70_000  # of both splits; they have 60,000
_BATCH = 64  # a few images at a time: in a table, a thousand can be one, repeated
_ENCODED = 2**16  # bytes of an image file; a PNG of 32 x 32 has 3,200 at most, and some chunks
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
        if not path.is_dir():
            return _from_pickles(_packed(path), column)
        return _from_pickles({name: read_bounded(path / name, _MOST) for name in _PARTS}, column)


def coarsened(fine: Labelled) -> Labelled:
    """Return the same samples in the 20 superclasses instead of the 100 classes."""
    # Some of the classes are numbered anew: their superclasses would be those of others.
    if fine.classes != len(COARSE):
        raise FissileError(
            f"it holds {fine.classes} classes, and the superclasses are those of CIFAR-100's "
            f"{len(COARSE)}; make features of all {len(COARSE)}"
        )
    coarse = np.array(COARSE)
    return replace(fine, y=coarse[fine.y], y_test=coarse[fine.y_test], names=SUPERCLASSES)


def _packed(path: Path) -> dict[str, bytes]:
    """Return the three parts of the archive; nothing is written to disk."""
    with open_regular(path) as raw, gzip.open(raw) as file:
        most = min(_MOST, most_unpacked(os.fstat(raw.fileno()).st_size))
        content = bytearray()
        while piece := file.read(2**20):  # to the end, where the checksum is
            content += piece
            if len(content) > most:
                raise FileError(
                    f"it unpacks to more than {most:,} bytes, refused; get the original"
                )
    parts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for count, member in enumerate(archive):
            # No links, devices or sparse files; and since nothing is extracted, no name is a path.
            plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
            if not plain or not 0 <= member.size <= len(content) or count == _MEMBERS:
                raise FileError(f"it holds {member.name[:80]!r}, refused; get the original")
            folder, _, part = member.name.removeprefix("./").partition("/")
            if folder != "cifar-100-python" or part not in _PARTS:
                continue
            data = archive.extractfile(member)
            if data is None or part in parts:
                raise FileError(f"{part} is no file or there twice, refused; get the original")
            parts[part] = data.read()
    if missing := [part for part in _PARTS if part not in parts]:
        raise FileError(f"it holds no cifar-100-python/{missing[0]}; get the original")
    return parts


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, for arrays and plain data alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the three names that numpy writes, and refuse all others."""
        known = {
            "numpy.core.multiarray _reconstruct": np.empty(0).__reduce__()[0],
            "numpy ndarray": np.ndarray,
            "numpy dtype": np.dtype,
        }
        if (function := known.get(f"{module} {name}")) is None:
            raise FileError(f"it contains code ({module} {name}), refused; get the original")
        return function


def _from_pickles(parts: dict[str, bytes], column: str) -> Labelled:
    """Read the three parts; a pickle is opened only if it is the authors', to the last bit."""
    tables: dict[str, Any] = {}
    for part in _PARTS:
        if hashlib.md5(parts[part]).hexdigest() not in _ORIGINALS:
            raise FileError(f"{part} is not the original, refused; get it from its home page")
        # Python 2 wrote text of unknown encoding, which is read as bytes.
        tables[part] = _Unpickler(io.BytesIO(parts.pop(part)), encoding="bytes").load()
    train, test, meta = (tables[part] for part in _PARTS)
    labels, names = f"{column}s".encode(), f"{column}_names".encode()
    return Labelled(
        _images(train[b"data"]), np.array(train[labels]),
        _images(test[b"data"]), np.array(test[labels]),
        tuple(name.decode() for name in meta[names]),
    )  # fmt: skip


def _images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of three planes as images with the colours last."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _from_tables(path: Path, column: str) -> Labelled:
    files = {part: sorted(path.glob(f"{part}-*.parquet")) for part in ("train", "test")}
    counts = {part: total(paths) for part, paths in files.items()}
    if sum(counts.values()) > _ROWS:
        raise FileError(f"it claims {sum(counts.values()):,} images, more than {_ROWS:,}; refused")
    (x, y), (x_test, y_test) = (
        _table(paths, counts[part], part, column) for part, paths in files.items()
    )
    return Labelled(x, y, x_test, y_test, _names(path, column))


def _table(
    paths: list[Path], count: int, part: str, column: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = np.empty((count, 32, 32, 3), np.uint8)
    labels: list[Any] = []
    for batch in rows(paths, ["img", column], _BATCH, once=["img.bytes", "img.path"]):
        if len(labels) + len(batch) > count:
            raise FileError(f"{part} holds more images than it claims; get it again")
        for at, file in enumerate(_image_files(batch.column(0)), len(labels)):
            images[at] = _decoded(file)
        labels += batch.column(1).to_pylist()
    if not labels or len(labels) != count:
        raise FileError(f"it holds no images in {part}-*.parquet, or too few; get it again")
    if not all(type(label) is int for label in labels):
        raise FileError("its labels are no list of whole numbers; get it again")
    return images, np.array(labels, dtype=np.int64)


def _image_files(column: Any) -> list[Any]:
    """Return the bytes of each row's image; what rows share is not repeated."""
    from pyarrow import types  # type: ignore[import-untyped]

    kind = column.type
    if not types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise FileError("a row holds no image; get it again")
    files = column.field("bytes")
    if not types.is_dictionary(files.type):
        files = files.dictionary_encode()
    known = files.dictionary
    return [None if at is None else known[at].as_py() for at in files.indices.to_pylist()]


def _decoded(file: Any) -> NDArray[np.uint8]:
    """Decode a PNG or WebP of 32 x 32 colour pixels, after a look at its header."""
    from PIL import Image

    if not isinstance(file, bytes) or len(file) > _ENCODED:
        raise FileError("a row holds no image, or a large one; get it again")
    with Image.open(io.BytesIO(file), formats=("PNG", "WEBP")) as image:
        if image.size != (32, 32) or image.mode != "RGB":
            raise FileError(f"an image is {image.mode} of {image.size}, not RGB of 32 x 32")
        return np.asarray(image)


def _names(path: Path, column: str) -> tuple[str, ...]:
    """Return the names in ``names.json`` beside the tables, if it is there."""
    if not (file := path / "names.json").is_file():
        return ()
    table = json.loads(read_bounded(file, 2**20))
    names = table.get(column) if isinstance(table, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileError(f"names.json has no list {column}; get it again")
    if any(len(name) > 1000 for name in names):
        raise FileError("names.json holds a name that is no short text; get it again")
    return tuple(names)
