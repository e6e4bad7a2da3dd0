"""Hostile features files: each is one clear error, and nothing in it is ever run."""

import json
import os
import struct
import zipfile

import numpy as np
import pyarrow
import pytest
from data_files import feature_table, features
from safetensors.numpy import save_file

from fissile import FileError
from fissile.data import features as formats
from fissile.data import read_features, write_features

DATA = features()
KEYS = ("x_train", "y_train", "x_test", "y_test")
ARRAYS = dict(zip(KEYS, (DATA.x, DATA.y, DATA.x_test, DATA.y_test), strict=True))


def nan():
    x = DATA.x.copy()
    x[-1, -1] = np.nan
    return {"x_train": x}


BAD = {
    "missing": ({"y_test": None}, r"y_test"),
    "foreign": ({"x_val": DATA.x}, r"x_val"),
    "lengths": ({"y_train": DATA.y[:-1]}, "one label per sample"),
    "widths": ({"x_test": DATA.x_test[:, :3]}, "give both the same"),
    "not whole": ({"y_train": DATA.y + 0.5}, "whole number"),
    "negative": ({"y_train": DATA.y - 1}, "number the classes from 0"),
    "too large": ({"y_test": DATA.y_test + 1000}, "a label is 1002"),
    "nan": (nan(), "NaN or infinity"),
    "flat": ({"x_train": DATA.x[:, 0]}, "x has shape"),
    "numbers": ({"x_train": DATA.x.astype(np.int32)}, "x holds int32"),
}


@pytest.mark.parametrize("name", ["f.npz", "f.safetensors", "f", "packed.npz"])
@pytest.mark.parametrize("why", BAD)
def test_a_bad_file_is_refused(name, why, tmp_path):
    changes, message = BAD[why]
    held = {key: array for key, array in (ARRAYS | changes).items() if array is not None}
    path = tmp_path / name
    if name == "packed.npz":
        np.savez_compressed(path, **held)
    elif name == "f.npz":
        np.savez(path, **held)
    elif name == "f.safetensors":
        save_file(held, path)
    else:
        path.mkdir()
        for key, array in held.items():
            np.save(path / f"{key}.npy", array)
    with pytest.raises(FileError, match=f"^{path}: .*{message}"):
        read_features(path)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("key", ["x_train", "names"])
def test_objects_are_never_read(save, key, tmp_path):
    trap = np.array([Trap(tmp_path / "sprung")] * 24, dtype=object)
    save(tmp_path / "f.npz", **ARRAYS | {key: trap})
    with pytest.raises(FileError, match="objects are never read"):
        read_features(tmp_path / "f.npz")
    write_features(tmp_path / "f", DATA)
    np.save(tmp_path / "f" / "x_train.npy", trap)
    with pytest.raises(FileError, match="objects are never read"):
        read_features(tmp_path / "f")
    assert not (tmp_path / "sprung").exists()


def npy(shape, content, dtype="<f2", order="False"):
    head = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape}, }}"
    head = head.ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + content


CUT, TORN = "cut short or too long", "damaged or not what it claims"
CLAIMS = {
    "gigantic": (npy((2**40, 2**20), b""), CUT),
    "overflow": (npy((2**62, 4), b""), CUT),
    "too short": (npy((24, 5), DATA.x.tobytes()[:-1]), CUT),
    "too long": (npy((24, 5), DATA.x.tobytes() + b"\0"), CUT),
    "negative": (npy((-24, -5), DATA.x.tobytes()), "claims the shape"),
    "bools": (npy((True, 120), DATA.x.tobytes()), "claims the shape"),
    "empty": (npy((0, 5), b""), "empty array|x has shape"),
    "no numbers": (npy((24, 5), b"", "|V0"), "not numbers"),
    "big-endian": (npy((24, 5), DATA.x.astype(">f2").tobytes(), ">f2"), "x holds >f2"),
    "structured": (npy((24, 5), bytes(240)).replace(b"'<f2'", b"[('a','<f2')]"), "not numbers"),
    "version 3": (npy((24, 5), DATA.x.tobytes()).replace(b"\1\0", b"\3\0"), "version"),
    "not numpy": (b"hello", TORN),
    "nothing": (b"", TORN),
    "a call": (npy("__import__('os').mkdir('sprung')", b""), TORN),
}


