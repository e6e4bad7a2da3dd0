"""The store: finished trials in a folder that may be copied, shared, filled up and killed.

>>> with Store("results") as store:
...     todo = store.claim([work.key for work in works])
...     store.add(compute([work for work in works if work.key in todo]), Provenance.here("cpu"))

A trial is a row of an SQLite database and belongs to whoever finished it first. Any number of
processes may use a folder at once, but none may take an open store along when it forks.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import platform
import sqlite3
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import fissile
from fissile.errors import FileError
from fissile.lab.compute import Outcome

if sys.platform != "win32":
    import fcntl

__all__ = ["Provenance", "Row", "Run", "Store"]

_OURS = int.from_bytes(b"fiss", "big")  # stands in the header of the file
_VERSION = 1
_PATIENCE = 60.0  # seconds to wait for another process; a transaction takes milliseconds
_CHUNK = 500  # older SQLites take 999 parameters
_TABLES = (
    """CREATE TABLE trials (
        key TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL, measures TEXT NOT NULL,
        arrays BLOB, provenance TEXT NOT NULL, seconds REAL NOT NULL, finished TEXT NOT NULL)""",
    "CREATE TABLE runs (request TEXT PRIMARY KEY, command TEXT NOT NULL, started TEXT NOT NULL)",
)
_MARKS = (f"PRAGMA application_id = {_OURS}", f"PRAGMA user_version = {_VERSION}")
_PROBE = "SELECT key FROM trials LIMIT 1"
_KEPT = "what was stored is kept: {}, then run again; finished trials are not repeated"
_UNTOUCHED = "it was left as it is: put a whole copy in its place, or give another folder"
_RIGHTS = "see that you may write to the folder and its files, or give another folder"
_ADVICE = {
    sqlite3.SQLITE_FULL: _KEPT.format("free some space"),
    sqlite3.SQLITE_IOERR: _KEPT.format("see whether the disk is full or failing"),
    sqlite3.SQLITE_BUSY: _KEPT.format("wait for the process that writes to it"),
    sqlite3.SQLITE_CORRUPT: f"it is damaged; {_UNTOUCHED}",
    sqlite3.SQLITE_NOTADB: f"it is no store of fissile; {_UNTOUCHED}",
    sqlite3.SQLITE_READONLY: _RIGHTS,
    sqlite3.SQLITE_CANTOPEN: _RIGHTS,
}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Provenance:
    """Who made a result.

    >>> Provenance.here("cpu").version
    '0.1.0'
    """

    version: str
    commit: str
    torch: str
    device: str
    python: str

    @classmethod
    def here(cls, device: str) -> Provenance:
        """Describe this installation on this machine; what cannot be found out stays empty."""
        python = platform.python_version()
        return cls(fissile.__version__, _commit(), str(torch.__version__), _name(device), python)


@dataclass(frozen=True)
class Row:
    """One finished trial."""

    key: str
    kind: str
    spec: dict[str, Any]
    measures: dict[str, float]
    arrays: dict[str, NDArray[Any]]
    provenance: Provenance
    seconds: float
    finished: str


@dataclass(frozen=True)
class Run:
    """What was asked of the store, so that a report knows what to show and how it was made."""

    study: str
    scale: str
    trials: int | None
    changes: dict[str, Any]
    command: str
    started: str = field(default_factory=_now)


class Store:
    """The finished trials of a folder.

    >>> Store("results", create=False).count()
    120

    Args:
        path: the folder.
        create: make a store if there is none, and insist that it can be written; else one must be
            there, and reading is enough.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self.path = Path(path)
        self._file = self.path / "trials.sqlite"
        self._flight: _Flight | None = None
        self._mine: set[str] = set()
        with _advised(self._file):
            if self.path.exists() and not self.path.is_dir():
                raise FileError(f"{path}: a store is a folder, and this is a file; give another")
            if create and not self._file.exists():
                _make(self._file)
            if not self._file.exists():
                raise FileError(f"{path}: there is no store here; fill one with `fissile run`")
            _inspect(self._file)
            self._db = _writable(self._file) if create else _readable(self._file)

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Return those of the trials that are stored."""
        return {key for (key,) in self._select("key", keys)}

    def add(self, outcomes: Sequence[Outcome], provenance: Provenance) -> None:
        """Store finished trials, all or none, and end their claims; the first result stays.

        >>> store.add(compute([trial]), Provenance.here("cpu"))

        Once this returns, neither a kill nor a power cut takes them back.
        """
        made_by, now = json.dumps(asdict(provenance)), _now()
        rows = [_values(one, made_by, now) for one in outcomes]
        with self._transaction() as db:
            # Not OR IGNORE, which would pass over any broken row in silence.
            insert = "INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            db.executemany(insert, rows)
        self.release(one.work.key for one in outcomes)

    def rows(self, keys: Sequence[str]) -> list[Row]:
        """Return the trials that are stored, in the order asked for."""
        found = {values[0]: _row(self._file, *values) for values in self._select("*", keys)}
        return [found[key] for key in keys if key in found]

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Return the trials that this store shall compute: those nobody has stored or claimed.

        >>> todo = store.claim([work.key for work in works])

        A claim ends with :meth:`add`, :meth:`release`, :meth:`close` or the process, however it
        dies. Claim what comes next, not everything: others want something to do, and tens of
        thousands of locks are slow. On Windows, for want of POSIX locks, processes do not see each
        other's claims: work may be done twice, but the first result stays all the same.
        """
        if self._flight is None:
            with _advised(self._file):
                self._flight = _Flight.over(self.path.resolve() / "flight.lock")
        took = {key for key in keys if key in self._mine or self._flight.take(key)}
        self._mine |= took
        # Asked only now: what another process has just let go, it has stored before.
        done = self.finished(took)
        self.release(done)
        return took - done

    def release(self, keys: Iterable[str]) -> None:
        """Give up claims, so that others may compute these trials."""
        for key in self._mine.intersection(keys):
            assert self._flight is not None
            self._flight.drop(key)
            self._mine.remove(key)

    def note_run(self, run: Run) -> None:
        """Remember what was asked for; the same request is kept once, with its newest start."""
        request = json.dumps([run.study, run.scale, run.trials, run.changes], sort_keys=True)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (request) DO UPDATE"
                " SET command = excluded.command, started = excluded.started"
                " WHERE excluded.started >= started",
                (request, run.command, run.started),
            )

    def runs(self) -> list[Run]:
        """Return what was asked for, newest first."""
        rows = self._query("SELECT request, command, started FROM runs ORDER BY 3 DESC, rowid DESC")
        with _undamaged(self._file, "the list of runs"):
            asked = [(*json.loads(request), command, start) for request, command, start in rows]
            return [Run(*one) for one in asked]

    def count(self) -> int:
        """Count the finished trials."""
        return int(self._query("SELECT count(*) FROM trials")[0][0])

    def close(self) -> None:
        """Give up all claims and close; whoever closes last leaves everything in one file."""
        self.release(list(self._mine))
        self._flight = None
        with _advised(self._file):
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, query: str, values: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        with _advised(self._file):
            return self._db.execute(query, values).fetchall()

    def _select(self, columns: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        asked = list(dict.fromkeys(keys))
        for start in range(0, len(asked), _CHUNK):
            some = asked[start : start + _CHUNK]
            marks = ", ".join("?" * len(some))
            yield from self._query(f"SELECT {columns} FROM trials WHERE key IN ({marks})", some)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _advised(self._file):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has left it already if the disk is full
                    self._db.execute("ROLLBACK")
                raise


# --- claims


class _Flight:
    """The trials that this process computes in a folder: for each, one byte of a file is locked.

    The kernel drops the locks of a process that dies, but also those of one that closes the file
    anywhere: hence one open file for all stores on the folder.
    """

    _all: ClassVar[weakref.WeakValueDictionary[Path, _Flight]] = weakref.WeakValueDictionary()

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        self._taken: set[str] = set()
        weakref.finalize(self, os.close, self._handle)

    @classmethod
    def over(cls, file: Path) -> _Flight:
        found = cls._all.get(file) or cls(file)
        return cls._all.setdefault(file, found)

    def take(self, key: str) -> bool:
        free = key not in self._taken and self._lock(key)
        if free:
            self._taken.add(key)
        return free

    def drop(self, key: str) -> None:
        self._taken.remove(key)
        if sys.platform != "win32":
            with suppress(OSError):  # where nothing can be locked, nothing can be unlocked
                fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, int(key[:15], 16))

    def _lock(self, key: str) -> bool:
        if sys.platform == "win32":
            return True
        try:  # 60 bits of the key: an offset has 63
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
        except OSError as error:
            # On a file system without locks all go ahead: the first result stays anyway.
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True


