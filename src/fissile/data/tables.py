"""Features in Parquet tables: columns ``features``, ``label`` and ``split`` (train or test)."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile._common.files import IN_MEMORY, most_unpacked, open_regular

_ROWS = 4096  # read in one go, or fewer:
_BATCH = 2**24  # bytes of them
_WIDEST = 2**16
_FOOTER = 2**22  # bytes of it: a row group takes some hundred
_SPLITS = ("train", "test")


def read_tables(paths: list[Path]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the four arrays of one table in several files, and its encoder and names."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    few = min(_few(path) for path in paths)
    metadata = parquet.read_schema(paths[0]).metadata or {}
    names = json.loads(metadata.get(b"names", b"[]"))
    about = {"encoder": metadata.get(b"encoder", b"").decode(), "names": names}
    pieces: dict[str, list[NDArray[Any]]] = {f"{k}_{s}": [] for k in "xy" for s in _SPLITS}
    size = 0
    for batch in rows(paths, ["features", "label", "split"], few, once=["split"]):
        x, y, split = _matrix(batch.column(0)), _labels(batch.column(1)), _split(batch.column(2))
        for name in _SPLITS:
            chosen = split == name
            pieces[f"x_{name}"].append(x[chosen])
            pieces[f"y_{name}"].append(y[chosen])
        size += x.nbytes
        if size > IN_MEMORY:
            raise FileError(f"it holds more than {IN_MEMORY:,} bytes; use .npy or .safetensors")
    widths = {part.shape[1:] for part in pieces["x_train"]}
    if len(widths) != 1:
        raise FileError("it holds no rows, or features of several lengths; write it again")
    return {key: np.concatenate(parts) for key, parts in pieces.items()}, about


def rows(
    paths: list[Path], columns: list[str], count: int, once: Sequence[str] = ()
) -> Iterator[Any]:
    """Yield some columns of a table in several files, at most `count` rows at a time.

    Texts in `once` stay as they lie in the file: what many rows share is not repeated for each.
    """
    from pyarrow import parquet

    for path in paths:
        leaves = [column.path for column in parquet.read_metadata(path).schema]
        shared = [name for name in once if name in leaves]
        with parquet.ParquetFile(path, read_dictionary=shared) as file:
            names = file.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                raise FileError(
                    f"{path.name} has no column {missing[0]!r}, only {', '.join(names[:8])}; it "
                    f"must have {', '.join(columns)}"
                )
            for batch in file.iter_batches(count, columns=columns):
                yield batch.select(columns)


def total(paths: list[Path]) -> int:
    """Return how many rows the files claim, without reading any."""
    return sum(claims(path, "")[1] for path in paths)


def _few(path: Path) -> int:
    """Return how many rows to read in one go; refuse a file that claims more than it can hold."""
    on_disk, rows, numbers = claims(path, "features")
    size = 8 * numbers
    if size > most_unpacked(on_disk):
        raise FileError(f"{path.name} claims {size:,} bytes, too many to be true; use .safetensors")
    width = -(-numbers // max(1, rows))
    if width > _WIDEST:
        raise FileError(f"features have {width:,} numbers, more than {_WIDEST:,}; give fewer")
    return max(1, min(_ROWS, _BATCH // (8 * max(1, width))))


def _matrix(column: Any) -> NDArray[Any]:
    """Return a column of lists, all of one length, as a matrix."""
    from pyarrow import types

    kind = column.type
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not listed or not types.is_floating(kind.value_type):
        raise FileError(f"features are {kind}; write lists of floats")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise FileError("features are missing in some rows; write every row")
    width = len(values) // max(1, len(column))
    lengths = np.diff(np.asarray(column.offsets)) if not types.is_fixed_size_list(kind) else width
    if not np.all(lengths == width) or not 0 < width <= _WIDEST:
        raise FileError("features have several lengths, or none; write lists of one length")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), width)


def _labels(column: Any) -> NDArray[np.int64]:
    from pyarrow import int64, types

    if not types.is_integer(column.type) or column.null_count:
        raise FileError(f"labels are {column.type}, some missing or not whole; write whole numbers")
    return np.asarray(column.cast(int64()).to_numpy(zero_copy_only=False))


def _split(column: Any) -> NDArray[Any]:
    from pyarrow import types

    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    words = column.dictionary.to_pylist()
    strange = {str(word)[:20] for word in words} - set(_SPLITS)
    if strange or column.null_count:
        raise FileError(f"split is {min(strange, default='')!r} in some row; write train or test")
    return np.asarray(np.array(words, dtype=object)[column.indices.to_numpy()])


# --- what a file claims, read before pyarrow reads it


def claims(path: Path, column: str) -> tuple[int, int, int]:
    """Return a Parquet file's size, the rows it claims, and the numbers in one of its columns.

    pyarrow's ``RowGroupMetaData.column()`` would say it too. But it is not told that C++ may raise
    an error there, as it does for a level histogram of the wrong length, and Python is aborted: one
    wrong byte is enough (seen in pyarrow 26.0.1; to be reported to Apache Arrow). So that call is
    never made, and the footer is read here.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 8))
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != b"PAR1" or length > min(_FOOTER, size - 8):
            raise FileError(f"{path.name} does not end as a Parquet file of plain tables does")
        file.seek(size - 8 - length)
        about = _value(io.BytesIO(file.read(length)), _STRUCT)
    # The numbers of the fields are those in the format's parquet.thrift.
    columns = [column[3] for group in about[4] for column in group[1]]
    counts = [about[3], *(one[5] for one in columns if one[3][0] == column.encode())]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise FileError(f"{path.name} claims rows or values that are no count; write it again")
    return size, counts[0], sum(counts[1:])


_FALSE, _BYTE, _DOUBLE, _TEXT, _LIST, _STRUCT = 2, 3, 7, 8, 9, 12


def _value(data: io.BytesIO, kind: int) -> Any:
    """Return the next value of Thrift's compact protocol: each takes a byte, so no loop is long."""
    if kind == _STRUCT:
        fields, number = {}, 0
        while head := _byte(data):
            number = number + (head >> 4) if head >> 4 else _whole(data)
            fields[number] = head & 15 if head & 15 <= _FALSE else _value(data, head & 15)
        return fields
    if kind == _LIST:
        head = _byte(data)
        count = _natural(data) if head >> 4 == 15 else head >> 4
        return [_value(data, head & 15) for _ in range(count)]
    if kind in (_DOUBLE, _TEXT):
        return data.read(8 if kind == _DOUBLE else _natural(data))
    if not 0 < kind < _DOUBLE:
        raise ValueError(f"its footer holds the unknown type {kind}")
    return _byte(data) if kind <= _BYTE else _whole(data)


def _byte(data: io.BytesIO) -> int:
    return data.read(1)[0]  # an IndexError at the end


def _natural(data: io.BytesIO) -> int:
    value = shift = 0
    while (byte := _byte(data)) & 128:
        value |= (byte & 127) << shift
        shift += 7
    return value | byte << shift


def _whole(data: io.BytesIO) -> int:
    value = _natural(data)
    return value >> 1 ^ -(value & 1)
