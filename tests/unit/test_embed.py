"""Features from a frozen encoder: what the file holds, in which order, and what a crash costs."""

import errno
import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import nn

from fissile import __version__
from fissile.data.features import read_features
from fissile.data.sets import Labelled
from fissile.data.text import Texts
from fissile.embed import embed, encoder, source
from fissile.embed.pca import fit
from fissile.embed.sources import of_folder, of_images, of_texts
from fissile.errors import FileError, FissileError

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


class Letters:
    """An encoder of texts by hand that can be stopped after some batches."""

    name, kind, key, width = "letters", "text", "1", 5

    def __init__(self, stop=None, wrong=None):
        self.stop, self.wrong, self.seen = stop, wrong, []

    def prepare(self, text):
        return [text.count(letter) + len(text) / 7 for letter in "abcde"]

    def encode(self, batch):
        if self.stop == 0:
            raise KeyboardInterrupt
        self.stop = self.stop and self.stop - 1
        self.seen.append(len(batch))
        found = torch.tensor(batch)
        return found if self.wrong is None else self.wrong(found)


def words(train=23, test=9):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefg"), rng.integers(1, 30))) for _ in range(train + test)]
    labels = rng.integers(0, 3, train + test)
    return of_texts(
        "words",
        Texts(texts[:train], labels[:train], texts[train:], labels[train:], ("x", "y", "z")),
    )


def whole(path):
    """Return every byte of a file or of the files of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


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
    assert made.encoder == f"{TINY} (fissile {__version__})"
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


def test_unit_length(tmp_path):
    made = embed(words(), Letters(), tmp_path / "x.npz", normalize=True, dtype="float32")
    np.testing.assert_allclose(np.linalg.norm(made.x, axis=1), 1, rtol=1e-6)
    assert "unit length" in made.encoder


# --- principal components


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_components_are_those_of_numpy(dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 12)) * np.arange(1, 13) + 5).astype(dtype)
    found = fit(x, 4)
    doubles = x.astype(np.float64)
    _, _, v = np.linalg.svd(doubles - doubles.mean(0))
    np.testing.assert_allclose(np.abs(found.directions.T @ v[:4].T), np.eye(4), atol=1e-8)
    np.testing.assert_allclose(found(x), (doubles - doubles.mean(0)) @ found.directions)
    assert (found.directions.max(0) >= -found.directions.min(0)).all()


def test_components_are_fitted_on_the_training_set(tmp_path):
    full = embed(words(), Letters(), tmp_path / "full.npz", dtype="float32")
    made = embed(words(), Letters(), tmp_path / "x.npz", dtype="float32", pca=2)
    np.testing.assert_allclose(made.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(made.x_test, fit(full.x, 2)(full.x_test), rtol=1e-4, atol=1e-5)
    assert "PCA 2" in made.encoder
    for count, samples in ((6, 23), (4, 4)):
        with pytest.raises(FissileError, match="give fewer"):
            embed(words(samples), Letters(), tmp_path / "y.npz", pca=count)
    assert not (tmp_path / "y.npz.part").exists()


# --- interruptions


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ""])
@pytest.mark.parametrize("pca", [None, 3])
def test_an_interruption_at_any_batch_changes_no_byte(tmp_path, suffix, pca):
    calm = tmp_path / f"calm{suffix}"
    embed(words(), Letters(), calm, batch=5, pca=pca)
    batches = 5 + 2  # of 23 and of 9 rows
    for stop in range(batches):
        to = tmp_path / f"stopped{stop}{suffix}"
        first, second = Letters(stop=stop), Letters()
        with pytest.raises(KeyboardInterrupt):
            embed(words(), first, to, batch=5, pca=pca)
        assert not to.exists()
        embed(words(), second, to, batch=5, pca=pca)
        assert whole(to) == whole(calm)
        assert [*first.seen, *second.seen] == [5, 5, 5, 5, 3, 5, 4]  # nothing twice
        assert not Path(f"{to}.part").exists()


def test_what_a_crash_left_behind_the_finished_rows_is_cut_off(tmp_path):
    embed(words(), Letters(), tmp_path / "calm.npz", batch=5)
    to = tmp_path / "x.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=2), to, batch=5)
    with open(f"{to}.part/train.npy", "ab") as file:
        file.write(b"half a row")
    embed(words(), Letters(), to, batch=5)
    assert to.read_bytes() == (tmp_path / "calm.npz").read_bytes()


def test_a_crash_after_the_file_is_written(tmp_path, monkeypatch):
    """The target is there and so are all rows: the second run only tidies up."""
    to = tmp_path / "x.npz"
    with monkeypatch.context() as patch:
        patch.setattr("fissile.embed.part.Part.remove", lambda part: Letters(stop=0).encode([]))
        with pytest.raises(KeyboardInterrupt):
            embed(words(), Letters(), to)
    before, again = to.read_bytes(), Letters()
    embed(words(), again, to)
    assert again.seen == []
    assert to.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("source", {"source": words(24)}),
        ("encoder", {"name": "numbers"}),
        ("weights", {"key": "2"}),
        ("batch", {"batch": 6}),
        ("pca", {"pca": 2}),
        ("normalize", {"normalize": True}),
        ("dtype", {"dtype": "float32"}),
    ],
)
def test_other_arguments_are_refused(tmp_path, name, change):
    to, options = tmp_path / "x.npz", {"source": words(), "batch": 5}
    with pytest.raises(KeyboardInterrupt):
        embed(encoder=Letters(stop=2), to=to, **options)
    second = Letters()
    for key in ("name", "key"):
        setattr(second, key, change.get(key, getattr(second, key)))
    changed = options | {k: v for k, v in change.items() if k not in ("name", "key")}
    with pytest.raises(FileError, match=rf"10 rows of something else: .*{name} was .*begin anew"):
        embed(encoder=second, to=to, **changed)
    embed(encoder=Letters(), to=to, **options)  # and the rows are still there


def test_a_beginning_without_rows_binds_nobody(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=0), tmp_path / "x.npz", batch=23)
    assert len(embed(words(), Letters(), tmp_path / "x.npz", batch=4).y) == 23


@pytest.mark.parametrize("text", ["", "{", "[]", '{"what": 1, "done": 2}', '{"what": {}}'])
def test_a_damaged_part(tmp_path, text):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=1), tmp_path / "x.npz", batch=4)
    (tmp_path / "x.npz.part/about.json").write_text(text)
    with pytest.raises(FileError, match="remove it to begin anew"):
        embed(words(), Letters(), tmp_path / "x.npz", batch=4)


def test_rows_that_count_but_are_gone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=1), tmp_path / "x.npz", batch=4)
    (tmp_path / "x.npz.part/train.npy").unlink()
    with pytest.raises(FileError, match="files are not as long"):
        embed(words(), Letters(), tmp_path / "x.npz", batch=4)


def test_only_one_at_a_time(tmp_path):
    class Greedy(Letters):
        def encode(self, batch):
            with pytest.raises(FileError, match="another process works in"):
                embed(words(), Letters(), tmp_path / "x.npz")
            return super().encode(batch)

    embed(words(), Greedy(), tmp_path / "x.npz")


@contextmanager
def room_for(size):
    """Let larger files fail, as they do on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_one_clear_error_and_costs_nothing(tmp_path):
    texts = words(1500, 9)
    calm, to = (tmp_path / f"{name}.safetensors" for name in ("calm", "x"))
    embed(texts, Letters(), calm, batch=100)
    with room_for(8000), pytest.raises(FileError, match="finished rows stay there: make room"):
        embed(texts, Letters(), to, batch=100)
    done = json.loads((tmp_path / "x.safetensors.part/about.json").read_text())["done"]["train"]
    assert done == (8000 - 128) // 1000 * 100
    # All rows fit, the labels beside them do not: the part stays for the next try.
    with room_for(20_000), pytest.raises(FileError, match="could not write"):
        embed(texts, Letters(), to, batch=100)
    assert not to.exists()
    last = Letters()
    embed(texts, last, to, batch=100)
    assert last.seen == []
    assert to.read_bytes() == calm.read_bytes()


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
        (words(), Letters(wrong=lambda x: x * 1e9), "x.npz", {}, "give dtype float32"),
        (words(), Letters(wrong=lambda x: x / 0), "y.npz", {}, "gave NaN or infinity"),
        (words(), Letters(wrong=lambda x: x[:, :2]), "z.npz", {}, "not rows of 5"),
        (words(), Letters(wrong=no_memory), "m.npz", {}, "batch=256 does not fit into memory"),
    ]
    for what, coder, to, options, message in cases:
        with pytest.raises(FissileError, match=message):
            embed(what, coder, tmp_path / to, **options)