# --- opening


def _connect(file: Path, how: str, *statements: str) -> sqlite3.Connection:
    address = f"{file.resolve().as_uri()}?{how}"
    db = sqlite3.connect(address, uri=True, timeout=_PATIENCE, isolation_level=None)
    try:
        for statement in statements:
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
        try:
            os.link(beside, file)
        except FileExistsError:
            pass  # another process was faster
        except OSError:  # a file system without links
            os.rename(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _has_log(file: Path) -> bool:
    """Tell whether the newest rows are still in SQLite's log beside the file."""
    log = file.with_name(f"{file.name}-wal")
    return log.exists() and log.stat().st_size > 0


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
        raise FileError(f"{file}: this database is no store of fissile; {_UNTOUCHED}")
    if version != _VERSION:
        raise FileError(
            f"{file}: written in version {version} of the format, this is version {_VERSION}; "
            "update fissile"
        )


def _check(file: Path, db: sqlite3.Connection) -> None:
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    (page,) = db.execute("PRAGMA page_size").fetchone()
    tables = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")}
    if file.stat().st_size % page and not _has_log(file):  # which SQLite would fill with zeros
        found = "the last page is cut"
    elif not tables.issuperset(_TABLES):
        found = "the tables are not those of a store"
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


@contextmanager
def _advised(file: Path) -> Iterator[None]:
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


# --- rows


def _values(one: Outcome, made_by: str, now: str) -> tuple[object, ...]:
    work, blob = one.work, io.BytesIO()
    spec = json.dumps(asdict(work), allow_nan=False)
    measures = {name: _plain(value) for name, value in one.measures.items()}
    if one.arrays:
        arrays: dict[str, Any] = {k: v.detach().cpu().numpy() for k, v in one.arrays.items()}
        np.savez_compressed(blob, **arrays)
    numbers = json.dumps(measures, allow_nan=False)
    return work.key, work.kind, spec, numbers, blob.getvalue() or None, made_by, one.seconds, now


def _plain(value: float) -> float | str | None:
    """Return a number as JSON can have it, which knows neither NaN nor infinity."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _row(
    file: Path, key: str, kind: str, spec: str, measures: str, blob: bytes | None, made_by: str,
    seconds: float, finished: str,
) -> Row:  # fmt: skip
    with _undamaged(file, f"the trial {key}"):
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in json.loads(measures).items()
        }
        arrays = _arrays(blob) if blob else {}
        provenance = Provenance(**json.loads(made_by))
        settings = json.loads(spec)
        return Row(key, kind, settings, numbers, arrays, provenance, float(seconds), finished)


def _arrays(blob: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@contextmanager
def _undamaged(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever bad bytes run into, it becomes one clear error
        raise FileError(f"{file}: {what} is damaged ({_line(error)}); {_UNTOUCHED}") from None


# --- provenance


def _commit() -> str:
    """Return the commit of the source tree, if this is one, marked if files were changed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    asked = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _name(device: str) -> str:
    try:
        kind = torch.device(device).type
        if kind == "cuda":
            return torch.cuda.get_device_name(device)
    except (AssertionError, RuntimeError):  # not on this machine: what it was called must do
        return device
    return f"{_processor()}, {os.cpu_count()} cores" if kind == "cpu" else device


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"
