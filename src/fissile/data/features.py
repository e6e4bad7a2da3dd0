"""Features in a file: ``.npz``, ``.safetensors``, ``.parquet``, or a folder of arrays."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fissile._common.errors import FileError, needs
from fissile._common.files import (
    IN_MEMORY,
    atomic_write,
    most_unpacked,
    open_regular,
    read_bounded,
    reading,
    replacing_folder,
)
from fissile.data.sets import Labelled, chunks
from fissile.data.tables import read_tables

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_FILES = frozenset({f"{key}.npy" for key in _KEYS} | {"about.json"})
_FORMATS = ".npz, .safetensors, .parquet, or a folder of .npy or .parquet files"
_TEXTS = 2**24  # bytes of names, an encoder or a JSON file; nobody has more to say about a set
_ALIGNED = 64
_PIECE = 2**20
_VERSION = "1"  # of folders and safetensors; .npz files are as numpy and zip have them
_PADDING = 0xD935  # the kind of extra field that zip files use for padding
_DTYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2",
    "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip
_CODES = {code: name for name, code in _DTYPES.items()}

_Arrays = dict[str, NDArray[Any]]
_About = dict[str, Any]  # its encoder and names, as the file has them


def read_features(path: str | os.PathLike[str]) -> Labelled:
    """Read features and labels; arrays that the file stores unpacked are mapped, not read.

    >>> read_features("features.npz").x.shape
    (50000, 512)

    A file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and may say which ``encoder``
    made them and the ``names`` of the classes. A table has columns ``features``, ``label`` and
    ``split``.
    """
    path = Path(path)
    parquet = path.suffix == ".parquet" or any(path.glob("*.parquet"))
    if parquet:
        needs("pyarrow", "data")
    with reading(path):
        if (path / "x_train.npy").is_file():
            arrays, about = _read_folder(path)
        elif parquet:
            arrays, about = read_tables(sorted(path.glob("*.parquet")) or [path])
        elif path.suffix == ".npz":
            arrays, about = _read_npz(path)
        elif path.suffix == ".safetensors":
            arrays, about = _read_safetensors(path)
        else:
            raise FileError(f"it is no features file; give {_FORMATS}")
        encoder, names = about.get("encoder", ""), about.get("names", ())
        _check_about(encoder, names)
        x, y, x_test, y_test = (arrays[key] for key in _KEYS)
        data = Labelled(x, y, x_test, y_test, tuple(names), encoder)
        if about.get("version", _VERSION) != _VERSION:
            raise FileError(f"written in version {about['version']!r}; update fissile")
        if about.get("crc32", seal := _crc(arrays, encoder, names)) != seal:
            raise FileError("it is not what was written: its checksum differs; get it again")
        return data


def write_features(path: str | os.PathLike[str], data: Labelled) -> None:
    """Write features and labels; what was there is replaced whole or not at all.

    >>> write_features("features.npz", data)
    >>> write_features("features", data)  # a folder of .npy files, for sets larger than memory
    """
    path = Path(path)
    _check_about(data.encoder, data.names)  # what could not be read is not written
    if path.suffix == ".npz":
        with atomic_write(path) as file:
            _write_npz(file, data)
    elif path.suffix == ".safetensors":
        with atomic_write(path) as file:
            _write_safetensors(file, data)
    elif not path.suffix:
        with replacing_folder(path, _FILES) as folder:
            _write_folder(folder, data)
    else:
        raise FileError(f"{path}: cannot write {path.suffix}; give .npz, .safetensors or a folder")


# --- what all formats share


def _arrays(data: Labelled) -> _Arrays:
    return dict(zip(_KEYS, (data.x, data.y, data.x_test, data.y_test), strict=True))


def _note(data: Labelled) -> dict[str, str]:
    """Return what our own files say of themselves."""
    names = json.dumps(data.names)
    crc = _crc(_arrays(data), data.encoder, data.names)
    return {"version": _VERSION, "encoder": data.encoder, "names": names, "crc32": crc}


def _crc(arrays: _Arrays, encoder: str, names: Iterable[str]) -> str:
    crc = zlib.crc32(json.dumps([encoder, *names]).encode())
    for key in _KEYS:
        for part in chunks(arrays[key]):
            crc = zlib.crc32(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data, crc)
    return f"{crc:08x}"


def _check_about(encoder: Any, names: Any) -> None:
    if not _is_text(encoder) or len(encoder) > 1000:
        raise FileError("its encoder is no short text; write it again")
    if not isinstance(names, list | tuple) or not all(map(_is_text, names)):
        raise FileError("its names are no list of texts; write it again")


def _is_text(value: object) -> bool:
    # What is not printable could be a command to the terminal that it is shown on.
    return isinstance(value, str) and value.isprintable()


def _check_keys(found: Iterable[str]) -> None:
    if missing := [key for key in _KEYS if key not in found]:
        raise FileError(f"{missing[0]} is missing; write {', '.join(_KEYS)} (and encoder, names)")
    if foreign := sorted(set(found) - {*_KEYS, "encoder", "names"}):
        raise FileError(f"it holds {foreign[0]!r} too, which is not known; write it without")


# --- numpy's formats


class _Header(NamedTuple):
    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    dtype: np.dtype[Any]
    length: int  # of the header itself

    def check(self, name: str, size: int) -> None:
        """Refuse an array that does not fill its `size` bytes, header included, to the last."""
        if self.length + math.prod(self.shape) * self.dtype.itemsize != size:
            claim = f"it claims {self.dtype} of shape {self.shape}"
            raise FileError(f"{name} is cut short or too long: {claim}; write it again")


def _header(file: IO[bytes]) -> _Header:
    start = file.tell()
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise FileError(f"an array is in version {version} of the format; write it again")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize:
        raise FileError(f"an array holds {dtype}, not numbers; objects are never read")
    if any(isinstance(length, bool) or length < 0 for length in shape):
        raise FileError(f"an array claims the shape {shape}; write it again")
    return _Header(shape, "F" if fortran else "C", dtype, file.tell() - start)


def _read_npz(path: Path) -> tuple[_Arrays, _About]:
    """Return the arrays of a ``.npz`` file; those stored without compression are mapped."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        _check_keys(members)
        arrays = {key: _member(file, archive, members[key]) for key in _KEYS}
        texts = {
            key: _unpacked(archive, members[key], _TEXTS) for key in members.keys() - arrays.keys()
        }
    for array in texts.values():
        if array.dtype.kind != "U":
            raise FileError(f"its encoder or names are {array.dtype}, not text; write it again")
    return arrays, {key: array.tolist() for key, array in texts.items()}


