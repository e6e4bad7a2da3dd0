"""The store: finished trials in a folder that may be copied, shared, filled up and killed.

>>> with Store("results") as store:
...     todo = store.claim([work.key for work in works])
...     store.add(compute([work for work in works if work.key in todo]), Provenance.here("cpu"))

A trial is a row of an SQLite database and belongs to whoever finished it first. Any number of
processes may use a folder at once, but none may take an open store along when it forks.
"""

from __future__ import annotations

import io
import json
import math
import os
import sqlite3
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from fissile.lab.compute import TrialResult
from fissile.lab.store.database import Flight, advised, open_database, undamaged
from fissile.lab.store.provenance import Provenance
from fissile.lab.trial import Work

if TYPE_CHECKING:
    from fissile.lab.store.parquet import TrialsFile

__all__ = ["Provenance", "Row", "Rows", "Run", "Store", "Time"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Row:
    """One finished trial."""

    key: str
    measures: dict[str, float]
    provenance: Provenance
    seconds: float
    finished: str


class Rows(Sequence[Row]):
    """Finished trials, held in columns: hundreds of thousands of them must fit into memory.

    >>> rows = store.rows(work.key for work in works)
    >>> rows[0].measures["accuracy"], rows.columns()["accuracy"].mean()
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.keys, self.provenances, self.finished = list[str](), list[Provenance](), list[str]()
        self.seconds, self._values, self._starts = array("d"), array("d"), array("q")
        self.names: list[tuple[str, ...]] = []
        for row in rows:
            self.append(row, tuple(row.measures), row.measures.values())

    def append(self, about: Row, names: tuple[str, ...], values: Iterable[float]) -> None:
        """Add a trial, and its measures apart; many trials had better share their names."""
        self._starts.append(len(self._values))
        self._values.extend(values)
        self.names.append(names)
        self.keys.append(about.key)
        self.provenances.append(about.provenance)
        self.seconds.append(about.seconds)
        self.finished.append(about.finished)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        names, start = self.names[place], self._starts[place]
        measures = dict(zip(names, self._values[start : start + len(names)], strict=True))
        about = self.provenances[place], self.seconds[place], self.finished[place]
        return Row(self.keys[place], measures, *about)

    def __add__(self, more: Rows) -> Rows:
        both = Rows()
        for name, own in vars(self).items():
            setattr(both, name, own + getattr(more, name))
        shift = len(self._values)
        both._starts = self._starts + array("q", [shift + start for start in more._starts])
        return both

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return each measure of all trials, NaN where a trial has none."""
        found: dict[str, NDArray[np.float64]] = {}
        starts, values = np.array(self._starts), np.array(self._values)
        known = {names: number for number, names in enumerate(dict.fromkeys(self.names))}
        kinds = np.array([known[names] for names in self.names])
        for names, number in known.items():
            places = np.flatnonzero(kinds == number)
            for offset, name in enumerate(names):
                column = found.setdefault(name, np.full(len(self), np.nan))
                column[places] = values[starts[places] + offset]
        return found


@dataclass(frozen=True)
class Time:
    """How long one finished trial took: its share of its batch, by cost."""

    kind: str
    spec: dict[str, Any]
    device: str
    seconds: float
    finished: str  # trials of a batch are finished at the same time


@dataclass(frozen=True)
class Run:
    """What was asked of the store, so that a report knows what to show and how it was made."""

    study: str
    scale: str
    trials: int | None
    changes: dict[str, Any]
    command: str
    started: str = field(default_factory=_now)
    number: int = field(default=0, compare=False)  # among the study's runs, in the store's order
    grid: str = ""  # a hash of its trials, where the study is in a user's file

    @property
    def name(self) -> str:
        """What commands call the run, such as ``codes-2``; it stays the same in its store."""
        return f"{self.study}-{self.number}"

    @property
    def asked(self) -> str:
        """The request without its command and date; the store keeps each request once."""
        own = [self.grid] if self.grid else []
        asked = [self.study, self.scale, self.trials, self.changes, *own]
        return json.dumps(asked, sort_keys=True)

    @property
    def told(self) -> dict[str, Any]:
        """What the user changed; which data set was found is not of that kind."""
        return {k: v for k, v in self.changes.items() if k not in ("fingerprint", "encoder")}


def _values(result: TrialResult, made_by: str, now: str) -> tuple[object, ...]:
    """Return the columns of a finished trial."""
    work, blob = result.work, io.BytesIO()
    if result.arrays:
        arrays: dict[str, Any] = {k: v.detach().cpu().numpy() for k, v in result.arrays.items()}
        np.savez_compressed(blob, **arrays)
    return (
        work.key,
        work.kind,
        json.dumps(asdict(work), allow_nan=False),
        json.dumps({k: _plain(v) for k, v in result.measures.items()}, allow_nan=False),
        blob.getvalue() or None,
        made_by,
        result.seconds,
        now,
    )


def _plain(value: float) -> float | str | None:
    """Return a number as JSON can have it, which knows neither NaN nor infinity."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _text(value: object) -> str:
    """Return what must be text, and such as a file can hold."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of text")
    value.encode()  # half of a letter, which JSON may hold, cannot be written anywhere
    return value


