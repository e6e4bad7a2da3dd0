"""Where data sets are looked for.

>>> places(Path("my-data"))[0]
PosixPath('my-data')
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SYSTEM", "Layout", "cache", "places"]

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages of data sets put them


@dataclass(frozen=True)
class Layout:
    """A file, or a folder with certain files, that a data set may lie in.

    >>> Layout("cifar100", ("train-*.parquet", "test-*.parquet")).find(Path("my-data"))
    PosixPath('my-data/cifar100')
    """

    path: str
    inside: tuple[str, ...] = ()  # patterns; one that ends in [.gz] is of files packed or not

    def find(self, place: Path) -> Path | None:
        """Its path if it is in that place; nothing is opened."""
        path = place / self.path
        try:
            there = all(map(any, self._matches(path))) if self.inside else path.is_file()
        except (OSError, ValueError):  # not ours to read, or no name a disk can have
            return None
        return path if there else None

    def within(self, path: Path) -> list[Path]:
        """The files of its folder, where it was found."""
        return [file for files in self._matches(path) for file in files]

    def _matches(self, path: Path) -> list[list[Path]]:
        """What matches each pattern."""
        return [[file for way in _ways(p) for file in path.glob(way)] for p in self.inside]

    def __str__(self) -> str:
        return f"{self.path}/{{{', '.join(self.inside)}}}" if self.inside else self.path


def _ways(pattern: str) -> list[str]:
    name = pattern.removesuffix("[.gz]")
    return [name] if name == pattern else [name, f"{name}.gz"]


def places(data: Path | None = None) -> list[Path]:
    """The folders to look in, first to last: the one given, ``FISSILE_DATA``, cache, system.

    >>> os.environ["FISSILE_DATA"] = "/mnt/data"
    >>> places()
    [PosixPath('/mnt/data'), PosixPath('/home/me/.cache/fissile/data'), ...]
    """
    named = [Path(part) for part in os.environ.get("FISSILE_DATA", "").split(os.pathsep) if part]
    found = [*([] if data is None else [Path(data)]), *named, cache(), SYSTEM]
    return list(dict.fromkeys(found))


def cache() -> Path:
    """The folder that downloads go to, where this platform keeps such things.

    >>> cache()
    PosixPath('/home/me/.cache/fissile/data')
    """
    home = Path.home()
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = home / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return root / "fissile" / "data"
