"""Small files that ask for much: no time and no memory goes into what cannot be honest."""

import fcntl
import gzip
import itertools
import os
import struct
import tracemalloc

import numpy as np
import pyarrow
import pytest
from data_files import (
    cifar_tables,
    encoded,
    feature_table,
    features,
    idx,
    images,
)
from PIL import Image
from pyarrow import parquet

from fissile import FileError
from fissile._common.errors import printable
from fissile._common.files import reading, replacing_folder
from fissile.data import catalogue, cifar, read_features, tables, write_features
from fissile.data.cifar import read_cifar
from fissile.data.embed.sources import decode, of_folder
from fissile.data.idx import read_idx

DATA = images()


def test_an_idx_file_is_held_once_and_has_a_limit(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((40, 2**18), np.uint8)), 1))
    tracemalloc.start()
    try:
        assert read_idx(path).shape == (40, 2**18)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * 40 * 2**18
    finally:
        tracemalloc.stop()
    with pytest.raises(FileError, match="more than it can hold"):
        read_idx(path, most=2**20)
    with open(path, "wb") as raw, gzip.open(raw, "wb") as file:
        file.write(b"\0\0\x08\x02" + struct.pack(">II", 2**15 + 1, 2**15) + bytes(2**22))
    with open(path, "ab") as raw:
        raw.truncate(2**21)  # room enough for what it claims, packed
    with pytest.raises(FileError, match="claims 1,073,774,592 bytes, more than it can hold"):
        read_idx(path)