@pytest.mark.parametrize("why", CLAIMS)
@pytest.mark.parametrize("where", ["npz", "packed", "folder"])
def test_a_lying_array_is_refused(why, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = CLAIMS[why]
    path = tmp_path / ("f" if where == "folder" else "f.npz")
    if where == "folder":
        write_features(path, DATA)
        (path / "x_train.npy").write_bytes(content)
    else:
        kind = zipfile.ZIP_DEFLATED if where == "packed" else zipfile.ZIP_STORED
        others(path, kind, content)
    with pytest.raises(FileError, match=f"^{path}: .*({message})"):
        read_features(path)
    assert not (tmp_path / "sprung").exists()


def others(path, kind, content):
    """A .npz file in which one array is the given bytes."""
    np.savez(path, **{key: ARRAYS[key] for key in KEYS if key != "x_train"})
    with zipfile.ZipFile(path, "a", kind) as archive:
        archive.writestr("x_train.npy", content)


def test_an_array_packed_otherwise_is_refused(tmp_path):
    others(tmp_path / "f.npz", zipfile.ZIP_BZIP2, npy((24, 5), DATA.x.tobytes()))
    with pytest.raises(FileError, match="packed in a way numpy does not"):
        read_features(tmp_path / "f.npz")


def test_an_array_that_is_not_where_the_zip_says_is_refused(tmp_path):
    np.savez(tmp_path / "f.npz", **ARRAYS)
    content = (tmp_path / "f.npz").read_bytes()
    (tmp_path / "f.npz").write_bytes(content.replace(b"PK\3\4", b"PK\3\5", 1))
    with pytest.raises(FileError, match="does not begin where"):
        read_features(tmp_path / "f.npz")


@pytest.mark.parametrize("told", [{"names": np.arange(3)}, {"encoder": np.array(["a", "b"])}])
def test_bad_names_are_refused(told, tmp_path):
    np.savez(tmp_path / "f.npz", **ARRAYS, **told)
    with pytest.raises(FileError, match=r"not text|no short text"):
        read_features(tmp_path / "f.npz")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "f.npz"
    x = np.zeros((24, 50_000), np.float16)
    np.savez_compressed(path, **ARRAYS | {"x_train": x, "x_test": x[:10]})
    read_features(path)
    with monkeypatch.context() as patch:
        patch.setattr(formats, "IN_MEMORY", 2**20)
        with pytest.raises(FileError, match="too many to be true"):
            read_features(path)
    content = path.read_bytes()
    small, large = struct.pack("<I", x.nbytes + 128), struct.pack("<I", 2**31)
    assert small in content
    path.write_bytes(content.replace(small, large))
    with pytest.raises(FileError, match="2,147,483,648 bytes, too many to be true"):
        read_features(path)


CONTENT = b"".join(array.tobytes() for array in ARRAYS.values())


def tensors(header, content=CONTENT):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def header(arrays=ARRAYS, **changes):
    made, end = {}, 0
    codes = {"float16": "F16", "int64": "I64"}
    for key, array in arrays.items():
        begin, end = end, end + array.nbytes
        entry = {"dtype": codes[array.dtype.name], "shape": array.shape}
        made[key] = entry | {"data_offsets": [begin, end]}
    for change, value in changes.items():
        made["x_train"] = made["x_train"] | {change: value}
    return made


def told(**metadata):
    return tensors(header() | {"__metadata__": metadata})


EMPTY = ARRAYS | {"x_train": DATA.x[:0]}
MORE = ARRAYS | {"x_val": DATA.x}
HEAD = "deserializing header"
HEADERS = {
    "overlap": (tensors(header() | {"x_test": header()["x_train"]}), HEAD),
    "beyond": (tensors(header(data_offsets=[2**40, 2**40 + 240])), HEAD),
    "hole": (tensors(header(), bytes(8) + CONTENT), HEAD),
    "cut": (tensors(header())[:-1], HEAD),
    "backwards": (tensors(header(data_offsets=[240, 0])), HEAD),
    "shape": (tensors(header(shape=[24, 6])), HEAD),
    "shape gigantic": (tensors(header(shape=[2**40, 2**40])), HEAD),
    "negative": (tensors(header(data_offsets=[-240, 0])), HEAD),
    "words": (tensors(header(data_offsets=["0", "240"])), HEAD),
    "shape of words": (tensors(header(shape="abc")), HEAD),
    "shape of nothing": (tensors(header(EMPTY), CONTENT[240:]), "empty array"),
    "one offset": (tensors(header(data_offsets=[0])), TORN),
    "dtype": (tensors(header(dtype="BF16")), "save it as F16 or F32"),
    "dtype a list": (tensors(header(dtype=["F16"])), TORN),
    "entry": (tensors(header() | {"x_train": 3}), TORN),
    "foreign": (tensors(header(MORE), CONTENT + DATA.x.tobytes()), "it must hold .* x_val"),
    "foreign and beyond": (tensors(header() | {"x_val": header()["x_test"]}), HEAD),
    "twice": (tensors(json.dumps(header()).replace("x_test", "x_train").encode()), HEAD),
    "no table": (tensors([1, 2]), HEAD),
    "metadata": (tensors(header() | {"__metadata__": 3}), HEAD),
    "names": (told(names="[1]"), "names are no list of texts"),
    "names no list": (told(names='"abc"'), "names are no list of texts"),
    "names no JSON": (told(names="["), TORN),
    "encoder": (told(encoder=3), HEAD),
    "encoder long": (told(encoder="a" * 1001), "no short text"),
    "deep": (tensors(b"[" * 100_000), TORN),
    "long header": (struct.pack("<Q", 2**62) + b"{}", HEAD),
    "no header": (b"\0\0\0", HEAD),
}


@pytest.mark.parametrize("why", HEADERS)
def test_a_lying_header_is_refused(why, tmp_path):
    path = tmp_path / "f.safetensors"
    path.write_bytes(tensors(header()))
    assert read_features(path).fingerprint() == DATA.fingerprint()
    content, message = HEADERS[why]
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"^{path}: .*{message}"):
        read_features(path)


