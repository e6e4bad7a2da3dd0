"""What can be encoded: a folder of images, or a set of images or texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FissileError, needs
from fissile.data.catalogue import load, load_texts
from fissile.data.disk import reading
from fissile.data.entries import ENTRIES
from fissile.data.folder import ImageFolder, decode
from fissile.data.sets import Labelled
from fissile.data.text import Texts

__all__ = ["Source", "Split", "of_folder", "of_images", "of_texts", "source"]


@dataclass(frozen=True)
class Split:
    """Things to encode and their labels."""

    items: Sequence[Any] | NDArray[Any]
    labels: NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A training and a test set of images or texts.

    >>> source("clinc150").splits["train"].items[0]
    'what expression would i use to say i love you if i were an italian'

    Args:
        name: what the set is called.
        kind: "images" or "text".
        splits: under "train" and "test", what there is.
        names: of the classes.
        open: makes of an item the image or text that an encoder takes; called in threads.
        key: a short text that another content would change.
    """

    name: str
    kind: str
    splits: Mapping[str, Split]
    names: tuple[str, ...]
    open: Callable[[Any], Any]
    key: str


def source(what: str | os.PathLike[str], data: str | os.PathLike[str] | None = None) -> Source:
    """Find a folder of images, or a set of images or texts of the catalogue.

    >>> source("imagenet100/").kind
    'images'
    """
    name, place = str(what), None if data is None else Path(data)
    if name not in ENTRIES:
        return of_folder(what)
    if ENTRIES[name].kind == "text":
        return of_texts(name, load_texts(name, place))
    if ENTRIES[name].kind == "features":
        raise FissileError(f"{name} is features already; give a set of images or texts")
    return of_images(name, load(name, place))


def of_folder(root: str | os.PathLike[str]) -> Source:
    """Return a folder of images, train/CLASS/… and val/CLASS/… or test/CLASS/….

    >>> of_folder("imagenet").splits["train"].items[0]
    'imagenet/train/n01440764/n01440764_10026.JPEG'
    """
    if not Path(root).is_dir():
        known = [name for name, entry in ENTRIES.items() if entry.kind in ("images", "text")]
        raise FissileError(
            f"{root} is no folder, nor a set of images or texts; give a folder with train/CLASS "
            f"and val/CLASS, or one of: {', '.join(known)}"
        )
    found = ImageFolder.open(root)
    splits = {name: Split(each.paths, each.labels) for name, each in found.splits.items()}
    name = Path(root).resolve().name
    return Source(name, "images", splits, found.names, decode, _fingerprint(root, splits))


def _fingerprint(root: str | os.PathLike[str], splits: Mapping[str, Split]) -> str:
    """Return a short text that other names, labels, sizes or times of the files would change."""
    digest = hashlib.blake2b(digest_size=8)
    with reading(root):
        for split in splits.values():
            digest.update(split.labels.tobytes())
            for path in split.items:
                # To read every image would take as long as to encode it.
                stat = os.stat(path)
                digest.update(os.fsencode(os.path.relpath(path, root)))
                digest.update(b"\0%d %d\0" % (stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


def of_images(name: str, data: Labelled) -> Source:
    """Return a set of images that are in memory or mapped.

    >>> of_images("cifar100", Labelled(x, y, x_test, y_test))
    """
    if data.x.dtype != np.uint8:
        raise FissileError(f"{name} holds {data.x.dtype}, not images; give images of uint8")
    splits = {"train": Split(data.x, data.y), "test": Split(data.x_test, data.y_test)}
    return Source(name, "images", splits, data.names, _image, data.fingerprint())


def of_texts(name: str, texts: Texts) -> Source:
    """Return a set of texts.

    >>> of_texts("clinc150", read_clinc(path))
    """
    splits = {"train": Split(texts.train, texts.y), "test": Split(texts.test, texts.y_test)}
    return Source(name, "text", splits, texts.names, str, texts.fingerprint())


def _image(pixels: NDArray[np.uint8]) -> Any:
    """Return one image of an array, grey or in colour, in colour, as encoders expect it."""
    needs("PIL", "data")
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
