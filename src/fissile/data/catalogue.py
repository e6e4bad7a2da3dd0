"""Finding and loading the data sets fissile knows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fissile._common.errors import FileError, FissileError, needs
from fissile.data.entries import ENTRIES, Entry
from fissile.data.sets import Labelled
from fissile.data.text import Texts

__all__ = ["ENTRIES", "entry", "find", "load", "load_texts", "places"]

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages of data sets put them


@dataclass(frozen=True)
class Found:
    """A data set and where it lies; nowhere if it is made from a seed."""

    entry: Entry
    path: Path | None

    def files(self) -> list[Path]:
        """Return its files."""
        if self.path is None or self.path.is_file():
            return [] if self.path is None else [self.path]
        return sorted({file for layout in self.entry.files for file in layout.within(self.path)})


def places(data: Path | None = None) -> list[Path]:
    """Return the folders to look in: the one given, ``FISSILE_DATA``, cache, system.

    >>> os.environ["FISSILE_DATA"] = "/mnt/data"
    >>> places()
    [PosixPath('/mnt/data'), PosixPath('/home/me/.cache/fissile/data'), ...]
    """
    needs("platformdirs", "data")
    from platformdirs import user_cache_path

    given = [] if data is None else [Path(data)]
    named = [Path(part) for part in os.environ.get("FISSILE_DATA", "").split(os.pathsep) if part]
    cache = user_cache_path("fissile", appauthor=False, opinion=False) / "data"
    return list(dict.fromkeys([*given, *named, cache, SYSTEM]))


def entry(name: str) -> Entry:
    """Return what is known of a data set."""
    if name not in ENTRIES:
        raise FissileError(f"there is no data set {name!r}; give one of: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def find(name: str, data: Path | None = None) -> Found | None:
    """Return a data set and where it lies, without opening it, or None.

    >>> find("fashionmnist").path
    PosixPath('/usr/share/datasets/fashion-mnist')
    """
    known = entry(name)
    if known.make is not None:
        return Found(known, None)
    paths = (layout.find(place) for place in places(data) for layout in known.files)
    return next((Found(known, path) for path in paths if path is not None), None)


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