FLOATS = pyarrow.list_(pyarrow.float32())
TABLES = {
    "no column 'features'": {"features": None},
    "no column 'label'": {"label": None},
    "no column 'split'": {"split": None},
    "write lists of floats": {"features": [[1, 2]] * 34},
    "features are double": {"features": [1.0] * 34},
    "lists of one length": {"features": pyarrow.array([[1.0], [1.0, 2.0, 3.0]] * 17, FLOATS)},
    "or none": {"features": pyarrow.array([[]] * 34, FLOATS)},
    "missing in some rows": {"features": pyarrow.array([[1.0], None] * 17, FLOATS)},
    "labels are double": {"label": [0.5] * 34},
    "some missing": {"label": [None] + [0] * 33},
    "split is 'val'": {"split": ["train"] * 20 + ["val"] * 14},
    "split is '0'": {"split": [0] * 34},
    "x_test has shape": {"split": ["train"] * 34},
    "NaN": {"features": pyarrow.array([[1.0, float("nan")]] * 34, FLOATS)},
}


@pytest.mark.parametrize("message", TABLES)
def test_a_bad_table_is_refused(message, tmp_path):
    path = feature_table(tmp_path / "f.parquet", DATA, **TABLES[message])
    with pytest.raises(FileError, match=f"^{path}: .*{message}"):
        read_features(path)


def test_a_table_that_needs_more_memory_than_it_may_is_refused(tmp_path, monkeypatch):
    path = feature_table(tmp_path / "f.parquet", DATA)
    monkeypatch.setattr("fissile.data.tables.IN_MEMORY", DATA.x.nbytes // 4)
    with pytest.raises(FileError, match=f"^{path}: .*use .npy or .safetensors"):
        read_features(path)


def test_tables_of_several_widths_are_refused(tmp_path):
    feature_table(tmp_path / "a.parquet", DATA)
    feature_table(tmp_path / "b.parquet", features(inputs=4))
    with pytest.raises(FileError, match=f"^{tmp_path}: .*several lengths"):
        read_features(tmp_path)
