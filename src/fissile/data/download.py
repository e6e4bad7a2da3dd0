"""Downloading a file: in pieces that survive interruption, checked, and there whole or not at all.

By hand, since pooch neither goes on after an interruption nor bounds the size of a file.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fissile._common.errors import FileError, FissileError
from fissile._common.files import locked, open_regular, read_bounded

_PIECE = 2**18
_PATIENCE = 30  # seconds without a byte
_MOST = 2**36  # bytes, where nothing is known of the file
_CUT = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)

_Progress = Callable[[int, int | None], None]  # bytes so far, and in all if that is known
_Version = dict[str, Any]  # url, size, etag, modified: the same address may later hold another file


def download(
    url: str,
    to: Path,
    *,
    md5: str = "",
    most: int = _MOST,
    progress: _Progress = lambda done, total: None,
) -> Path:
    """Download a file; what an earlier try left in ``.part`` is kept if the server allows.

    >>> download("https://example.org/a.tar.gz", Path("a.tar.gz"), md5="9e107d9d372bb6826bd8...")
    PosixPath('a.tar.gz')

    A file that is there stays, unless its md5 is wrong; then it stays until the new one is whole.
    One that has more than `most` bytes is refused.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise FissileError(f"{url} is no web address; give one that begins with http or https")
    part, note, lock = (to.with_name(f"{to.name}.{end}") for end in ("part", "part.json", "lock"))
    try:
        with locked(lock, f"{part}: another process is downloading this; wait for it"):
            if to.is_file() and (not md5 or checksum(to) == md5):
                return to
            _fetch(url, part, note, most, progress)
            if md5 and (actual := checksum(part)) != md5:
                _forget(part, note)
                raise FileError(
                    f"{url}: its md5 is {actual}, not {md5}: damaged on the way or changed by its "
                    "source; try again, or get it by hand"
                )
            os.replace(part, to)
            note.unlink(missing_ok=True)
    except _CUT as error:
        raise FileError(f"{url}: {_advice(error)}") from None
    except OSError as error:
        raise FileError(
            f"cannot write {part}: {error.strerror or error}; make room or give another folder, "
            "and try again, it goes on from there"
        ) from None
    return to


def checksum(path: Path) -> str:
    """Return the md5 of a file, read piece by piece."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _fetch(
    url: str, part: Path, note: Path, most: int, progress: _Progress, resume: bool = True
) -> None:
    """Bring a part to its full length, from where an earlier try has left it if possible."""
    earlier = _noted(note, url) if resume else None
    start = part.stat().st_size if earlier and part.is_file() else 0
    if earlier and start and start == earlier["size"]:
        return
    try:
        answer = _OPENER.open(_request(url, start, earlier), timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the file ends before the part does
            _fetch(url, part, note, most, progress, resume=False)
            return
        raise
    with answer:
        version = _version(url, answer)
        if answer.status != 206:
            start = 0
        elif version != earlier or not _range(answer).startswith(f"bytes {start}-"):
            if not resume:
                raise FileError(
                    f"{url}: the server sends a part when asked for the whole; get it by hand"
                )
            _fetch(url, part, note, most, progress, resume=False)
            return
        size = version["size"]
        if (size or 0) > most:
            raise FileError(f"{url} has {size:,} bytes, more than {most:,}; refused")
        note.write_text(json.dumps(version), encoding="utf-8")
        done = _copy(answer, part, start, size, most, progress)
    if size is not None and done != size:
        raise ConnectionError(f"the connection was cut after {done:,} of {size:,} bytes")
    if (actual := part.stat().st_size) != done:
        _forget(part, note)
        raise FileError(
            f"{part} has {actual:,} bytes, not {done:,}: another program writes to it; try again"
        )


def _copy(
    answer: Any, part: Path, done: int, size: int | None, most: int, progress: _Progress
) -> int:
    """Write what the server sends behind the first `done` bytes, and return how many there are."""
    with open(part, "ab" if done else "wb") as file:
        progress(done, size)
        while True:
            try:
                piece = answer.read(_PIECE)
            except OSError as error:  # told apart from a disk that fails
                why = error.strerror or error
                raise ConnectionError(f"the connection was cut: {why}") from None
            if not piece:
                break
            done += len(piece)
            if done > (most if size is None else size):
                raise FileError("the server sends more than it said, refused; get it by hand")
            file.write(piece)
            progress(done, size)
        file.flush()
        os.fsync(file.fileno())
    return done


def _request(url: str, start: int, earlier: _Version | None) -> urllib.request.Request:
    headers = {"User-Agent": "fissile", "Accept-Encoding": "identity"}
    if start and earlier:
        headers["Range"] = f"bytes={start}-"
        # A weak tag does not promise the same bytes, and a server must not honour it.
        strong = earlier["etag"] if not earlier["etag"].startswith("W/") else ""
        if same := strong or earlier["modified"]:
            headers["If-Range"] = same
    return urllib.request.Request(url, headers=headers)


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


def _range(answer: Any) -> str:
    return str(answer.headers.get("Content-Range", ""))


def _version(url: str, answer: Any) -> _Version:
    whole = answer.headers.get("Content-Length", "")
    text = _range(answer).rpartition("/")[2] if answer.status == 206 else whole
    size = int(text) if text.isdecimal() and len(text) < 20 else None
    etag, modified = (answer.headers.get(name, "") for name in ("ETag", "Last-Modified"))
    return {"url": url, "size": size, "etag": etag, "modified": modified}


def _noted(note: Path, url: str) -> _Version | None:
    """Return what an earlier try noted, if it was about the same address and fits a request."""
    try:
        version = json.loads(read_bounded(note, 2**16))
        texts = version["url"], version["etag"], version["modified"]
        good = all(text.isascii() and text.isprintable() for text in texts) and "size" in version
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return version if good and version["url"] == url else None


def _forget(part: Path, note: Path) -> None:
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def _advice(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}; try later, or get it by hand"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return f"{why}; see that you are connected and try again, it goes on from where it was"
