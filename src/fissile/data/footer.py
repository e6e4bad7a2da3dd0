"""What the footer of a Parquet file claims to hold, read before pyarrow reads the file.

pyarrow's ``RowGroupMetaData.column()`` would say it too. But it is not told that C++ may raise an
error there, as it does for a level histogram of the wrong length, and Python is aborted: one wrong
byte is enough (seen in pyarrow 26.0.1; to be reported to Apache Arrow). So that call is never made.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

from fissile._common.errors import FileError
from fissile._common.files import open_regular

_MOST = 2**22  # bytes of a footer: a row group takes some hundred


def claims(path: Path, column: str) -> tuple[int, int, int]:
    """Return a Parquet file's size, the rows it claims, and the numbers in one of its columns.

    >>> claims(Path("features.parquet"), "features")
    (61443320, 60000, 30720000)
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 8))
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != b"PAR1" or length > min(_MOST, size - 8):
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
