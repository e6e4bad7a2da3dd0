"""The store: finished trials in a folder that may be copied, shared, filled up and killed.

>>> with Store("results") as store:
...     todo = store.claim([work.key for work in works])
...     store.add(compute([work for work in works if work.key in todo]), Provenance.here("cpu"))

A trial is a row of an SQLite database and belongs to whoever finished it first. Any number of
processes may use a folder at once, but none may take an open store along when it forks.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from fissile.lab.compute import Outcome
from fissile.lab.store.database import advised, open_database
from fissile.lab.store.rows import (
    Provenance,
    Row,
    Run,
    Time,
    row_of,
    row_values,
    run_of,
    run_values,
    time_of,
)
from fissile.lab.trial import Work

if sys.platform != "win32":
    import fcntl

__all__ = ["Provenance", "Row", "Run", "Store", "Time"]


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
        """Claim a trial, unless somebody has."""
        free = key not in self._taken and self._lock(key)
        if free:
            self._taken.add(key)
        return free

    def drop(self, key: str) -> None:
        """Give up a claim."""
        self._taken.remove(key)
        if sys.platform != "win32":
            with suppress(OSError):  # where nothing can be locked, nothing can be unlocked
                fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, int(key[:15], 16))

    def _lock(self, key: str) -> bool:
        if sys.platform != "win32":
            try:  # 60 bits of the key: an offset has 63
                fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
            except OSError as error:
                # On a file system without locks all go ahead: the first result stays anyway.
                return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True


_CHUNK = 500  # older SQLites take 999 parameters


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
        self._flight: Flight | None = None
        self._mine: set[str] = set()
        self._db = open_database(self._file, create=create)

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Return those of the trials that are stored."""
        return {key for (key,) in self._select("key", keys)}

    def missing(self, works: Iterable[Work]) -> list[Work]:
        """Return the trials that are not stored, in the order given."""
        works = list(works)
        finished = self.finished(work.key for work in works)
        return [work for work in works if work.key not in finished]

    def add(self, outcomes: Sequence[Outcome], provenance: Provenance) -> None:
        """Store finished trials, all or none, and end their claims; the first result stays.

        >>> store.add(compute([trial]), Provenance.here("cpu"))

        Once this returns, neither a kill nor a power cut takes them back.
        """
        rows = row_values(outcomes, provenance)
        with self._transaction() as db:
            # Not OR IGNORE, which would pass over any broken row in silence.
            insert = "INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            db.executemany(insert, rows)
        self.release(one.work.key for one in outcomes)

    def rows(self, keys: Sequence[str]) -> list[Row]:
        """Return the trials that are stored, in the order asked for."""
        found = {values[0]: row_of(self._file, values) for values in self._select("*", keys)}
        return [found[key] for key in keys if key in found]

    def times(self) -> list[Time]:
        """Return how long each finished trial took, on which device.

        >>> store.times()[0].seconds
        """
        rows = self._query("SELECT kind, spec, provenance, seconds, finished FROM trials")
        return [time_of(self._file, values) for values in rows]

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Return the trials that this store shall compute: those nobody has stored or claimed.

        >>> todo = store.claim([work.key for work in works])

        A claim ends with :meth:`add`, :meth:`release`, :meth:`close` or the process, however it
        dies. Claim what comes next, not everything: others want something to do, and tens of
        thousands of locks are slow. On Windows, for want of POSIX locks, processes do not see each
        other's claims: work may be done twice, but the first result stays all the same.
        """
        if self._flight is None:
            with advised(self._file):
                self._flight = Flight.over(self.path.resolve() / "flight.lock")
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

    def take(self, other: Store) -> int:
        """Add what another store has finished and was asked for; return how many trials are new.

        >>> Store("here").take(Store("from-the-cluster", create=False))

        Where both have a trial, the result here stays.
        """
        before = self.count()
        rows = other._query("SELECT * FROM trials")
        for values in rows:
            row_of(other._file, values)  # which refuses what is damaged, before anything is added
        with self._transaction() as db:
            insert = "INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            db.executemany(insert, rows)
        for run in reversed(other.runs()):
            self.note_run(run)
        return self.count() - before

    def note_run(self, run: Run) -> None:
        """Remember what was asked for; the same request is kept once, with its newest start."""
        upsert = (
            "INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (request) DO UPDATE"
            " SET command = excluded.command, started = excluded.started"
            " WHERE excluded.started >= started"
        )
        with self._transaction() as db:
            db.execute(upsert, run_values(run))

    def runs(self) -> list[Run]:
        """Return what was asked for, newest first."""
        rows = self._query("SELECT request, command, started FROM runs ORDER BY 3 DESC, rowid DESC")
        return [run_of(self._file, values) for values in rows]

    def count(self) -> int:
        """Count the finished trials."""
        return int(self._query("SELECT count(*) FROM trials")[0][0])

    def close(self) -> None:
        """Give up all claims and close; whoever closes last leaves everything in one file."""
        self.release(self._mine)
        self._flight = None
        with advised(self._file):
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, query: str, values: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        with advised(self._file):
            return self._db.execute(query, values).fetchall()

    def _select(self, columns: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        asked = list(dict.fromkeys(keys))
        for start in range(0, len(asked), _CHUNK):
            some = asked[start : start + _CHUNK]
            marks = ", ".join("?" * len(some))
            yield from self._query(f"SELECT {columns} FROM trials WHERE key IN ({marks})", some)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with advised(self._file):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has left it already if the disk is full
                    self._db.execute("ROLLBACK")
                raise