def test_fashion_mnist_has_the_size_it_has(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        with open(folder / f"{name}-ubyte.gz", "wb") as raw, gzip.open(raw, "wb") as file:
            file.write(b"\0\0\x08\x03" + struct.pack(">III", 86_000, 28, 28))
            file.write(os.urandom(2**17))
    with pytest.raises(FileError, match="claims 67,424,000 bytes, more than it can hold"):
        catalogue.load("fashionmnist", tmp_path)


def one_image(folder, train, test, file=None):
    """Tables that repeat one image."""
    file = encoded(DATA.x[0]) if file is None else file
    for part, count in (("train", train), ("test", test)):
        kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
        img = pyarrow.array([{"bytes": file, "path": "p" * 1000}], kind).take([0] * count)
        labels = pyarrow.array(np.arange(count) % 10)
        parquet.write_table(
            pyarrow.table({"img": img, "fine_label": labels}), folder / f"{part}-0.parquet"
        )


def test_cifar_has_no_more_rows_than_it_has(tmp_path, monkeypatch):
    one_image(tmp_path, 60_000, 10_001)
    with pytest.raises(FileError, match="claims 70,001 images, more than 70,000; refused"):
        read_cifar(tmp_path)
    one_image(tmp_path, 150, 70)
    read = read_cifar(tmp_path)
    assert (read.x == DATA.x[0]).all()
    assert (read.x.shape, len(read.y_test)) == ((150, 32, 32, 3), 70)
    monkeypatch.setattr(cifar, "total", lambda paths: 100)
    with pytest.raises(FileError, match="more images than it claims"):
        read_cifar(tmp_path)


def test_a_large_image_that_many_rows_share_is_not_repeated(tmp_path):
    one_image(tmp_path, 60, 10, bytes(2**20))
    files = [tmp_path / "train-0.parquet"]
    (batch,) = tables.rows(files, ["img"], 64, once=["img.bytes", "img.path"])
    assert batch.nbytes < 2**21
    with pytest.raises(FileError, match="a row holds no image, or a large one"):
        read_cifar(tmp_path)


def equal_rows(path, rows, width):
    """A table of equal numbers, which take no room."""
    kind = pyarrow.list_(pyarrow.float64())
    offsets = pyarrow.array(np.arange(rows + 1, dtype=np.int32) * width)
    values = pyarrow.array(np.ones(rows * width))
    table = {"features": pyarrow.ListArray.from_arrays(offsets, values, kind)}
    table |= {
        "label": np.arange(rows) % 2,
        "split": ["train", "train", "test", "test"] * (rows // 4),
    }
    parquet.write_table(pyarrow.table(table), path)
    return path


def test_a_table_of_equal_numbers_is_refused_before_it_is_read(tmp_path):
    path = equal_rows(tmp_path / "f.parquet", 1000, 10_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(FileError, match=r"claims 80,000,000 bytes, too many to be true"):
        read_features(path)
    path = equal_rows(tmp_path / "f.parquet", 4, 2**16 + 1)
    with pytest.raises(FileError, match="have 65,537 numbers, more than 65,536"):
        read_features(path)
    assert read_features(equal_rows(tmp_path / "f.parquet", 8, 2**16)).inputs == 2**16


def test_a_wide_table_is_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(tables, "_BATCH", 8 * 5 * 3)
    matrix = tables._matrix
    monkeypatch.setattr(tables, "_matrix", lambda c: seen.append(len(c)) or matrix(c))
    read = read_features(feature_table(tmp_path / "f.parquet", features()))
    assert read.fingerprint() == features().fingerprint()
    assert set(seen) == {3, 1}


def test_a_long_split_is_not_repeated(tmp_path):
    words = pyarrow.array(["x" * 2**22]).take([0] * 34)
    path = feature_table(tmp_path / "f.parquet", features(), split=words)
    with pytest.raises(FileError, match=r"split is 'x{20}' in some row"):
        read_features(path)
    none = pyarrow.array(["train"] * 33 + [None])
    with pytest.raises(FileError, match="split is '' in some row"):
        read_features(feature_table(path, features(), split=none))


def test_an_image_of_too_many_pixels_is_refused_unseen(tmp_path):
    Image.new("1", (7072, 7072)).save(tmp_path / "a.png")
    with pytest.raises(FileError, match="more than 50,000,000 pixels; make it smaller"):
        decode(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_grey_of_sixteen_bits_is_not_clipped(name, tmp_path):
    ramp = np.linspace(0, 65_535, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / name)
    seen = np.asarray(decode(tmp_path / name))[..., 0].ravel().astype(int)
    assert np.abs(seen - np.arange(256)).max() <= 1


def test_images_of_thirty_two_bits_are_refused(tmp_path):
    for kind in (np.int32, np.float32):
        Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "a.tif")
        with pytest.raises(FileError, match=r"32 bits a pixel.*save it with 8 or 16"):
            decode(tmp_path / "a.tif")


def test_files_are_flushed_through_a_handle_that_may_write(tmp_path, monkeypatch):
    """Windows refuses others."""
    modes = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: modes.append(fcntl.fcntl(handle, fcntl.F_GETFL))
    )
    with replacing_folder(tmp_path / "new", frozenset()) as beside:
        (beside / "a").write_bytes(b"kept")
    assert [mode & os.O_ACCMODE for mode in modes] == [os.O_RDWR]
    assert (tmp_path / "new" / "a").read_bytes() == b"kept"


CLEAR = "\x1b[2J\x1b]0;owned\x07\u202e"


def test_no_file_speaks_to_the_terminal(tmp_path):
    with pytest.raises(FileError) as caught, reading(tmp_path):
        raise FileError(f"it holds {CLEAR}{'x' * 9999}; get it again")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 450
    assert str(caught.value).endswith("get it again")
    with pytest.raises(FileError) as caught, reading(f"{tmp_path}/{CLEAR}"):
        raise RuntimeError(CLEAR)
    assert str(caught.value).isprintable()
    assert printable("dög – “naïve”", 99) == "dög – “naïve”"


@pytest.mark.parametrize("told", [{"encoder": CLEAR}, {"names": ("a", CLEAR, "c")}])
def test_names_and_encoders_are_printable(told, tmp_path):
    np.savez(
        tmp_path / "f.npz",
        **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays(), strict=True)),
        **{key: np.array(value) for key, value in told.items()},
    )
    with pytest.raises(FileError, match=r"no short text|no list of texts"):
        read_features(tmp_path / "f.npz")
    with pytest.raises(FileError, match=r"no short text|no list of texts"):
        write_features(tmp_path / "g.npz", features(**told))
    assert not (tmp_path / "g.npz").exists()


def arrays():
    data = features()
    return data.x, data.y, data.x_test, data.y_test


def test_classes_of_a_folder_are_printable(tmp_path):
    for split, name in itertools.product(("train", "test"), ("a", CLEAR)):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / split / name / "a.png")
    with pytest.raises(FileError, match="no plain text; rename its folder"):
        of_folder(tmp_path)


def test_names_in_a_pickle_or_beside_tables_are_texts(tmp_path):
    cifar_tables(tmp_path, DATA)
    (tmp_path / "names.json").write_text('{"fine_label": ["' + "a" * 1001 + '"]}')
    with pytest.raises(FileError, match="no short text"):
        read_cifar(tmp_path)
