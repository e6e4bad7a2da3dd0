"""The database and its locks: made, recognised, checked, opened; errors that say what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from fissile._common.errors import FileError

if sys.platform != "win32":
    import fcntl

_KEPT = "what was stored is kept: {}, then run again; finished trials are not repeated"
UNTOUCHED = "it was left as it is: put a whole copy in its place, or give another folder"
_RIGHTS = "see that you may write to the folder and its files, or give another folder"
_ADVICE = {
    sqlite3.SQLITE_FULL: _KEPT.format("free some space"),
    sqlite3.SQLITE_IOERR: _KEPT.format("see whether the disk is full or failing"),
    sqlite3.SQLITE_BUSY: _KEPT.format("wait for the process that writes to it"),
    sqlite3.SQLITE_CORRUPT: f"it is damaged; {UNTOUCHED}",
    sqlite3.SQLITE_NOTADB: f"it is no store of fissile; {UNTOUCHED}",
    sqlite3.SQLITE_READONLY: _RIGHTS,
    sqlite3.SQLITE_CANTOPEN: _RIGHTS,
}


@contextmanager
def advised(file: Path) -> Iterator[None]:
    """Turn an error of SQLite or the system into one that says what to do."""
    try:
        yield
    except UnicodeDecodeError:  # not even SQLite's message about the damage could be read
        raise FileError(f"{file}: {_ADVICE[sqlite3.SQLITE_CORRUPT]}") from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the bits above are details
        advice = _ADVICE.get(code, "open the store again, and if that is no help, another folder")
        raise FileError(f"{file}: {_line(error)}; {advice}") from None
    except OSError as error:
        raise FileError(f"{file}: {error.strerror or error}; {_RIGHTS}") from None


@contextmanager
def undamaged(file: Path, what: str | Callable[[], str]) -> Iterator[None]:
    """Turn any error while reading what is stored into one that names it."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # whatever bad bytes run into, it becomes one clear error
        named = what if isinstance(what, str) else what()
        raise FileError(f"{file}: {named} is damaged ({_line(error)}); {UNTOUCHED}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


_OURS = int.from_bytes(b"fiss", "big")  # stands in the header of the file
_VERSION = 2
_MOMENT = 0.5  # seconds in which a process that has made an empty file fills it
_PATIENCE = 60.0  # seconds to wait for another process; a transaction takes milliseconds
_TABLES = (
    """CREATE TABLE trials (
        key TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, measures TEXT NOT NULL,
        arrays BLOB, provenance TEXT NOT NULL, seconds REAL NOT NULL, finished TEXT NOT NULL)""",
    # In the order of asking; ``first`` is the place of a run that was asked for again since.
    """CREATE TABLE runs (
        request TEXT PRIMARY KEY, command TEXT NOT NULL, started TEXT NOT NULL,
        first INTEGER NOT NULL)""",
)
_MARKS = (f"PRAGMA application_id = {_OURS}", f"PRAGMA user_version = {_VERSION}")
_PROBE = "SELECT key FROM trials LIMIT 1"


def open_database(file: Path, *, create: bool) -> sqlite3.Connection:
    """Open the database of a store: to write, making it if need be, or at least to read."""
    folder = file.parent
    with advised(file):
        if folder.exists() and not folder.is_dir():
            raise FileError(f"{folder}: a store is a folder, and this is a file; give another")
        if create and not file.exists():
            _make(file)
        if not file.exists():
            raise FileError(f"{folder}: there is no store here; fill one with `fissile run`")
        _wait_until_made(file)
        _inspect(file)
        return _writable(file) if create else _readable(file)


def _connect(file: Path, how: str, *statements: str) -> sqlite3.Connection:
    address = f"{file.resolve().as_uri()}?{how}"
    db = sqlite3.connect(address, uri=True, timeout=_PATIENCE, isolation_level=None)
    try:
        for statement in ("PRAGMA trusted_schema = OFF", *statements):
            db.execute(statement).fetchall()
    except BaseException:
        db.close()
        raise
    return db


def _make(file: Path) -> None:
    """Make an empty store beside its place and link it there: nobody ever sees half of one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{uuid.uuid4().hex}.sqlite")
    steps = ("BEGIN", *_TABLES, *_MARKS, "COMMIT", "PRAGMA journal_mode = WAL")
    try:
        _connect(beside, "mode=rwc", *steps).close()
        with suppress(FileExistsError):  # another process was faster
            try:
                os.link(beside, file)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                _take_place(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _take_place(beside: Path, file: Path) -> None:
    """Put a file where there is none; only one process can make the empty file that comes first."""
    os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    try:
        os.replace(beside, file)
    except BaseException:
        file.unlink()
        raise


def _wait_until_made(file: Path) -> None:
    """Wait for another process that has just taken the place of a store; see above."""
    until = time.monotonic() + _MOMENT
    while file.stat().st_size == 0 and time.monotonic() < until:
        time.sleep(0.01)


def _has_log(file: Path) -> bool:
    """Return whether the newest rows are still in SQLite's log beside the file."""
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size > 0
    except FileNotFoundError:  # the last process to close the store removes it at any time
        return False


def _inspect(file: Path) -> None:
    """Refuse what is not a whole store of this version, without changing a byte of it.

    SQLite does the reading: if we closed the file, the locks of our other connections would go.
    """
    for last in (False, False, True):
        try:
            # After a kill the file may be torn and its log whole; the pragma allows for that.
            with closing(_connect(file, "immutable=1", "PRAGMA writable_schema = ON")) as db:
                _identify(file, db)
            # Through the log if there is one; where there is none, mode=ro would leave one behind.
            with closing(_connect(file, "mode=ro" if _has_log(file) else "immutable=1")) as db:
                _check(file, db)
            return
        except sqlite3.DatabaseError:
            if last:  # until then, another process may have been writing while we looked
                raise


def _identify(file: Path, db: sqlite3.Connection) -> None:
    (identity,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if identity != _OURS:
        raise FileError(f"{file}: this database is no store of fissile; {UNTOUCHED}")
    if version != _VERSION:
        raise FileError(
            f"{file}: written in version {version} of the format, this is version {_VERSION}; "
            "update fissile"
        )


def _check(file: Path, db: sqlite3.Connection) -> None:
    schema = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    # SQLite's own indexes have no statement; a trigger, a view or an index would act on its own.
    made = {(kind, sql): name for kind, name, sql in schema if (kind, sql) != ("index", None)}
    foreign = [f"{kind} {made[kind, sql]}" for kind, sql in made if kind != "table"]
    (page,) = db.execute("PRAGMA page_size").fetchone()
    if file.stat().st_size % page and not _has_log(file):  # which SQLite would fill with zeros
        found = "the last page is cut"
    elif foreign:
        found = f"the {foreign[0]} is none of a store's"
    elif {sql for _, sql in made} != set(_TABLES):
        found = "the tables are not those of a store"
    else:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        error = sqlite3.DatabaseError(found)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _writable(file: Path) -> sqlite3.Connection:
    # Whether it can be written is found out now, not after hours of computing.
    attempt = ("BEGIN IMMEDIATE", _MARKS[-1], "ROLLBACK")
    return _connect(file, "mode=rw", "PRAGMA synchronous = FULL", *attempt)


def _readable(file: Path) -> sqlite3.Connection:
    for how in ("mode=rw", "mode=ro"):
        with suppress(sqlite3.OperationalError):  # SQLite keeps a log even for readers, if it can
            return _connect(file, how, "PRAGMA synchronous = FULL", _PROBE)
    return _connect(file, "mode=ro" if _has_log(file) else "immutable=1", _PROBE)


class Flight:
    """The trials that this process computes in a folder: for each, one byte of a file is locked.

    The kernel drops the locks of a process that dies, but also those of one that closes the file
    anywhere: hence one open file for all stores on the folder.
    """

    _all: ClassVar[weakref.WeakValueDictionary[Path, Flight]] = weakref.WeakValueDictionary()

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        self._taken: set[str] = set()
        weakref.finalize(self, os.close, self._handle)

    @classmethod
    def over(cls, file: Path) -> Flight:
        """Return the one that all stores of this process share."""
        found = cls._all.get(file) or cls(file)
        return cls._all.setdefault(file, found)

    def take(self, key: str) -> bool:
        """Claim a trial, and return whether nobody else has."""
        if key in self._taken or not self._lock(key):
            return False
        self._taken.add(key)
        return True

    def drop(self, key: str) -> None:
        """Give up a claim."""
        self._taken.remove(key)
        self._lock(key, drop=True)

    def _lock(self, key: str, *, drop: bool = False) -> bool:
        if sys.platform != "win32":
            how = fcntl.LOCK_UN if drop else fcntl.LOCK_EX | fcntl.LOCK_NB
            try:  # 60 bits of the key: an offset has 63
                fcntl.lockf(self._handle, how, 1, int(key[:15], 16))
            except OSError as error:
                # On a file system without locks all go ahead: the first result stays anyway.
                return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True
