"""The rows that are finished, in a folder beside the target, so that nothing is encoded twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile._common.files import atomic_write, read_bounded


class Part:
    """A working folder: the rows of each split in a file, and a note of how many are finished.

    >>> part = Part(Path("features.npz.part"), what, {"train": (50000, 512)}, "float16")
    >>> part.append("train", rows)  # on the disk when this returns
    >>> part.done["train"]
    256

    ``what`` is everything that decides the rows. A folder that was begun with another one is left
    alone and refused.
    """

    def __init__(
        self,
        folder: Path,
        what: Mapping[str, object],
        shapes: Mapping[str, tuple[int, int]],
        dtype: str,
    ) -> None:
        self.folder, self.dtype, self._shapes = folder, np.dtype(dtype), shapes
        self._what = {**what, "dtype": dtype, "shapes": {k: list(v) for k, v in shapes.items()}}
        self.done = dict.fromkeys(shapes, 0)
        self.done = self._read()
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            for split, count in self.done.items():
                if not count:
                    self._path(split).write_bytes(b"")
            self._note(self.done)

    def append(self, split: str, rows: NDArray[Any]) -> None:
        """Add finished rows: first they are on the disk, then they count."""
        # Not through a mapping: on a full disk that would crash instead of raising an error.
        with self._writing():
            with open(self._path(split), "r+b") as file:
                # What a crash left behind it is written over.
                file.seek(self._bytes(split, self.done[split]))
                file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
                file.flush()
                os.fsync(file.fileno())
            done = self.done | {split: self.done[split] + len(rows)}
            self._note(done)
            self.done = done

    def rows(self, split: str) -> NDArray[Any]:
        """Return all rows of a split, mapped from the disk."""
        return np.memmap(self._path(split), self.dtype, "r", shape=self._shapes[split])

    def derived(
        self, name: str, shape: tuple[int, int], dtype: str, pieces: Iterable[NDArray[Any]]
    ) -> NDArray[Any]:
        """Write what is made of finished rows, piece by piece, and return it mapped."""
        with self._writing(), open(self._path(name), "wb") as file:
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, dtype=dtype).data)
        return np.memmap(self._path(name), dtype, "r", shape=shape)

    @property
    def complete(self) -> bool:
        """Whether all rows are finished."""
        return all(self.done[split] == count for split, (count, _) in self._shapes.items())

    def remove(self) -> None:
        """Delete the folder; nothing of it may be mapped any more."""
        with suppress(OSError):
            # The note first: if this is interrupted, no row counts that is no longer there.
            (self.folder / "about.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, split: str) -> Path:
        return self.folder / f"{split}.rows"

    def _bytes(self, split: str, rows: int) -> int:
        return rows * self._shapes[split][1] * self.dtype.itemsize

    def _read(self) -> dict[str, int]:
        """Return how many rows are finished, or refuse rows of something else."""
        try:
            about = json.loads(read_bounded(self.folder / "about.json", 2**20))
            what, done = dict(about["what"]), {k: int(about["done"][k]) for k in about["done"]}
        except FileNotFoundError:
            return self.done
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise FileError(f"{self.folder} is damaged: {error}; remove it to begin anew") from None
        if not any(done.values()):
            return self.done
        changed = [name for name, new in self._what.items() if what.get(name) != new]
        changes = [f"{name} was {what.get(name)!r} and is {self._what[name]!r}" for name in changed]
        if not changes:
            sizes = {path.stem: path.stat().st_size for path in self.folder.glob("*.rows")}
            if all(sizes.get(split, -1) >= self._bytes(split, done[split]) for split in done):
                return done
            changes = ["its files are not as long as they should be"]
        raise FileError(
            f"{self.folder} holds {sum(done.values()):,} rows of something else: "
            f"{', '.join(changes)}; give what it was begun with to go on, another target, or "
            "remove the folder to begin anew"
        )

    def _note(self, done: dict[str, int]) -> None:
        with atomic_write(self.folder / "about.json", "w") as file:
            json.dump({"what": self._what, "done": done}, file, indent=1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, FileError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            rows = sum(self.done.values())
            advice = f"the {rows:,} finished rows stay there: make room, and the same call goes on"
            raise FileError(
                f"could not write to {self.folder}: {reason}; "
                + (advice if rows else "give a target elsewhere, or make room")
            ) from None