def test_a_torn_image_is_named_and_costs_nothing(pictures, tmp_path):
    root = tmp_path / "torn"
    for path in pictures.glob("*/*/*"):
        to = root / path.relative_to(pictures)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
    good = (root / "train/dog/2.png").read_bytes()
    (root / "train/dog/2.png").write_bytes(good[:100])
    with pytest.raises(FileError, match=r"dog/2.png"):
        embed(root, TINY, tmp_path / "x.npz", batch=4)
    (root / "train/dog/2.png").write_bytes(good)
    embed(root, TINY, tmp_path / "x.npz", batch=4)
    embed(pictures, TINY, tmp_path / "calm.npz", batch=4)
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "calm.npz").read_bytes()


def test_a_folder_is_known_by_its_files_not_by_its_place(pictures, tmp_path):
    key = of_folder(pictures).key
    (tmp_path / "elsewhere").symlink_to(pictures)
    assert of_folder(tmp_path / "elsewhere").key == key
    for path in pictures.glob("*/*/*"):
        to = tmp_path / "more" / path.relative_to(pictures)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
    (tmp_path / "more/val/cat/9.png").write_bytes((pictures / "val/cat/0.png").read_bytes())
    assert of_folder(tmp_path / "more").key != key


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
    assert read_features(tmp_path / "x.npz").encoder == f"letters (fissile {__version__})"
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        assert file["x_train"].shape == (23, 5)
