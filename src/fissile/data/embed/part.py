"""The rows that are finished, in a folder beside the target, so that nothing is encoded twice."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError
from fissile.data.disk import replacing

__all__ = ["Part", "sweep"]


class Part:
    """A working folder: rows of each split in a plain .npy file, and how many are finished.

    >>> with Part(Path("features.npz.part"), what, {"train": (50000, 512)}, "float16") as part:
    ...     part.append("train", rows)  # on the disk when this returns
    ...     part.done["train"]

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
        self.folder = folder
        self._what = dict(what) | {
            "dtype": dtype,
            "shapes": {k: list(v) for k, v in shapes.items()},
        }
        self._shapes, self.dtype = dict(shapes), np.dtype(dtype)
        self._files: dict[str, BinaryIO] = {}
        self.done = dict.fromkeys(shapes, 0)

    def __enter__(self) -> Part:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "ab")
        try:
            _hold(self._lock, self.folder)
            self.done = self._read()
            with self._writing():
                for split in self._shapes:
                    self._files[split] = self._open(split)
                self._note(self.done)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; they stay."""
        self._close_rows()
        self._lock.close()

    def _close_rows(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # what a full disk did not take does not count
                file.close()

    def append(self, split: str, rows: NDArray[Any]) -> None:
        """Add finished rows: first they are on the disk, then they count."""
        file = self._files[split]
        with self._writing():
            file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
            file.flush()
            os.fsync(file.fileno())
            done = self.done | {split: self.done[split] + len(rows)}
            self._note(done)
            self.done = done

    def rows(self, split: str) -> NDArray[Any]:
        """Return all rows of a split, mapped from the disk."""
        found: NDArray[Any] = np.load(self._path(split), mmap_mode="r", allow_pickle=False)
        return found

    @property
    def complete(self) -> bool:
        """Tell whether all rows are finished."""
        return all(self.done[split] == count for split, (count, _) in self._shapes.items())

    def derived(
        self, name: str, shape: tuple[int, int], dtype: str, pieces: Iterable[NDArray[Any]]
    ) -> NDArray[Any]:
        """Write what is made of finished rows, piece by piece, and return it mapped."""
        with self._writing(), open(self._path(name), "wb") as file:
            file.write(_header(shape, np.dtype(dtype)))
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, dtype=dtype).data)
        return self.rows(name)

    def remove(self) -> None:
        """Delete the folder: what it was for is done. Nothing of it may be mapped any more."""
        self._close_rows()
        if os.name == "nt":  # where nothing is locked, and what is open cannot be moved
            self._lock.close()
        # In one go it is no longer a part: killed half-way, it must not look like a beginning.
        sweep(self.folder)
        with suppress(OSError):
            os.rename(self.folder, _hidden(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        sweep(self.folder)
        self._lock.close()

    def _path(self, split: str) -> Path:
        return self.folder / f"{split}.npy"

    def _read(self) -> dict[str, int]:
        """Return how many rows are finished, or refuse rows of something else."""
        try:
            about = json.loads((self.folder / "about.json").read_text(encoding="utf-8"))
            what, done = dict(about["what"]), {k: int(about["done"][k]) for k in about["done"]}
        except FileNotFoundError:
            return dict.fromkeys(self._shapes, 0)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise FileError(f"{self.folder} is damaged: {error}; remove it to begin anew") from None
        if what == self._what and self._plausible(done):
            return done
        if not any(done.values()):
            return dict.fromkeys(self._shapes, 0)
        raise FileError(
            f"{self.folder} holds {sum(done.values()):,} rows of something else: "
            f"{_difference(what, self._what)}; give what it was begun with to go on, another "
            "target, or remove the folder to begin anew"
        )

    def _plausible(self, done: dict[str, int]) -> bool:
        """Say whether the rows that count are there."""
        return all(
            split in done
            and 0 <= done[split] <= count
            and (not done[split] or _size(self._path(split)) >= self._end(split, done[split]))
            for split, (count, _) in self._shapes.items()
        )

    def _end(self, split: str, rows: int) -> int:
        shape = self._shapes[split]
        return len(_header(shape, self.dtype)) + rows * shape[1] * self.dtype.itemsize

    def _open(self, split: str) -> BinaryIO:
        """Open a split's file behind its last finished row; what a crash left after it goes."""
        fresh = not self.done[split]
        file = open(self._path(split), "wb" if fresh else "r+b")  # noqa: SIM115
        if fresh:
            file.write(_header(self._shapes[split], self.dtype))
        # Written like any file, not through a mapping: there a full disk is a crash, no error.
        file.truncate(self._end(split, self.done[split]))
        file.seek(0, os.SEEK_END)
        return file

    def _note(self, done: dict[str, int]) -> None:
        with replacing(self.folder / "about.json") as beside:
            text = json.dumps({"what": self._what, "done": done}, indent=1)
            beside.write_text(text, encoding="utf-8")

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


def sweep(folder: Path) -> None:
    """Delete what is left of a part whose end was interrupted.

    >>> sweep(Path("features.npz.part"))
    """
    shutil.rmtree(_hidden(folder), ignore_errors=True)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.done")


def _header(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """Return how a .npy file begins."""
    descr = np.lib.format.dtype_to_descr(dtype)
    about = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream := io.BytesIO(), about)
    return stream.getvalue()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say in which settings two runs differ."""
    names = [name for name in new if old.get(name) != new[name]]
    changes = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in names]
    return ", ".join(changes) or "its files are not as long as they should be"


def _hold(lock: Any, folder: Path) -> None:
    """Keep other processes out, for as long as the file is open and this process lives."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have moved the folder away after the file was opened.
        ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / "lock"))
    except OSError:
        ours = False
    if not ours:
        raise FileError(f"another process works in {folder}; wait for it, or give another target")
