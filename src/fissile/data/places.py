"""Where data sets are looked for.

>>> places(Path("my-data"))[0]
PosixPath('my-data')
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fissile._common.errors import needs

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
        """Return its path if it is in that place; nothing is opened."""
        path = place / self.path
        try:
            there = all(map(any, self._matches(path))) if self.inside else path.is_file()
        except (OSError, ValueError):  # not ours to read, or no name a disk can have
            return None
        return path if there else None

    def within(self, path: Path) -> list[Path]:
        """Return the files of its folder, where it was found."""
        return [file for files in self._matches(path) for file in files]

    def _matches(self, path: Path) -> list[list[Path]]:
        """Return the files that match each pattern."""
        patterns = [(p.removesuffix("[.gz]"), p.replace("[.gz]", ".gz")) for p in self.inside]
        return [[f for name in dict.fromkeys(p) for f in path.glob(name)] for p in patterns]

    def __str__(self) -> str:
        return f"{self.path}/{{{', '.join(self.inside)}}}" if self.inside else self.path


def places(data: Path | None = None) -> list[Path]:
    """Return the folders to look in: the one given, ``FISSILE_DATA``, cache, system.

    >>> os.environ["FISSILE_DATA"] = "/mnt/data"
    >>> places()
    [PosixPath('/mnt/data'), PosixPath('/home/me/.cache/fissile/data'), ...]
    """
    named = [Path(part) for part in os.environ.get("FISSILE_DATA", "").split(os.pathsep) if part]
    given = [] if data is None else [Path(data)]
    return list(dict.fromkeys([*given, *named, cache(), SYSTEM]))


def cache() -> Path:
    """Return the folder that downloads go to, where this platform keeps such things.

    >>> cache()
    PosixPath('/home/me/.cache/fissile/data')
    """
    needs("platformdirs", "data")
    from platformdirs import user_cache_path

    return user_cache_path("fissile", appauthor=False, opinion=False) / "data"
