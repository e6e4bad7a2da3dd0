"""Arrays in ``.npz`` files and in folders of ``.npy`` files: mapped where they lie as they are.

>>> arrays, about = read_npz(Path("features.npz"))
>>> arrays["x_train"].shape
(50000, 512)
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile.data.disk import IN_MEMORY, PACKED

__all__ = ["KEYS", "About", "read_folder", "read_npz", "write_folder", "write_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test")
_TEXTS = 2**24  # bytes of names, an encoder or a JSON file; nobody has more to say about a set
_ALIGNED = 64
_PADDING = 0xD935  # the kind of extra field that zip files use for padding


class About(NamedTuple):
    """What a file says about its arrays.

    >>> About("CLIP ViT-B/16", ("cat", "dog"))
    About(encoder='CLIP ViT-B/16', names=('cat', 'dog'))
    """

    encoder: str = ""
    names: tuple[str, ...] = ()

    def json(self) -> str:
        """The same as text."""
        return json.dumps({"encoder": self.encoder, "names": list(self.names)})

    @staticmethod
    def parsed(encoder: object, names: object) -> About:
        """From what a file holds, or an error of ours."""
        if not _is_text(encoder) or len(encoder) > 1000:
            raise FileError("its encoder is no short text; write it again")
        if not isinstance(names, list | tuple) or not all(map(_is_text, names)):
            raise FileError("its names are no list of texts; write it again")
        return About(encoder, tuple(names))


def _is_text(value: object) -> TypeGuard[str]:
    # What is not printable could be a command to the terminal that it is shown on.
    return isinstance(value, str) and value.isprintable()


class _Header(NamedTuple):
    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    dtype: np.dtype[Any]
    length: int  # of the header itself

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> tuple[dict[str, NDArray[Any]], About]:
    """The four arrays of a ``.npz`` file; those stored without compression are mapped.

    >>> arrays, about = read_npz(Path("features.npz"))
    """
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        _check_keys(members, {*KEYS, "encoder", "names"})
        arrays = {key: _member(path, archive, members[key]) for key in KEYS}
        told = {
            key: _text(_unpacked(archive, members[key], _TEXTS))
            for key in ("encoder", "names")
            if key in members
        }
    return arrays, About.parsed(told.get("encoder", ""), told.get("names", ()))


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]], about: About) -> None:
    """Write arrays without compression, each where a mapped one is quick to read.

    >>> write_npz(Path("features.npz"), arrays, About("CLIP ViT-B/16"))
    """
    told: dict[str, NDArray[Any]] = {}
    if about.encoder:
        told["encoder"] = np.array(about.encoder)
    if about.names:
        told["names"] = np.array(about.names)
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in {**arrays, **told}.items():
            info = zipfile.ZipInfo(f"{key}.npy")  # its date is fixed: equal arrays, equal files
            assert archive.fp is not None
            start = archive.fp.tell() + 30 + len(info.filename) + 20 + 4  # two headers, this field
            padding = -start % _ALIGNED
            info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)


def read_folder(path: Path) -> tuple[dict[str, NDArray[Any]], About]:
    """The four arrays of a folder of ``.npy`` files, mapped.

    >>> arrays, about = read_folder(Path("features"))
    """
    _check_keys({file.stem for file in path.glob("*.npy")}, {*KEYS, "encoder", "names"})
    arrays = {key: _mapped(path / f"{key}.npy", 0, None) for key in KEYS}
    told = path / "about.json"
    if not told.exists():
        return arrays, About()
    if told.stat().st_size > _TEXTS:
        raise FileError("about.json is too large to be true; write it again")
    about = json.loads(told.read_text(encoding="utf-8"))
    if not isinstance(about, dict):
        raise FileError("about.json holds no table; write it again")
    return arrays, About.parsed(about.get("encoder", ""), about.get("names", ()))


def write_folder(path: Path, arrays: Mapping[str, NDArray[Any]], about: About) -> None:
    """Write arrays into an existing folder.

    >>> write_folder(Path("features"), arrays, About())
    """
    for key, array in arrays.items():
        with open(path / f"{key}.npy", "wb") as file:
            npy.write_array(file, array, allow_pickle=False)
    (path / "about.json").write_text(about.json(), encoding="utf-8")


def _check_keys(found: Any, known: set[str]) -> None:
    if missing := [key for key in KEYS if key not in found]:
        raise FileError(
            f"{missing[0]} is missing; write {', '.join(KEYS)}, and encoder and names if you like"
        )
    if foreign := sorted(set(found) - known):
        raise FileError(f"it holds {foreign[0]!r} too, which is not known; write it without")


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return _unpacked(archive, info, IN_MEMORY)
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
        if len(head) != 30 or head[:4] != b"PK\3\4":
            raise FileError(f"{info.filename} does not begin where the list of contents says")
        name, extra = struct.unpack("<HH", head[26:])
    return _mapped(path, info.header_offset + 30 + name + extra, info.file_size)


def _mapped(path: Path, offset: int, size: int | None) -> NDArray[Any]:
    """An array in its place in a file; writing to it changes memory only, never the file."""
    with open(path, "rb") as file:
        end = file.seek(0, 2)
        file.seek(offset)
        header = _header(file)
    size = end - offset if size is None else size
    if header.length + header.size != size or offset + size > end:
        raise FileError(f"{path.name} is cut short or too long: {_claim(header)}; write it again")
    if not header.size:
        raise FileError(f"{path.name} holds an empty array; write it again")
    return np.memmap(
        path, header.dtype, "c", offset + header.length, header.shape, header.order
    )  # fmt: skip


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> NDArray[Any]:
    """An array read into memory, after checking that its size can be true."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FileError(f"{info.filename} is packed in a way numpy does not; write it again")
    if info.file_size > min(most, PACKED * (info.compress_size + 1)):
        raise FileError(f"{info.filename} claims {info.file_size:,} bytes, too many to be true")
    with archive.open(info) as file:
        header = _header(file)
        if header.length + header.size != info.file_size:
            raise FileError(f"{info.filename} is cut short or too long: {_claim(header)}")
        # Read to the end: only there does the archive's checksum speak.
        flat = np.frombuffer(bytearray(file.read()), header.dtype)
    return flat.reshape(header.shape, order=header.order)


def _claim(header: _Header) -> str:
    return f"it claims {header.dtype} of shape {header.shape}"


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


def _text(array: NDArray[Any]) -> Any:
    if array.dtype.kind != "U":
        raise FileError(f"its encoder or names are {array.dtype}, not text; write it again")
    return array.tolist()