# What many rows share is checked once, and is one object.


@lru_cache
def _names(names: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(map(_text, names))


@lru_cache
def _provenance(made_by: object) -> Provenance:
    return Provenance(**{k: _text(v) for k, v in json.loads(_text(made_by)).items()})


@lru_cache
def _time(finished: object) -> str:
    datetime.fromisoformat(found := _text(finished))
    return found


def _measures(measures: object) -> tuple[tuple[str, ...], list[float]]:
    found = json.loads(_text(measures))
    values = [math.nan if value is None else float(value) for value in found.values()]
    return _names(tuple(found)), values


def _seconds(seconds: object) -> float:
    if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"it took {seconds!r} seconds")
    return seconds


def _spec(spec: object) -> dict[str, Any]:
    return dict(json.loads(_text(spec)).items())


def _inflated(blob: bytes | None, room: int | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a trial, if they have so much room in memory."""
    if blob is None:
        return {}
    with zipfile.ZipFile(io.BytesIO(blob)) as held:
        if sum(member.file_size for member in held.infolist()) > (_ROOM if room is None else room):
            raise ValueError("its arrays are larger than any that fissile stores")
    with np.load(io.BytesIO(blob), allow_pickle=False) as arrays:
        return dict(arrays)


def run_of(request: object, command: object, started: object) -> Run:
    """Return a run as it is stored."""
    study, scale, trials, changes, *grid = json.loads(_text(request))
    if not (trials is None or (type(trials) is int and 0 < trials < _LARGE)):
        raise ValueError(f"{trials!r} trials")
    for name, value in changes.items():
        _text(name)
        if isinstance(value, str):
            _text(value)
        elif value is not None and not (isinstance(value, int | float) and abs(value) < _LARGE):
            raise ValueError(f"a setting is {value!r}")
    about = _text(study), _text(scale), trials, changes, _text(command), _text(started)
    return Run(*about, grid="".join(map(_text, grid)))


_CHUNK = 500  # older SQLites take 999 parameters
_ROOM = 512 << 20  # bytes of arrays that are read at once; figures need thousands
_LARGE = 10**15  # no setting is as large
#: Not OR IGNORE, which would pass over any broken row in silence.
_INSERT = "INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_RUN = """INTO runs SELECT ?1, ?2, ?3, coalesce(
    (SELECT first FROM runs WHERE request = ?1), (SELECT coalesce(max(rowid), 0) + 1 FROM runs)
) WHERE true"""


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
        self.file = self.path / "trials.sqlite"
        self._flight: Flight | None = None
        self._mine: set[str] = set()
        self._db = open_database(self.file, create=create)

    def finished(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that are stored."""
        return {key for (key,) in self._select("key", keys)}

    def progress(self, keys: Iterable[str]) -> tuple[int, float]:
        """Return how many of these trials are stored, and the seconds they took; no more is read.

        >>> asked, keys = study.keys("paper")
        >>> stored, seconds = store.progress(keys)
        """
        stored, seconds, row = 0, 0.0, tuple[Any, ...]([""])
        with undamaged(self.file, lambda: f"the trial {row[0]}"):
            for row in self._select("key, seconds", keys):
                stored, seconds = stored + 1, seconds + _seconds(row[1])
        return stored, seconds

    def missing(self, works: Iterable[Work]) -> list[Work]:
        """Return the trials that are not stored, in the order given."""
        works = list(works)
        finished = self.finished(work.key for work in works)
        return [work for work in works if work.key not in finished]

    def add(self, outcomes: Sequence[TrialResult], provenance: Provenance) -> None:
        """Store finished trials, all or none, and end their claims; the first result stays.

        >>> store.add(compute([trial]), Provenance.here("cpu"))

        Once this returns, neither a kill nor a power cut takes them back.
        """
        made_by, now = json.dumps(asdict(provenance)), _now()
        rows = [_values(result, made_by, now) for result in outcomes]
        with self._transaction() as db:
            db.executemany(_INSERT, rows)
        self.release(one.work.key for one in outcomes)

    def rows(self, keys: Iterable[str]) -> Rows:
        """Return the trials that are stored, in the order asked for, without their arrays."""
        keys, rows, key = list(keys), Rows(), ""
        with undamaged(self.file, lambda: f"the trial {key}"):
            for start in range(0, len(keys), _CHUNK):
                part = keys[start : start + _CHUNK]
                columns = "key, measures, provenance, seconds, finished"
                found = {values[0]: values[1:] for values in self._select(columns, part)}
                for key in filter(found.__contains__, part):
                    measures, made_by, seconds, finished = found[key]
                    about = _provenance(made_by), _seconds(seconds), _time(finished)
                    rows.append(Row(key, {}, *about), *_measures(measures))
        return rows

    def arrays(self, keys: Iterable[str]) -> dict[str, dict[str, NDArray[Any]]]:
        """Return what figures show of single networks, for the trials that have it.

        >>> store.arrays([trial.key])[trial.key]["w1"].shape
        """
        found, room = dict[str, dict[str, NDArray[Any]]](), _ROOM
        for key, blob in self._select("key, arrays", keys):
            with undamaged(self.file, f"the trial {key}"):
                found[key] = _inflated(blob, room)
            room -= sum(one.nbytes for one in found[key].values())
        return {key: arrays for key, arrays in found.items() if arrays}

    def times(self) -> list[Time]:
        """Return how long each finished trial took, on which device.

        >>> store.times()[0].seconds
        """
        rows = self._query("SELECT kind, spec, provenance, seconds, finished FROM trials")
        with undamaged(self.file, "a trial"):
            return [
                Time(_text(kind), _spec(spec), _provenance(by).device, _seconds(taken), _time(at))
                for kind, spec, by, taken, at in rows
            ]

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Return the trials that this store shall compute: those nobody has stored or claimed.

        >>> todo = store.claim([work.key for work in works])

        A claim ends with :meth:`add`, :meth:`release`, :meth:`close` or the process, however it
        dies. Claim what comes next, not everything: others want something to do, and tens of
        thousands of locks are slow. On Windows, for want of POSIX locks, processes do not see each
        other's claims: work may be done twice, but the first result stays all the same.
        """
        if self._flight is None:
            with advised(self.file):
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

    def take(self, other: Store | TrialsFile) -> int:
        """Add what another store has finished and was asked for; return how many trials are new.

        >>> Store("here").take(Store("from-the-cluster", create=False))

        Where both have a trial, the result here stays. What only the other was asked for counts as
        asked for now.
        """
        before = self.count()
        runs = [(run.asked, run.command, run.started) for run in reversed(other.runs())]
        checks: tuple[Any, ...] = (_text, _text, _spec, _measures, _inflated)
        checks += _provenance, _seconds, _time
        with self._transaction() as db, advised(other.file):
            for values in other.stored():
                with undamaged(other.file, f"the trial {values[0]}"):
                    for check, value in zip(checks, values, strict=True):
                        check(value)
                db.execute(_INSERT, values)
            db.executemany(f"INSERT {_RUN} ON CONFLICT DO NOTHING", runs)
        return self.count() - before

    def stored(self, keys: Iterable[str] | None = None) -> Iterator[tuple[Any, ...]]:
        """Return the rows of trials as the database has them: of all, or of these keys."""
        return self._db.execute("SELECT * FROM trials") if keys is None else self._select("*", keys)

    def note_run(self, run: Run) -> None:
        """Remember what was asked for: the same request is kept once, and is now the newest."""
        with self._transaction() as db:
            db.execute(f"REPLACE {_RUN}", (run.asked, run.command, run.started))

    def runs(self) -> list[Run]:
        """Return what was asked for, newest first, whatever the clock said then."""
        rows = self._query("SELECT request, command, started FROM runs ORDER BY first")
        order = self._query("SELECT request FROM runs ORDER BY rowid DESC")
        runs: dict[object, Run] = {}
        counts: Counter[str] = Counter()
        with undamaged(self.file, "the list of runs"):
            for row in rows:
                run = run_of(*row)
                counts[run.study] += 1
                runs[row[0]] = replace(run, number=counts[run.study])
        return [runs[request] for (request,) in order]

    def count(self) -> int:
        """Count the finished trials."""
        return int(self._query("SELECT count(*) FROM trials")[0][0])

    def close(self) -> None:
        """Give up all claims and close; whoever closes last leaves everything in one file."""
        self.release(self._mine)
        self._flight = None
        with advised(self.file):
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, query: str, values: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        with advised(self.file):
            return self._db.execute(query, values).fetchall()

    def _select(self, columns: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        keys = iter(keys)
        while some := list(dict.fromkeys(islice(keys, _CHUNK))):
            marks = ", ".join("?" * len(some))
            yield from self._query(f"SELECT {columns} FROM trials WHERE key IN ({marks})", some)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with advised(self.file):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has left it already if the disk is full
                    self._db.execute("ROLLBACK")
                raise