def _member(file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return _unpacked(archive, info, IN_MEMORY)
    file.seek(info.header_offset)
    head = file.read(30)
    if len(head) != 30 or head[:4] != b"PK\3\4":
        raise FileError(f"{info.filename} does not begin where the list of contents says")
    name, extra = struct.unpack("<HH", head[26:])
    array = _mapped(file, info.header_offset + 30 + name + extra, info.file_size)
    with archive.open(info) as stored:
        while stored.read(_PIECE):  # at its end the checksum is compared
            pass
    return array


def _mapped(file: IO[bytes], offset: int, size: int) -> NDArray[Any]:
    """Map an array in its place in a file; writing to it changes memory only, never the file."""
    file.seek(offset)
    header = _header(file)
    # What goes beyond the file's end cannot be mapped either.
    header.check(Path(file.name).name, min(size, os.fstat(file.fileno()).st_size - offset))
    if not math.prod(header.shape):
        raise FileError(f"{Path(file.name).name} holds an empty array; write it again")
    start = offset + header.length
    return np.memmap(file, header.dtype, "c", start, header.shape, header.order)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> NDArray[Any]:
    """Read an array into memory, after checking that its size can be true."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FileError(f"{info.filename} is packed in a way numpy does not; write it again")
    if info.file_size > min(most, most_unpacked(info.compress_size)):
        raise FileError(f"{info.filename} claims {info.file_size:,} bytes, too many to be true")
    with archive.open(info) as file:
        header = _header(file)
        header.check(info.filename, info.file_size)
        # Read to the end: only there does the archive's checksum speak.
        flat = np.frombuffer(bytearray(file.read()), header.dtype)
    return flat.reshape(header.shape, order=header.order)


def _write_npz(file: IO[bytes], data: Labelled) -> None:
    """Write arrays without compression, each where a mapped one is quick to read."""
    arrays = _arrays(data)
    arrays |= {"encoder": np.array(data.encoder)} if data.encoder else {}
    arrays |= {"names": np.array(data.names)} if data.names else {}
    with zipfile.ZipFile(file, "w") as archive:
        for key, array in arrays.items():
            info = zipfile.ZipInfo(f"{key}.npy")  # its date is fixed: equal arrays, equal files
            start = file.tell() + 30 + len(info.filename) + 20 + 4  # two headers, this field
            padding = -start % _ALIGNED
            info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)


def _read_folder(path: Path) -> tuple[_Arrays, _About]:
    """Return the arrays of a folder of ``.npy`` files, mapped."""
    files = {file.stem: file for file in path.glob("*.npy")}
    _check_keys(files)
    arrays = {}
    for key in _KEYS:
        with open_regular(files[key]) as file:
            arrays[key] = _mapped(file, 0, os.fstat(file.fileno()).st_size)
    note = path / "about.json"
    if not note.exists():
        return arrays, {}
    about = json.loads(read_bounded(note, _TEXTS))
    if not isinstance(about, dict):
        raise FileError("about.json holds no table; write it again")
    return arrays, about


def _write_folder(path: Path, data: Labelled) -> None:
    for key, array in _arrays(data).items():
        np.save(path / f"{key}.npy", array, allow_pickle=False)
    about = _note(data) | {"names": list(data.names)}
    (path / "about.json").write_text(json.dumps(about), encoding="utf-8")


# --- safetensors


def _read_safetensors(path: Path) -> tuple[_Arrays, _About]:
    """Return the arrays of a safetensors file, mapped, and its metadata."""
    needs("safetensors", "files")
    from safetensors import safe_open

    # Opening checks the header: its size, and that the tensors fill the file without overlap.
    with open_regular(path) as file, safe_open(path, "numpy") as checked:
        about = dict(checked.metadata() or {})
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if set(header) != set(_KEYS):
            raise FileError(f"it must hold {', '.join(_KEYS)}, not {', '.join(sorted(header)[:8])}")
        about["names"] = json.loads(about.get("names", "[]"))
        arrays: _Arrays = {}
        for key, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise FileError(f"{key} holds {entry['dtype']!r}; save it as F16 or F32")
            if not math.prod(entry["shape"]):
                raise FileError(f"{key} is an empty array; write it again")
            start = 8 + length + entry["data_offsets"][0]
            shape = tuple(entry["shape"])
            arrays[key] = np.memmap(file, _DTYPES[entry["dtype"]], "c", start, shape)
    return arrays, about


def _write_safetensors(file: IO[bytes], data: Labelled) -> None:
    """Write arrays piece by piece, the most demanding first, so that all lie aligned.

    The library's own writer takes whole arrays in memory.
    """
    ordered = sorted(_arrays(data).items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": _note(data)}
    end = 0
    for key, array in ordered:
        begin, end = end, end + array.nbytes
        dtype = _CODES[array.dtype.newbyteorder("<").str]
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # the data begins at a multiple of 64
    file.write(struct.pack("<Q", len(text)) + text)
    for _, array in ordered:
        for part in chunks(array):
            file.write(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data)
