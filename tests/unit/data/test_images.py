"""Images in files: IDX, tables of small images, and folders."""

import gzip
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_files import cifar_tables, encoded, idx, idx_folder, images
from PIL import Image

from fissile import FileError, FissileError
from fissile.data.cifar import read_cifar
from fissile.data.embed.encoders import square
from fissile.data.embed.sources import decode, of_folder
from fissile.data.idx import read_idx, read_idx_folder

FASHION = Path("/usr/share/datasets/fashion-mnist")
GREY = images(12, 8, (4, 3), 5)
DATA = images()


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gzip", "plain"])
def test_idx_files(pack, tmp_path):
    read = read_idx_folder(idx_folder(tmp_path, GREY, pack), tuple("abcde"))
    assert read.fingerprint() == GREY.fingerprint()
    assert read.classes == 5
    read.x[0] = 0  # torch.from_numpy would warn of an array that cannot be written to


@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist():
    read = read_idx_folder(FASHION)
    assert (read.x.shape, read.x_test.shape) == ((60_000, 28, 28), (10_000, 28, 28))
    assert np.bincount(read.y).tolist() == [6_000] * 10
    assert read.fingerprint() == "ad7b16dc82fbed35"


ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)
WHOLE = idx(ARRAY)
FALSE = {
    "more than it can hold": idx(ARRAY, claim=(2**31, 2**31)),
    "claims 4,294,967,296": idx(ARRAY, claim=(2**16, 2**16)),
    "cut short: 24 of 28": idx(ARRAY, claim=(4, 7)),
    "goes on after the 20": idx(ARRAY, claim=(4, 5)),
    "cut short: 23 of 24": WHOLE[:-1],
    "type 0x0d in 2 dimensions": idx(ARRAY, kind=13),
    "in 0 dimensions": b"\0\0\x08\0",
    "two zero bytes": b"\1" + WHOLE[1:],
    "damaged": WHOLE[:9],
    "no IDX file": b"",
}


@pytest.mark.parametrize("message", FALSE)
def test_a_false_idx_file_is_refused(message, tmp_path):
    for pack in (gzip.compress, bytes):
        path = tmp_path / "f"
        path.write_bytes(pack(WHOLE))
        np.testing.assert_array_equal(read_idx(path), ARRAY)
        path.write_bytes(pack(FALSE[message]))
        loose = message.startswith(("cut", "claims", "more")) and pack is bytes
        expected = "cut short|more than it can hold" if loose else message
        with pytest.raises(FileError, match=f"^{path}: .*({expected})"):
            read_idx(path)


