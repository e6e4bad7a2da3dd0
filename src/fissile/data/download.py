"""Downloading a file: in pieces that survive interruption, checked, and there whole or not at all.

>>> download("https://example.org/train.csv", Path("train.csv"))
PosixPath('train.csv')
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from fissile._common.errors import FileError, FissileError
from fissile.data.check import checksum

__all__ = ["Progress", "download"]

Progress = Callable[[int, int | None], None]  # bytes so far, and in all if that is known

_PIECE = 2**18
_PATIENCE = 30  # seconds without a byte
_MOST = 2**36  # bytes; nothing in the catalogue is near
_BUSY = "{}: another process is downloading this; wait for it"
_CUT = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class _Version:
    """Which file a part belongs to: the same address may later hold another."""

    url: str
    size: int | None
    etag: str
    modified: str


def download(
    url: str,
    to: Path,
    *,
    md5: str = "",
    progress: Progress = lambda done, total: None,
    most: int = _MOST,
    anew: bool = False,
) -> Path:
    """Download a file; what an earlier try left in ``.part`` is kept if the server allows.

    >>> download("https://example.org/a.tar.gz", Path("a.tar.gz"), md5="9e107d9d372bb6826bd8...")
    PosixPath('a.tar.gz')

    A file that is there stays, unless its md5 is wrong or it is wanted `anew`; then it stays until
    the new one is whole.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise FissileError(f"{url} is no web address; give one that begins with http or https")
    part, note = _beside(to)
    try:
        if not anew and _is_there(to, md5):
            return to
        to.parent.mkdir(parents=True, exist_ok=True)
        with _held(part, note):
            if not anew and _is_there(to, md5):  # another process was quicker
                return to
            _fetch(url, part, note, progress, most)
            if md5 and (found := checksum(part)) != md5:
                _forget(part, note)
                raise FileError(
                    f"{url}: its md5 is {found}, not {md5}: damaged on the way or changed by its "
                    "source; try again, or get it by hand"
                )
            os.replace(part, to)
            note.unlink(missing_ok=True)
    except _CUT as error:
        raise FileError(f"{url}: {_why(error)}") from None
    except OSError as error:
        raise FileError(
            f"cannot write {part}: {error.strerror or error}; make room or give another folder, "
            "and try again, it goes on from there"
        ) from None
    return to


def _beside(to: Path) -> tuple[Path, Path]:
    return to.with_name(f"{to.name}.part"), to.with_name(f"{to.name}.part.json")


def _is_there(to: Path, md5: str) -> bool:
    return to.is_file() and (not md5 or checksum(to) == md5)


@contextmanager
def _held(part: Path, note: Path) -> Iterator[None]:
    """Keep other processes out of a part; at the end, one that is empty goes."""
    try:
        import fcntl
    except ImportError:  # Windows, where an open file could not be moved to its place either
        yield
        return
    with open(part, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(_BUSY.format(part)) from None
        except OSError:  # a network drive without locks
            pass
        if not _is_at(file, part):  # whoever held it has just moved it to its place
            raise FileError(_BUSY.format(part))
        try:
            yield
        finally:
            if _is_at(file, part) and not os.fstat(file.fileno()).st_size:
                _forget(part, note)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _fetch(url: str, part: Path, note: Path, progress: Progress, most: int) -> None:
    for _ in range(2):
        if _fetched(url, part, note, progress, most):
            return
        # The rest of another file is of no use: begin again, in the same file, which is locked.
        note.unlink(missing_ok=True)
        part.write_bytes(b"")
    raise FileError(f"{url}: the server sends a part when asked for the whole; get it by hand")


def _fetched(url: str, part: Path, note: Path, progress: Progress, most: int) -> bool:
    """Whether the whole file came; if not, what came is the rest of another."""
    earlier = _noted(note, url)
    start = part.stat().st_size if earlier is not None and part.is_file() else 0
    if start and earlier is not None and start == earlier.size:
        return True
    with _opened(url, start, earlier) as answer:
        version = _version(url, answer)
        if answer.status == 206 and not _goes_on(answer, start, version, earlier):
            return False
        start = start if answer.status == 206 else 0
        if (version.size or 0) > most:
            raise FileError(f"{url} has {version.size:,} bytes, more than {most:,}; refused")
        note.write_text(json.dumps(asdict(version)), encoding="utf-8")
        with open(part, "ab" if start else "wb") as file:
            done = _copy(answer, file, start, version.size, progress, most)
            file.flush()
            os.fsync(file.fileno())
    if version.size is not None and done != version.size:
        raise ConnectionError(f"the connection was cut after {done:,} of {version.size:,} bytes")
    if (size := part.stat().st_size) != done:
        _forget(part, note)
        raise FileError(
            f"{part} has {size:,} bytes, not {done:,}: another program writes to it; try again"
        )
    return True


def _copy(
    answer: Any, file: IO[bytes], done: int, size: int | None, progress: Progress, most: int
) -> int:
    progress(done, size)
    while piece := _piece(answer):
        done += len(piece)
        if done > (most if size is None else size):
            raise FileError("the server sends more than it said, refused; get it by hand")
        file.write(piece)
        progress(done, size)
    return done


def _piece(answer: Any) -> bytes:
    try:
        return bytes(answer.read(_PIECE))
    except OSError as error:  # told apart from a disk that fails
        raise ConnectionError(f"the connection was cut: {error.strerror or error}") from None


def _opened(url: str, start: int, earlier: _Version | None) -> Any:
    headers = {"User-Agent": "fissile", "Accept-Encoding": "identity"}
    if start and earlier is not None:
        headers["Range"] = f"bytes={start}-"
        # A weak tag does not promise the same bytes, and a server must not honour it.
        strong = earlier.etag if not earlier.etag.startswith("W/") else ""
        if same := strong or earlier.modified:
            headers["If-Range"] = same
    request = urllib.request.Request(url, headers=headers)
    try:
        return _OPENER.open(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # nothing lies where the part ends: begin again
            return _opened(url, 0, None)
        raise


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens web addresses and nothing else: no redirect may lead to a file or FTP."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler, urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


_OPENER = _opener()


def _version(url: str, answer: Any) -> _Version:
    size: str | None = answer.headers.get("Content-Length")
    if answer.status == 206:
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    known = int(size) if size is not None and size.isdecimal() and len(size) < 20 else None
    return _Version(
        url, known, answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
    )


def _goes_on(answer: Any, start: int, version: _Version, earlier: _Version | None) -> bool:
    """Whether the answer is the rest of the same file."""
    place: str = answer.headers.get("Content-Range", "")
    return place.startswith(f"bytes {start}-") and version == earlier


def _noted(note: Path, url: str) -> _Version | None:
    """What an earlier try wrote down, if it was about the same address."""
    try:
        found = _Version(**json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    texts = (found.url, found.etag, found.modified)
    good = all(isinstance(text, str) and text.isascii() and text.isprintable() for text in texts)
    return found if good and found.url == url else None


def _forget(part: Path, note: Path) -> None:
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}; try later, or get it by hand"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return f"{why}; see that you are connected and try again, it goes on from where it was"
