"""Features in files: the same arrays out of every format, written whole or not at all."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow
import pytest
import torch
from data_files import feature_table, features, images
from safetensors.numpy import load_file, save_file

from fissile import FileError
from fissile.data import read_features, write_features

NAMES = ("cat", "dög", "emu")
DATA = features(names=NAMES, encoder="CLIP ViT-B/16")
KEYS = ("x_train", "y_train", "x_test", "y_test")
ARRAYS = dict(zip(KEYS, (DATA.x, DATA.y, DATA.x_test, DATA.y_test), strict=True))
FORMATS = ("f.npz", "f.safetensors", "f")


def same(one, other=DATA):
    told = (one.names, one.encoder) == (other.names, other.encoder)
    return told and one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "data", [DATA, features(dtype=np.float32), features(dtype=np.float64), images()]
)
def test_what_was_written_comes_back(name, data, tmp_path):
    write_features(tmp_path / name, data)
    back = read_features(tmp_path / name)
    assert same(back, data)
    assert isinstance(back.x, np.memmap)
    assert back.x.flags.aligned
    write_features(tmp_path / name, back)  # onto the very file it is mapped from
    assert same(read_features(tmp_path / name), data)
    assert os.listdir(tmp_path) == [name], "something was left beside it"


@pytest.mark.parametrize("name", FORMATS)
def test_changing_a_mapped_array_leaves_the_file_alone(name, tmp_path):
    write_features(tmp_path / name, DATA)
    back = read_features(tmp_path / name)
    torch.from_numpy(back.x).zero_()  # would warn if it were not writable
    assert not back.x.any()
    assert same(read_features(tmp_path / name))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_files_of_others(save, tmp_path):
    path = tmp_path / "f.npz"
    save(
        path, **ARRAYS | {"y_train": DATA.y.astype(np.uint8)}, encoder="CLIP ViT-B/16", names=NAMES
    )
    assert same(read_features(path))
    save(path, **ARRAYS)
    back = read_features(path)
    assert (back.names, back.encoder, back.classes) == ((), "", 3)
    assert isinstance(back.x, np.memmap) == (save is np.savez)
    save(path, **ARRAYS | {"x_train": np.asfortranarray(DATA.x)})
    assert read_features(path).fingerprint() == DATA.fingerprint()


def test_others_read_what_we_write(tmp_path):
    write_features(tmp_path / "f.npz", DATA)
    with np.load(tmp_path / "f.npz") as read:
        assert set(read) == {*KEYS, "encoder", "names"}
        for key, array in ARRAYS.items():
            np.testing.assert_array_equal(read[key], array)
    assert zipfile.ZipFile(tmp_path / "f.npz").testzip() is None
    write_features(tmp_path / "f.safetensors", DATA)
    for key, array in load_file(tmp_path / "f.safetensors").items():
        np.testing.assert_array_equal(array, ARRAYS[key])


def test_safetensors_of_others(tmp_path):
    told = {"encoder": "CLIP ViT-B/16", "names": json.dumps(NAMES)}
    save_file(ARRAYS, tmp_path / "f.safetensors", told)
    assert same(read_features(tmp_path / "f.safetensors"))
    save_file(ARRAYS, tmp_path / "f.safetensors")
    assert read_features(tmp_path / "f.safetensors").fingerprint() == DATA.fingerprint()


@pytest.mark.parametrize("kind", [
    pyarrow.list_(pyarrow.float16()), pyarrow.large_list(pyarrow.float16()),
    pyarrow.list_(pyarrow.float16(), 5),
])  # fmt: skip
def test_tables(kind, tmp_path, monkeypatch):
    told = {"encoder": "CLIP ViT-B/16", "names": json.dumps(NAMES)}
    feature_table(tmp_path / "f.parquet", DATA, kind=kind, metadata=told)
    assert same(read_features(tmp_path / "f.parquet"))
    assert same(read_features(tmp_path))  # a folder of them
    monkeypatch.setattr("fissile.data.tables._ROWS", 7)
    assert same(read_features(tmp_path / "f.parquet"))


def test_a_table_in_several_files(tmp_path):
    for name, part in (("a", slice(0, 9)), ("b", slice(9, 24))):
        rows = features()
        object.__setattr__(rows, "x", DATA.x[part])
        object.__setattr__(rows, "y", DATA.y[part])
        test = slice(0, 4) if name == "a" else slice(4, 10)
        object.__setattr__(rows, "x_test", DATA.x_test[test])
        object.__setattr__(rows, "y_test", DATA.y_test[test])
        feature_table(tmp_path / f"{name}.parquet", rows)
    assert read_features(tmp_path).fingerprint() == DATA.fingerprint()


def test_what_is_no_features_file(tmp_path):
    for name in ("f.npz", "f.safetensors", "f.parquet", "f.txt", "f"):
        with pytest.raises(FileError):
            read_features(tmp_path / name)
    (tmp_path / "f.txt").write_text("hello")
    with pytest.raises(FileError, match=r"give \.npz"):
        read_features(tmp_path / "f.txt")
    with pytest.raises(FileError, match=r"cannot write \.txt"):
        write_features(tmp_path / "f.txt", DATA)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match=r"give \.npz"):
        read_features(tmp_path / "folder")


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileError, match=r"'thesis.tex', which is not ours"):
        write_features(tmp_path / "thesis", DATA)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("about", ["[]", "{", '{"names": [1]}', '{"encoder": 1}'])
def test_a_damaged_note_is_refused(about, tmp_path):
    write_features(tmp_path / "f", DATA)
    (tmp_path / "f" / "about.json").write_text(about)
    with pytest.raises(FileError):
        read_features(tmp_path / "f")
    (tmp_path / "f" / "about.json").unlink()
    assert read_features(tmp_path / "f").encoder == ""


def test_a_really_full_disk_keeps_the_old_file(tmp_path):
    """Writes under a file size limit of the operating system, in a process of its own."""
    paths = [tmp_path / name for name in FORMATS]
    for path in paths:
        write_features(path, DATA)
    code = (
        "import resource, signal, sys, numpy as np;"
        "from fissile.data import Labelled, write_features; from fissile import FileError;"
        "x = np.zeros((999, 99), np.float32); y = np.zeros(999, int);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "for path in sys.argv[1:]:\n"
        " try: write_features(path, Labelled(x, y, x, y))\n"
        " except FileError as error: print('refused:', error)"
    )
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    said = run.stdout.splitlines()
    assert len(said) == len(paths), run
    for path, line in zip(paths, said, strict=True):
        assert line.startswith("refused: could not write"), run
        assert str(path) in line
        assert same(read_features(path))
    assert sorted(os.listdir(tmp_path)) == sorted(FORMATS)


@pytest.mark.parametrize("name", ["f.npz", "f.safetensors", "f"])
def test_other_numbers_than_those_written_are_refused(name, tmp_path):
    data = features()
    write_features(tmp_path / name, data)
    file = tmp_path / name / "x_test.npy" if name == "f" else tmp_path / name
    whole = file.read_bytes()
    at = whole.index(data.x_test.tobytes()) + 3
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(FileError, match=f"^{tmp_path / name}: .*(its checksum differs|Bad CRC-32)"):
        read_features(tmp_path / name)


@pytest.mark.parametrize("name", ["f.safetensors", "f"])
def test_features_of_a_later_version_ask_for_it(name, tmp_path):
    write_features(tmp_path / name, features())
    file = tmp_path / name / "about.json" if name == "f" else tmp_path / name
    whole = file.read_bytes()
    text = b'"version": "1"'
    assert text in whole
    file.write_bytes(whole.replace(text, b'"version": "2"'))
    with pytest.raises(FileError, match="written in version '2'; update fissile"):
        read_features(tmp_path / name)
