"""Arrays in safetensors files, mapped: the header is checked before anything is made of it.

>>> arrays, about = read_tensors(Path("features.safetensors"))
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile.data.arrays import KEYS, About
from fissile.data.sets import chunks

__all__ = ["read_tensors", "write_tensors"]

_HEADER = 100_000_000  # bytes, the format's own limit
_DTYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2",
    "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip
_CODES = {code: name for name, code in _DTYPES.items()}


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], About]:
    """The four arrays of a safetensors file, and what its metadata says.

    >>> arrays, about = read_tensors(Path("features.safetensors"))
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > min(_HEADER, size - 8):
            raise FileError("it is no whole safetensors file: its header does not fit")
        header = json.loads(file.read(length), object_pairs_hook=_once)
    if not isinstance(header, dict):
        raise FileError("its header is no table; write it again")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or set(header) != set(KEYS):
        raise FileError(f"it must hold {', '.join(KEYS)}, not {', '.join(sorted(header)[:8])}")
    _check_offsets(header, size - 8 - length)
    arrays = {key: _array(path, 8 + length, entry) for key, entry in header.items()}
    return arrays, About.parsed(
        metadata.get("encoder", ""), json.loads(metadata.get("names", "[]"))
    )


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], about: About) -> None:
    """Write arrays piece by piece, the most demanding first, so that all lie aligned.

    >>> write_tensors(Path("features.safetensors"), arrays, About("CLIP ViT-B/16"))
    """
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    metadata = {"encoder": about.encoder, "names": json.dumps(about.names)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, array in ordered:
        begin, end = end, end + array.nbytes
        dtype = _CODES[array.dtype.newbyteorder("<").str]
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # the data begins at a multiple of 64
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in ordered:
            for part in chunks(array):
                file.write(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise FileError("its header names something twice; write it again")
    return dict(pairs)


def _check_offsets(header: dict[str, Any], size: int) -> None:
    """Refuse tensors that overlap, leave holes or reach beyond the file."""
    spans = []
    for key, entry in header.items():
        begin, end = _numbers(entry["data_offsets"])
        if entry["dtype"] not in _DTYPES:
            raise FileError(f"{key} holds {entry['dtype']!r}; save it as F16 or F32")
        if end - begin != math.prod(_numbers(entry["shape"])) * _itemsize(entry):
            raise FileError(f"{key} has a shape that its place in the file does not fit")
        spans.append((begin, end))
    spans.sort()
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    if begins != [0, *ends[:-1]] or ends[-1] != size:
        raise FileError("its tensors overlap, leave holes or are cut short; write it again")


def _itemsize(entry: dict[str, Any]) -> int:
    return np.dtype(_DTYPES[entry["dtype"]]).itemsize


def _numbers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise FileError("its header holds a shape or a place that is no list of numbers")
    return values


def _array(path: Path, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    if begin == end:
        raise FileError("it holds an empty array; write it again")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    return np.memmap(path, dtype, "c", start + begin, tuple(entry["shape"]))
