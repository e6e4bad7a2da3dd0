"""Features in a file: ``.npz``, ``.safetensors``, ``.parquet``, or a folder of arrays.

>>> data = read_features("cifar100-clip-vit-b-16.npz")
>>> write_features("cifar100-clip-vit-b-16.safetensors", data)
"""

from __future__ import annotations

import os
from pathlib import Path

from fissile._common.errors import FileError, needs
from fissile._common.files import atomic_write
from fissile.data.arrays import KEYS, About, read_folder, read_npz, write_folder, write_npz
from fissile.data.disk import reading, replacing_folder
from fissile.data.sets import Labelled
from fissile.data.tables import read_tables
from fissile.data.tensors import read_tensors, write_tensors

__all__ = ["read_features", "write_features"]

_OURS = frozenset({f"{key}.npy" for key in KEYS} | {"about.json"})
_FORMATS = ".npz, .safetensors, .parquet, or a folder of .npy or .parquet files"


def read_features(path: str | os.PathLike[str]) -> Labelled:
    """Read features and labels; what lies in the file as it is, is mapped and not read.

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
            arrays, about = read_folder(path)
        elif parquet:
            arrays, about = read_tables(sorted(path.glob("*.parquet")) or [path])
        elif path.suffix == ".npz":
            arrays, about = read_npz(path)
        elif path.suffix == ".safetensors":
            arrays, about = read_tensors(path)
        else:
            raise FileError(f"it is no features file; give {_FORMATS}")
        x, y, x_test, y_test = (arrays[key] for key in KEYS)
        return Labelled(x, y, x_test, y_test, about.names, about.encoder)


def write_features(path: str | os.PathLike[str], data: Labelled) -> None:
    """Write features and labels; what was there is replaced whole or not at all.

    >>> write_features("features.npz", data)
    >>> write_features("features", data)  # a folder of .npy files, for sets larger than memory
    """
    path = Path(path)
    arrays = dict(zip(KEYS, (data.x, data.y, data.x_test, data.y_test), strict=True))
    about = About.parsed(data.encoder, data.names)  # what could not be read is not written
    if path.suffix == ".npz":
        with atomic_write(path) as beside:
            write_npz(Path(beside.name), arrays, about)
    elif path.suffix == ".safetensors":
        with atomic_write(path) as beside:
            write_tensors(Path(beside.name), arrays, about)
    elif not path.suffix:
        with replacing_folder(path, _OURS) as beside:
            write_folder(beside, arrays, about)
    else:
        raise FileError(f"{path}: cannot write {path.suffix}; give .npz, .safetensors or a folder")
