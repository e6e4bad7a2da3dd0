"""What can be encoded: a folder of images, or a set of images or texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import open_regular, reading
from fissile.data.catalogue import ENTRIES, load, load_texts
from fissile.data.sets import Labelled
from fissile.data.text import Texts

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_PIXELS = 50_000_000  # of one image; a small file can claim many more
_TEST = ("test", "val", "validation")  # the first that is there


@dataclass(frozen=True)
class Split:
    """Things to encode and their labels."""

    items: Sequence[Any] | NDArray[Any]
    labels: NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A training and a test set of images or texts."""

    name: str
    kind: str  # "images" or "text"
    splits: Mapping[str, Split]  # under "train" and "test"
    names: tuple[str, ...]  # of the classes
    open: Callable[[Any], Any]  # makes of an item what an encoder takes; called in threads
    key: str  # a short text that another content would change


def source(what: str | os.PathLike[str], data: str | os.PathLike[str] | None = None) -> Source:
    """Return a folder of images, or a set of images or texts of the catalogue.

    >>> source("imagenet100/").kind
    'images'
    """
    name, place = str(what), None if data is None else Path(data)
    if name not in ENTRIES:
        return of_folder(what)
    if ENTRIES[name].kind == "text":
        return of_texts(name, load_texts(name, place))
    if (kind := ENTRIES[name].kind) in ("features", "characters"):
        raise FissileError(f"{name} is {kind} already; give a set of images or texts")
    return of_images(name, load(name, place))


def of_images(name: str, data: Labelled) -> Source:
    """Return a set of images that are in memory or mapped."""
    if data.x.dtype != np.uint8:
        raise FissileError(f"{name} holds {data.x.dtype}, not images; give images of uint8")
    splits = {"train": Split(data.x, data.y), "test": Split(data.x_test, data.y_test)}
    return Source(name, "images", splits, data.names, _image, data.fingerprint())


def of_texts(name: str, texts: Texts) -> Source:
    """Return a set of texts."""
    splits = {"train": Split(texts.train, texts.y), "test": Split(texts.test, texts.y_test)}
    return Source(name, "text", splits, texts.names, str, texts.fingerprint())


def of_folder(root: str | os.PathLike[str]) -> Source:
    """Return a folder of images, train/CLASS/… and val/CLASS/… or test/CLASS/….

    >>> of_folder("imagenet").splits["train"].items[0]
    'imagenet/train/n01440764/n01440764_10026.JPEG'
    """
    root = Path(root)
    if not root.is_dir():
        known = [name for name, entry in ENTRIES.items() if entry.kind in ("images", "text")]
        raise FissileError(
            f"{root} is no folder, nor a set of images or texts; give a folder with train/CLASS "
            f"and val/CLASS, or one of: {', '.join(known)}"
        )
    with reading(root):
        test = next((name for name in _TEST if (root / name).is_dir()), None)
        if not (root / "train").is_dir() or test is None:
            raise FileError("it has no folders train and test (or val); give its parent")
        names = tuple(_folders(root / "train"))
        if strange := [name for name in names if not name.isprintable()]:
            raise FileError(f"the class {strange[0]!r} is no plain text; rename its folder")
        if len(names) < 2:
            raise FileError("train has fewer than two folders; give one folder per class")
        if unknown := set(_folders(root / test)) - set(names):
            raise FileError(f"{test} has the class {min(unknown)!r} that train has not")
        splits = {"train": _split(root / "train", names), "test": _split(root / test, names)}
        key = _fingerprint(root, splits)
    return Source(root.resolve().name, "images", splits, names, decode, key)


def decode(path: str | os.PathLike[str]) -> Image:
    """Read one image as RGB."""
    needs("PIL", "data")
    from PIL import Image

    with reading(path), open_regular(path) as file, Image.open(file, formats=_FORMATS) as image:
        if image.width * image.height > _PIXELS:
            raise FileError(f"it has more than {_PIXELS:,} pixels; make it smaller")
        return _eight_bits(image).convert("RGB")


# --- helpers


def _image(pixels: NDArray[np.uint8]) -> Image:
    """Return one image of an array, grey or in colour, in colour, as encoders expect it."""
    needs("PIL", "data")
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Bring grey of 16 bits to 8, which Pillow would clip: almost all would come out white."""
    from PIL import Image

    # Up to Pillow's version 10 a PNG of 16 bits has the mode I, as a PGM has to this day.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise FileError("it has 32 bits a pixel, of unknown range; save it with 8 or 16")
    return image


def _folders(path: Path) -> list[str]:
    # One level and no deeper: no chain of links can lead in a circle.
    return sorted(name for name in next(os.walk(path))[1] if name[0] != ".")


def _split(path: Path, names: tuple[str, ...]) -> Split:
    """List the images of a split; a class may have none to test on."""
    paths: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        images = _images(path / name) if (path / name).is_dir() else []
        paths += images
        labels += [number] * len(images)
    if not paths:
        raise FileError(f"{path.name} holds no images; they end in {', '.join(_SUFFIXES)}")
    return Split(paths, np.array(labels, dtype=np.int64))


def _images(folder: Path) -> list[str]:
    paths = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(_SUFFIXES) and entry.name[0] != ".":
                with suppress(OSError):  # a link that leads to itself
                    paths += [entry.path] * entry.is_file()
    return sorted(paths)


def _fingerprint(root: Path, splits: Mapping[str, Split]) -> str:
    """Return a short text that other names, labels, sizes or times of the files would change."""
    digest = hashlib.blake2b(digest_size=8)
    for split in splits.values():
        digest.update(split.labels.tobytes())
        for path in split.items:
            # To read every image would take as long as to encode it.
            stat = os.stat(path)
            digest.update(os.fsencode(os.path.relpath(path, root)))
            digest.update(b"\0%d %d\0" % (stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()
