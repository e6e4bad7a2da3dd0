"""Image folders: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, listed now and decoded when needed.

>>> images = ImageFolder.open("imagenet")
>>> len(images.splits["train"].paths), images.names[:2]
(1281167, ('n01440764', 'n01443537'))
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, needs
from fissile.data.disk import reading

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolder", "Listing", "decode", "square"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_PIXELS = 50_000_000  # of one image; a small file can claim many more
_TEST = ("test", "val", "validation")  # the first that is there


@dataclass(frozen=True, eq=False)
class Listing:
    """The images of one split; over a million paths are still only text.

    >>> listing = ImageFolder.open("imagenet").splits["test"]
    >>> decode(listing.paths[0]).size
    (500, 375)
    """

    paths: tuple[str, ...]
    labels: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A folder of images in two splits, ``train`` and ``test``, with the same classes.

    >>> ImageFolder.open("imagenet").splits["train"].labels[:3]
    array([0, 0, 0])
    """

    root: Path
    splits: dict[str, Listing]
    names: tuple[str, ...]

    @staticmethod
    def open(root: str | os.PathLike[str]) -> ImageFolder:
        """List a folder; no image is opened yet."""
        root = Path(root)
        with reading(root):
            test = next((name for name in _TEST if (root / name).is_dir()), None)
            if not (root / "train").is_dir() or test is None:
                raise FileError("it has no folders train and test (or val); give its parent")
            names = tuple(sorted(_folders(root / "train")))
            if strange := [name for name in names if not name.isprintable()]:
                raise FileError(f"the class {strange[0]!r} is no plain text; rename its folder")
            if len(names) < 2:
                raise FileError("train has fewer than two folders; give one folder per class")
            if unknown := set(_folders(root / test)) - set(names):
                raise FileError(f"{test} has the class {min(unknown)!r} that train has not")
            splits = {
                "train": _listing(root / "train", names),
                "test": _listing(root / test, names),
            }
        return ImageFolder(root, splits, names)


def decode(path: str | os.PathLike[str]) -> Image:
    """Read one image as RGB.

    >>> decode("imagenet/train/n01440764/n01440764_10026.JPEG").mode
    'RGB'
    """
    needs("PIL", "data")
    from PIL import Image

    with reading(path), Image.open(path, formats=_FORMATS) as image:
        if image.width * image.height > _PIXELS:
            raise FileError(f"it has more than {_PIXELS:,} pixels; make it smaller")
        return _eight_bits(image).convert("RGB")


def square(image: Image, side: int) -> NDArray[np.uint8]:
    """The middle of an image, its shorter side made `side` pixels long.

    >>> square(decode("photo.jpg"), 224).shape
    (224, 224, 3)
    """
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC))


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
    # Two levels and no deeper: no chain of links can lead us in a circle.
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.name[0] != "." and _is(entry.is_dir)]


def _listing(path: Path, names: tuple[str, ...]) -> Listing:
    paths: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        found = _images(path / name)
        paths += found
        labels += [number] * len(found)
    if not paths:
        raise FileError(f"{path.name} holds no images; they end in {', '.join(_SUFFIXES)}")
    return Listing(tuple(paths), np.array(labels, dtype=np.int64), names)


def _images(path: Path) -> list[str]:
    if not path.is_dir():  # a class may have no images to test on
        return []
    with os.scandir(path) as entries:
        return sorted(
            entry.path
            for entry in entries
            if entry.name.lower().endswith(_SUFFIXES)
            and entry.name[0] != "."
            and _is(entry.is_file)
        )


def _is(question: Callable[[], bool]) -> bool:
    """Say no of a link that leads to itself."""
    try:
        return question()
    except OSError:
        return False
