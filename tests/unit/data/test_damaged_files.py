"""Torn and flipped files of every format: the same data, other data, or one error of ours."""

import contextlib
import shutil

import pytest
from data_files import (
    CIFAR,
    cifar_archive,
    cifar_folder,
    cifar_parts,
    cifar_tables,
    feature_table,
    features,
    idx_folder,
    images,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile import FissileError
from fissile.data import read_features, write_features
from fissile.data.cifar import read_cifar
from fissile.data.idx import read_idx_folder
from fissile.data.text import read_banking, read_clinc

DATA = features(names=("a", "b", "c"), encoder="mine")


def written(name):
    def make(folder):
        write_features(folder / name, DATA)
        return folder / name

    return make


def packed(folder):
    import numpy as np

    np.savez_compressed(
        folder / "f.npz", x_train=DATA.x, y_train=DATA.y, x_test=DATA.x_test, y_test=DATA.y_test
    )
    return folder / "f.npz"


def texts(folder):
    (folder / "data_full.json").write_text('{"train": [["hi", "a"]], "test": [["yo", "a"]]}')
    for name in ("train", "test"):
        (folder / f"{name}.csv").write_text("text,category\nhi,a\n")
    (folder / "categories.json").write_text('["a"]')
    return folder


SMALL = images(3, 2, (32, 32, 3), 2)
FORMATS = {
    "npz": (written("f.npz"), read_features),
    "packed npz": (packed, read_features),
    "safetensors": (written("f.safetensors"), read_features),
    "folder": (written("f"), read_features),
    "table": (lambda f: feature_table(f / "f.parquet", DATA), read_features),
    "idx": (lambda f: idx_folder(f, images(3, 2, (4, 4), 2)), read_idx_folder),
    "plain idx": (lambda f: idx_folder(f, images(3, 2, (4, 4), 2), bytes), read_idx_folder),
    "pickles": (lambda f: cifar_folder(f / CIFAR, cifar_parts(SMALL)), read_cifar),
    "archive": (lambda f: cifar_archive(f / "c.tar.gz", cifar_parts(SMALL)), read_cifar),
    "images": (lambda f: cifar_tables(f, SMALL), read_cifar),
    "clinc": (texts, read_clinc),
    "banking": (texts, read_banking),
}


@pytest.fixture(scope="module", params=FORMATS)
def form(request, tmp_path_factory):
    make, read = FORMATS[request.param]
    path = make(tmp_path_factory.mktemp("form"))
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    contents = {file: file.read_bytes() for file in files}
    read(path)
    return path, read, contents


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_torn_or_flipped_file_never_does_anything_else(form, data):
    path, read, contents = form
    file = data.draw(st.sampled_from(sorted(contents)))
    content = bytearray(contents[file])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        # Headers are at the ends of files; in the middle are mostly numbers.
        near = st.integers(0, min(300, len(content) - 1))
        places = near | near.map(lambda k: len(content) - 1 - k) | st.integers(0, len(content) - 1)
        for place in data.draw(st.lists(places, min_size=1, max_size=3)):
            content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        with contextlib.suppress(FissileError):
            read(path)
    finally:
        file.write_bytes(contents[file])


def test_every_missing_file_is_one_error(form):
    path, read, contents = form
    for file, content in contents.items():
        if file.name in ("names.json", "about.json", "data_full.json"):
            continue
        if read is read_clinc:
            continue
        file.unlink()
        with pytest.raises(FissileError):
            read(path)
        file.write_bytes(content)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(FissileError):
        read(path)
