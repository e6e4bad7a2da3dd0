"""Finding and loading the data sets fissile knows.

>>> data = load("fashionmnist")
>>> data.x.shape, data.classes
((60000, 28, 28), 10)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fissile._common.errors import FileError, FissileError
from fissile.data.entries import ENTRIES, Entry
from fissile.data.places import places
from fissile.data.sets import Labelled
from fissile.data.text import Texts

__all__ = ["ENTRIES", "Entry", "Found", "entry", "find", "load", "load_texts", "places"]


@dataclass(frozen=True)
class Found:
    """A data set and where it lies; nowhere if it is made from a seed.

    >>> find("fashionmnist").path
    PosixPath('/usr/share/datasets/fashion-mnist')
    """

    entry: Entry
    path: Path | None


def entry(name: str) -> Entry:
    """What is known of a data set.

    >>> entry("fashionmnist").train
    60000
    """
    if name not in ENTRIES:
        raise FissileError(f"there is no data set {name!r}; give one of: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def find(name: str, data: Path | None = None) -> Found | None:
    """Where a data set lies, without opening it, or None.

    >>> find("imagenet1k-clip", Path("my-data"))
    """
    known = entry(name)
    if known.make is not None:
        return Found(known, None)
    for place in places(data):
        for layout in known.files:
            if (path := layout.find(place)) is not None:
                return Found(known, path)
    return None


def load(name: str, data: Path | None = None) -> Labelled:
    """Load a data set of images or features; large features are mapped, not read.

    >>> load("generated").x.shape
    (2000, 64)
    """
    known = entry(name)
    if known.make is not None:
        return known.make()
    if known.read is None:
        raise FissileError(f"{name} holds texts; embed them first, or use load_texts")
    path = _path(name, data)
    found = known.read(path)
    if found.x.shape[1:] != known.shape or found.classes > known.classes:
        raise FileError(
            f"{path}: holds {found.classes} classes of samples of shape {found.x.shape[1:]}, and "
            f"{name} has {known.classes} of {known.shape}; give its file another name"
        )
    return replace(found, encoder=found.encoder or known.encoder)


def load_texts(name: str, data: Path | None = None) -> Texts:
    """Load a data set of texts.

    >>> load_texts("banking77").train[0]
    'I am still waiting on my card?'
    """
    known = entry(name)
    if known.read_texts is None:
        raise FissileError(f"{name} holds no texts; use load")
    return known.read_texts(_path(name, data))


def _path(name: str, data: Path | None) -> Path:
    if (found := find(name, data)) is not None and found.path is not None:
        return found.path
    known = entry(name)
    raise FissileError(
        f"{name} is not here: looked for {', '.join(map(str, known.files))} in "
        f"{', '.join(map(str, places(data)))}. To get it: {known.get}. "
        "If you have it, give its folder with --data or FISSILE_DATA"
    )
