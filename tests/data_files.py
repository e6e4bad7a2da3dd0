"""Small data sets and the files they come in, for tests of reading."""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile

import numpy as np

from fissile.data import cifar
from fissile.data.sets import Labelled

CIFAR = "cifar-100-python"


def features(train=24, test=10, inputs=5, classes=3, dtype=np.float16, **more):
    rng = np.random.default_rng(train + test + inputs)
    x, x_test = (rng.standard_normal((n, inputs)).astype(dtype) for n in (train, test))
    return Labelled(x, np.arange(train) % classes, x_test, np.arange(test) % classes, **more)


def images(train=20, test=10, shape=(32, 32, 3), classes=10):
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (n, *shape), dtype=np.uint8) for n in (train, test))
    return Labelled(x, np.arange(train) % classes, x_test, np.arange(test) % classes)


def idx(array, *, claim=None, kind=8):
    """An IDX file; `claim` is what it says its shape is."""
    shape = array.shape if claim is None else claim
    head = bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return head + array.tobytes()


def idx_folder(folder, data, pack=gzip.compress):
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".gz" if pack is gzip.compress else ""
    for name, array in (
        ("train-images-idx3-ubyte", data.x),
        ("train-labels-idx1-ubyte", data.y.astype(np.uint8)),
        ("t10k-images-idx3-ubyte", data.x_test),
        ("t10k-labels-idx1-ubyte", data.y_test.astype(np.uint8)),
    ):
        (folder / f"{name}{suffix}").write_bytes(pack(idx(array)))
    return folder


def rows(x):
    """Images as CIFAR's authors keep them: rows of three planes."""
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1)


def original(part):
    """Let the content of a file pass for a part that CIFAR's authors published."""
    cifar._ORIGINALS |= {hashlib.md5(part).hexdigest()}
    return part


def cifar_parts(data):
    def pickled(table):
        # The names of numpy are those of the version that wrote the originals.
        made = pickle.dumps({key.encode(): value for key, value in table.items()}, 3)
        return original(made.replace(b"numpy._core.", b"numpy.core."))

    def part(x, y):
        coarse = (y // 5).tolist()
        table = {"filenames": [b"a.png"] * len(y), "batch_label": b"training batch 1 of 1"}
        table |= {"data": rows(x), "fine_labels": y.tolist(), "coarse_labels": coarse}
        return pickled(table)

    names = {"fine_label_names": 10, "coarse_label_names": 2}
    meta = {key: [f"{key[0]}{n}".encode() for n in range(count)] for key, count in names.items()}
    return {
        "train": part(data.x, data.y),
        "test": part(data.x_test, data.y_test),
        "meta": pickled(meta),
    }


def cifar_folder(folder, parts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    return folder


def cifar_archive(path, parts, prefix=f"{CIFAR}/", extra=()):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [*((prefix + name, c) for name, c in parts.items()), *extra]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def encoded(image, kind="PNG"):
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(image).save(target, kind, lossless=True)
    return target.getvalue()


def cifar_tables(folder, data, kind="PNG", change=lambda table: table):
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
        table = {
            "img": [{"bytes": encoded(image, kind), "path": None} for image in x],
            "fine_label": y.tolist(),
            "coarse_label": (y // 5).tolist(),
        }
        table = pyarrow.table(change(table))
        parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet")
    names = {"fine_label": [f"f{n}" for n in range(10)], "coarse_label": ["c0", "c1"]}
    (folder / "names.json").write_text(json.dumps(names))
    return folder


def feature_table(path, data, *, kind=None, metadata=None, **columns):
    import pyarrow
    from pyarrow import parquet

    values, kind = [*data.x, *data.x_test], kind or pyarrow.list_(pyarrow.float16())
    half = getattr(kind, "value_type", None) == pyarrow.float16()
    table = {
        "features": pyarrow.array(
            [list(v.astype(np.float16)) if half else v.tolist() for v in values], kind
        ),
        "label": [*data.y.tolist(), *data.y_test.tolist()],
        "split": ["train"] * len(data.y) + ["test"] * len(data.y_test),
    } | columns
    made = pyarrow.table({k: v for k, v in table.items() if v is not None})
    parquet.write_table(made.replace_schema_metadata(metadata), path)
    return path
