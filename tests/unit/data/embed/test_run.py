"""Features from a frozen encoder: what the file holds, in which order, and what is refused."""

import errno
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letter_encoder import Letters, words
from PIL import Image, ImageOps
from torch import nn

from fissile import __version__
from fissile._common.errors import FileError, FissileError
from fissile.data.embed import embed, encoder, source
from fissile.data.embed.run import components
from fissile.data.embed.sources import of_folder, of_images
from fissile.data.features import read_features, write_features
from fissile.data.sets import Labelled

TINY = f"module:{__name__}:tiny"


def tiny():
    """A small network with everything that differs between training and use."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 6, 5, 4), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))
        made = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
    made.input_size = 32
    return made


def other():
    made = tiny()
    nn.init.ones_(made[0].weight)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of images of several shapes, modes and formats."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for split, count in (("train", 7), ("val", 3)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                shape = tuple(rng.integers(20, 60, 2)) + (() if number % 3 == 0 else (3,))
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{('png', 'bmp')[number % 2]}")
    return root


# --- what is in the file


def test_features_are_those_of_the_encoder_by_hand(pictures, tmp_path):
    made = embed(pictures, TINY, tmp_path / "x.npz", batch=4, dtype="float32")
    model = tiny().eval()
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    rows, labels = [], []
    for path in sorted((pictures / "train").glob("*/*")):
        image = ImageOps.fit(Image.open(path).convert("RGB"), (32, 32), Image.Resampling.BICUBIC)
        pixels = torch.tensor((np.array(image) / 255 - mean) / std).permute(2, 0, 1).float()
        rows.append(model(pixels[None]).flatten().detach().numpy())
        labels.append(("cat", "dog").index(path.parent.name))
    np.testing.assert_allclose(made.x, np.stack(rows), rtol=1e-4, atol=1e-5)
    assert made.y.tolist() == labels
    assert made.x_test.shape == (6, 6)
    assert made.names == ("cat", "dog")
    length = np.linalg.norm(made.x, axis=1).mean()
    assert made.encoder == f"{TINY}, mean length {length:.3g} (fissile {__version__})"
    assert made.x.dtype == np.float32
    assert embed(pictures, TINY, tmp_path / "half.npz").x.dtype == np.float16


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    train=st.integers(1, 40), test=st.integers(1, 12), batch=st.integers(1, 50),
    workers=st.integers(1, 4), suffix=st.sampled_from([".npz", ".safetensors", ""]),
)  # fmt: skip
def test_rows_are_in_order(train, test, batch, workers, suffix, tmp_path_factory):
    texts, to = words(train, test), tmp_path_factory.mktemp("rows") / f"features{suffix}"
    made = embed(texts, Letters(), to, batch=batch, workers=workers, dtype="float32")
    for split, x, y in (("train", made.x, made.y), ("test", made.x_test, made.y_test)):
        expected = [Letters().prepare(text) for text in texts.splits[split].items]
        np.testing.assert_allclose(x, expected, rtol=1e-6)
        assert y.tolist() == texts.splits[split].labels.tolist()
    assert os.listdir(to.parent) == [to.name]


def test_images_in_memory_grey_or_in_colour():
    rng = np.random.default_rng(0)
    for shape in ((28, 28), (8, 8, 3)):
        x = rng.integers(0, 256, (4, *shape), dtype=np.uint8)
        images = of_images("some", Labelled(x, np.arange(4), x[:2], np.arange(2)))
        coder = encoder(TINY)
        found = coder.encode(
            [coder.prepare(images.open(item)) for item in images.splits["train"].items]
        )
        assert found.shape == (4, coder.width)
        assert {images.open(item).mode for item in x} == {"RGB"}  # what encoders expect


def test_unit_length(tmp_path):
    made = embed(words(), Letters(), tmp_path / "x.npz", normalize=True, dtype="float32")
    np.testing.assert_allclose(np.linalg.norm(made.x, axis=1), 1, rtol=1e-6)
    assert "unit length" in made.encoder


# --- principal components


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_components_are_those_of_numpy(dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 12)) * np.arange(1, 13) + 5).astype(dtype)
    mean, directions = components(x, 4)
    doubles = x.astype(np.float64)
    _, _, v = np.linalg.svd(doubles - doubles.mean(0))
    np.testing.assert_allclose(mean, doubles.mean(0))
    np.testing.assert_allclose(np.abs(directions.T @ v[:4].T), np.eye(4), atol=1e-8)
    assert (directions.max(0) >= -directions.min(0)).all()


def test_components_are_fitted_on_the_training_set(tmp_path):
    full = embed(words(), Letters(), tmp_path / "full.npz", dtype="float32")
    made = embed(words(), Letters(), tmp_path / "x.npz", dtype="float32", pca=2)
    np.testing.assert_allclose(made.x.mean(0), 0, atol=1e-5)
    mean, directions = components(full.x, 2)
    expected = (full.x_test - mean) @ directions
    np.testing.assert_allclose(made.x_test, expected, rtol=1e-4, atol=1e-5)
    assert "PCA 2" in made.encoder
    for count, samples in ((6, 23), (4, 4)):
        with pytest.raises(FissileError, match="give fewer"):
            embed(words(samples), Letters(), tmp_path / "y.npz", pca=count)
    assert not (tmp_path / "y.npz.part").exists()


def test_components_that_float16_does_not_hold(tmp_path):
    def far(x):
        return x * 20_000

    with pytest.raises(FissileError, match="PCA 3 gives more than float16 holds; give --dtype f"):
        embed(words(), Letters(wrong=far), tmp_path / "x.npz", pca=3)
    again = Letters()
    made = embed(words(), again, tmp_path / "x.npz", pca=3, dtype="float32")
    assert again.seen == []  # the rows are the same for both
    assert np.abs(made.x).max() > 65504
    assert os.listdir(tmp_path) == ["x.npz"]


def test_components_are_not_held_in_memory(tmp_path, monkeypatch):
    def write(to, data):
        assert isinstance(data.x, np.memmap)
        assert isinstance(data.x_test, np.memmap)
        write_features(to, data)

    monkeypatch.setattr("fissile.data.embed.run.write_features", write)
    monkeypatch.setattr("fissile.data.sets._CHUNK", 100)  # bytes: five rows
    made = embed(words(), Letters(), tmp_path / "x.npz", pca=2, dtype="float32")
    monkeypatch.undo()
    calm = embed(words(), Letters(), tmp_path / "calm.npz", pca=2, dtype="float32")
    np.testing.assert_allclose(made.x, calm.x, rtol=1e-4, atol=1e-5)


# --- what cannot be right


def no_memory(_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_bad_arguments(tmp_path, pictures):
    (tmp_path / "there.npz").touch()
    cases = [
        (words(), TINY, "x.npz", {}, "words holds text, and .* takes images"),
        (pictures, Letters(), "x.npz", {}, "holds images, and letters takes text"),
        (words(), Letters(), "there.npz", {}, "is there already; remove it"),
        (words(), Letters(), "x.csv", {}, "cannot write .csv; give .npz"),
        (words(), Letters(), "x.npz", {"dtype": "int8"}, "none of float16, float32"),
        (words(), Letters(), "x.npz", {"batch": 0}, "batch=0 is not a whole number"),
        (words(), Letters(), "x.npz", {"workers": 0}, "workers=0 is not a whole number"),
        ("nowhere", Letters(), "x.npz", {}, "no folder, nor a set .*clinc150"),
        ("cifar100-clip", TINY, "x.npz", {}, "features already"),
        (words(), Letters(wrong=lambda x: x * 1e9), "x.npz", {}, "give --dtype float32"),
        (words(), Letters(wrong=lambda x: x / 0), "y.npz", {}, "gave NaN or infinity"),
        (words(), Letters(wrong=lambda x: x[:, :2]), "z.npz", {}, "not rows of 5"),
        (words(), Letters(wrong=no_memory), "m.npz", {}, "batch=256 does not fit into memory"),
    ]
    for what, coder, to, options, message in cases:
        with pytest.raises(FissileError, match=message):
            embed(what, coder, tmp_path / to, **options)


class Careless(Letters):
    """An encoder whose library raises what it likes."""

    def __init__(self, error, where):
        super().__init__()
        self.error, self.where = error, where

    def prepare(self, text):
        if self.where == "prepare" and text == words().splits["train"].items[7]:
            raise self.error
        return super().prepare(text)

    def encode(self, batch):
        if self.where == "encode" and self.seen:
            raise self.error
        return super().encode(batch)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("prepare", "^letters cannot take item 7 of train: expected 3 channels$"),
        ("encode", "^letters failed .item 4 and after, train.: expected 3 channels$"),
    ],
)
def test_what_an_encoder_raises_is_one_clear_line(where, message, tmp_path):
    for number, error in enumerate((RuntimeError("expected\n  3 channels"), KeyboardInterrupt())):
        expected = KeyboardInterrupt if number else FissileError
        with pytest.raises(expected, match=None if number else message):
            embed(words(), Careless(error, where), tmp_path / f"{number}.npz", batch=4)
    mine = FissileError("give another text")
    with pytest.raises(FissileError, match=r"^give another text$"):
        embed(words(), Careless(mine, where), tmp_path / "2.npz", batch=4)


def test_an_image_that_an_encoder_does_not_take_is_named(pictures, tmp_path):
    coder = encoder(TINY)
    coder.prepare = lambda image: 1 / 0
    with pytest.raises(FissileError, match=r"item 0 of train \(.*cat/0.png\): division by zero"):
        embed(pictures, coder, tmp_path / "x.npz", batch=4)


def test_a_torn_image_is_named_and_others_are_not_mixed_with_it(pictures, tmp_path):
    root = shutil.copytree(pictures, tmp_path / "torn")
    good = (root / "train/dog/2.png").read_bytes()
    (root / "train/dog/2.png").write_bytes(good[:100])
    with pytest.raises(FileError, match=r"dog/2.png"):
        embed(root, TINY, tmp_path / "x.npz", batch=4)
    (root / "train/dog/2.png").write_bytes(good)
    with pytest.raises(FileError, match="holds 8 rows of something else: source was"):
        embed(root, TINY, tmp_path / "x.npz", batch=4)
    shutil.rmtree(tmp_path / "x.npz.part")
    embed(root, TINY, tmp_path / "x.npz", batch=4)
    embed(pictures, TINY, tmp_path / "calm.npz", batch=4)
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "calm.npz").read_bytes()


def test_a_folder_is_known_by_its_files_not_by_its_place(pictures, tmp_path):
    key = of_folder(pictures).key
    (tmp_path / "elsewhere").symlink_to(pictures)
    assert of_folder(tmp_path / "elsewhere").key == key
    root = shutil.copytree(pictures, tmp_path / "copy")  # with its times
    assert of_folder(root).key == key
    shutil.copy2(pictures / "val/cat/0.png", root / "val/cat/9.png")
    assert of_folder(root).key != key


def test_a_folder_is_known_by_what_its_files_hold(pictures, tmp_path):
    root = shutil.copytree(pictures, tmp_path / "copy")
    file, key = root / "train/cat/1.bmp", of_folder(root).key
    time, content = file.stat().st_mtime_ns, file.read_bytes()
    file.write_bytes(content + b"0")
    os.utime(file, ns=(time, time))
    assert of_folder(root).key != key  # another size
    file.write_bytes(content[::-1])
    os.utime(file, ns=(time, time + 1))
    assert of_folder(root).key != key  # another time
    file.write_bytes(content)
    os.utime(file, ns=(time, time))
    assert of_folder(root).key == key


def test_sets_of_the_catalogue():
    images = source("generated-images")
    assert images.kind == "images"
    assert images.open(images.splits["test"].items[0]).size == (8, 8)


def test_a_read_only_target(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FileError, match="Read-only file system; give a target elsewhere"):
        embed(words(), Letters(), tmp_path / "x.npz")


def test_the_file_can_be_read_by_everyone(tmp_path):
    embed(words(), Letters(), tmp_path / "x.npz")
    made = read_features(tmp_path / "x.npz").encoder
    assert re.fullmatch(rf"letters, mean length [\d.]+ \(fissile {__version__}\)", made)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        assert file["x_train"].shape == (23, 5)