def test_a_torn_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(WHOLE)
    for torn in (packed[:-1], packed[:-9], packed[:12], packed[:5], packed[:-8] + bytes(8)):
        (tmp_path / "f.gz").write_bytes(torn)
        with pytest.raises(FileError):
            read_idx(tmp_path / "f.gz")
    with pytest.raises(FileError, match="no such file"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(FileError, match="cannot be read"):
        read_idx(tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_tables_of_images(kind, tmp_path):
    read = read_cifar(cifar_tables(tmp_path, DATA, kind))
    assert read.fingerprint() == DATA.fingerprint()
    assert read.names == tuple(f"f{n}" for n in range(10))
    coarse = read_cifar(tmp_path, coarse=True)
    np.testing.assert_array_equal(coarse.y_test, DATA.y_test // 5)
    assert coarse.names == ("c0", "c1")
    (tmp_path / "names.json").unlink()
    assert read_cifar(tmp_path).names == ()


def chunk(kind, content):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def lying_png(width, height, content=b"\0" * 99):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    made = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + made


PIXELS = DATA.x[0]
IMAGES = {
    "bomb": lying_png(100_000, 100_000),
    "too little": lying_png(32, 32),
    "no pixels": lying_png(0, 0),
    "cut": encoded(PIXELS)[:-40],
    "grey": encoded(PIXELS[..., 0]),
    "large": encoded(np.zeros((33, 32, 3), np.uint8)),
    "jpeg": encoded(PIXELS, "JPEG"),
    "words": b"hello",
    "nothing": b"",
    "missing": None,
}


@pytest.mark.parametrize("why", IMAGES)
def test_a_lying_image_is_refused(why, tmp_path):
    row = {"bytes": IMAGES[why], "path": None}
    cifar_tables(tmp_path, DATA, change=lambda t: t | {"img": [*t["img"][1:], row]})
    with pytest.raises(FileError, match=f"^{tmp_path}: "):
        read_cifar(tmp_path)


TABLES = {
    "no column 'img'": lambda t: {"image": t["img"], "fine_label": t["fine_label"]},
    "no column 'fine_label'": lambda t: {"img": t["img"], "label": t["fine_label"]},
    "whole numbers": lambda t: t | {"fine_label": [0.5] * len(t["img"])},
    "a label is 10": lambda t: t | {"fine_label": [10] * len(t["img"])},
    "number the classes": lambda t: t | {"fine_label": [-1] * len(t["img"])},
    "a row holds no image": lambda t: t | {"img": ["a.png"] * len(t["img"])},
    "a row holds no image, or": lambda t: t | {"img": [{"bytes": 7}] * len(t["img"])},
    "holds no images": lambda t: {key: column[:0] for key, column in t.items()},
}


@pytest.mark.parametrize("message", TABLES)
def test_a_bad_table_is_refused(message, tmp_path):
    cifar_tables(tmp_path, DATA, change=TABLES[message])
    with pytest.raises(FileError, match=message):
        read_cifar(tmp_path)


@pytest.mark.parametrize("names", ["[]", "{}", json.dumps({"fine_label": list(range(10))})])
def test_bad_names_are_refused(names, tmp_path):
    cifar_tables(tmp_path, DATA)
    (tmp_path / "names.json").write_text(names)
    with pytest.raises(FileError, match="has no list fine_label"):
        read_cifar(tmp_path)


@pytest.fixture
def photos(tmp_path):
    """Three classes, one of them without test images, and things that are no images."""
    root = tmp_path / "photos"
    for split, classes in (("train", "abc"), ("val", "ab")):
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(2):
                pixels = np.full((6, 9, 3), 10 * number + k, np.uint8)
                Image.fromarray(pixels).save(folder / f"{k}.{'PNG' if k else 'jpeg'}")
            (folder / "notes.txt").write_text("no image")
            (folder / ".hidden.png").write_text("no image")
    (root / "train" / "readme.md").write_text("no class")
    (root / "train" / ".thumbnails").mkdir()
    return root


def test_a_folder_is_listed_and_decoded_when_needed(photos):
    source = of_folder(photos)
    train, test = source.splits["train"], source.splits["test"]
    assert source.names == ("a", "b", "c")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.labels.tolist() == [0, 0, 1, 1]
    assert [os.path.relpath(p, photos) for p in train.items[:3]] == [
        "train/a/0.jpeg", "train/a/1.PNG", "train/b/0.jpeg",
    ]  # fmt: skip
    middles = [int(square(5)(decode(path))[0, 2, 2]) for path in train.items]
    assert np.abs(np.subtract(middles, [0, 1, 10, 11, 20, 21])).max() <= 2  # JPEG rounds


def test_grey_and_transparent_images_become_colour(tmp_path):
    for mode in ("L", "RGBA", "P", "1"):
        Image.new(mode, (4, 3)).save(tmp_path / f"{mode}.png")
        assert decode(tmp_path / f"{mode}.png").mode == "RGB"


def test_a_corrupt_image_is_named(photos):
    bad = photos / "train" / "b" / "1.PNG"
    for content in (b"hello", b"", bad.read_bytes()[:-30], lying_png(10**5, 10**5)):
        bad.write_bytes(content)
        with pytest.raises(FileError, match=f"^{bad}: "):
            [decode(path) for path in of_folder(photos).splits["train"].items]


def test_links_that_lead_nowhere_are_passed_over(photos):
    (photos / "train" / "loop").symlink_to("loop")
    (photos / "train" / "a" / "self.png").symlink_to("self.png")
    (photos / "train" / "a" / "gone.png").symlink_to("nowhere.png")
    (photos / "train" / "c" / "up").symlink_to(photos, target_is_directory=True)
    assert len(of_folder(photos).splits["train"].items) == 6
    assert of_folder(photos).names == ("a", "b", "c")


def test_what_is_no_folder_of_images(photos, tmp_path):
    (photos / "val" / "zebra").mkdir()
    with pytest.raises(FileError, match="class 'zebra' that train has not"):
        of_folder(photos)
    with pytest.raises(FileError, match="no folders train and test"):
        of_folder(photos / "train")
    with pytest.raises(FissileError, match="nowhere is no folder"):
        of_folder(tmp_path / "nowhere")
    for part in ("train/a", "train/b", "test"):
        (tmp_path / "bare" / part).mkdir(parents=True)
    with pytest.raises(FileError, match="train holds no images"):
        of_folder(tmp_path / "bare")
    (tmp_path / "bare" / "train" / "a").rmdir()
    with pytest.raises(FileError, match="fewer than two folders"):
        of_folder(tmp_path / "bare")
