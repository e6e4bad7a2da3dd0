"""What the footer of a Parquet file claims to hold, read before pyarrow reads the file.

pyarrow's ``RowGroupMetaData.column()`` would say it too. But it is not told that C++ may raise an
error there, as it does for a level histogram of the wrong length, and Python is aborted: one wrong
byte is enough (seen in pyarrow 26.0.1; to be reported to Apache Arrow). So that call is never made.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from fissile._common.errors import FileError
from fissile._common.files import open_regular, size_of

_MOST = 2**22  # bytes of a footer: a row group takes some hundred
_COLUMNS, _PATH, _VALUES = 1, 3, 5  # the numbers of fields in the format's definition
_ABOUT, _ROWS, _GROUPS = 3, 3, 4
_TRUE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 3, 7, 8, 9, 10, 11, 12, 13


class Claims(NamedTuple):
    """The size of a file, its rows, and the numbers in one of its columns."""

    size: int
    rows: int
    values: int


def claims(path: Path, column: str) -> Claims:
    """Return what a Parquet file claims to hold.

    >>> claims(Path("features.parquet"), "features")
    Claims(size=61443320, rows=60000, values=30720000)
    """
    with open_regular(path) as file:
        size = size_of(file)
        file.seek(max(0, size - 8))
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != b"PAR1" or length > min(_MOST, size - 8):
            raise FileError(f"{path.name} does not end as a Parquet file of plain tables does")
        file.seek(size - 8 - length)
        about = _Thrift(file.read(length)).struct()
    counts = [about[_ROWS]]
    for group in about[_GROUPS]:
        for one in group[_COLUMNS]:
            if _ABOUT not in one:
                raise FileError(f"{path.name} is encrypted; write it without")
            if one[_ABOUT][_PATH][0] == column.encode():
                counts.append(one[_ABOUT][_VALUES])
    if not all(type(count) is int and count >= 0 for count in counts):
        raise FileError(f"{path.name} claims rows or values that are no count; write it again")
    return Claims(size, counts[0], sum(counts[1:]))


class _Thrift:
    """Thrift's compact protocol: every loop takes a byte or more, so that none is long."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            step = head >> 4
            number = number + step if step else self._whole()
            kind = head & 15
            fields[number] = kind == _TRUE if kind <= 2 else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            head = self._byte()
            return self._many(self._long() if head >> 4 == 15 else head >> 4, head & 15)
        if kind == _MAP:
            count = self._long()
            both = self._byte() if count else 0
            return [self._value(k) for _ in self._range(count) for k in (both >> 4, both & 15)]
        if kind in (_DOUBLE, _UUID, _BINARY):
            return self._take({_DOUBLE: 8, _UUID: 16}.get(kind) or self._long())
        if not 0 < kind < _DOUBLE:
            raise ValueError(f"its footer holds the unknown type {kind}")
        return self._byte() if kind <= _BYTE else self._whole()

    def _many(self, count: int, kind: int) -> list[Any]:
        return [self._value(kind) for _ in self._range(count)]

    def _range(self, count: int) -> range:
        if count > len(self._data) - self._at:
            raise ValueError("its footer claims more than it holds")
        return range(count)

    def _take(self, count: int) -> bytes:
        self._at += len(self._range(count))
        return self._data[self._at - count : self._at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _long(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _whole(self) -> int:
        value = self._long()
        return value >> 1 ^ -(value & 1)
