"""Every step of a small run fails in turn: what was stored before is kept, and the run goes on."""

import errno
import os
import sqlite3
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_stores import HERE, outcome

from fissile import FissileError
from fissile._common.files import atomic_write
from fissile.lab.batching import Local
from fissile.lab.run import run
from fissile.lab.store import Run, Store
from fissile.lab.trial import Sampling

BEFORE = [Sampling(number=number) for number in range(3)]
WORKS = [replace(work, networks=2, number=work.number + 100) for work in BEFORE]
ASKED = Run("theory", "smoke", 3, {}, "fissile run theory")
#: Calls of the system; whatever else writes is SQLite's, and fails as a statement.
SYSTEM = ("open", "link", "replace", "rename", "fsync", "chmod", "mkdir", "unlink")


class Faults:
    """Counts steps and lets one of them fail."""

    def __init__(self, at=0, code=errno.ENOSPC):
        self.at, self.code, self.steps = at, code, 0

    def step(self, what):
        self.steps += 1
        if self.steps == self.at:
            if what == "sqlite":
                error = sqlite3.OperationalError("disk I/O error")
                full = self.code == errno.ENOSPC
                error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
                raise error
            raise OSError(self.code, os.strerror(self.code))

    @contextmanager
    def injected(self, monkeypatch):
        """Let system calls and SQLite's statements count as steps."""
        faults = self

        class Connection(sqlite3.Connection):
            def execute(self, statement, *values):
                if statement != "ROLLBACK":  # which follows a step that has failed
                    faults.step("sqlite")
                return super().execute(statement, *values)

            def executemany(self, statement, values):
                faults.step("sqlite")
                return super().executemany(statement, values)

        def failing(real):
            def call(*arguments, **options):
                faults.step("system")
                return real(*arguments, **options)

            return call

        connect = sqlite3.connect
        with monkeypatch.context() as patched:
            patched.setattr(
                sqlite3, "connect", lambda *a, **o: connect(*a, **o, factory=Connection)
            )
            for name in SYSTEM:
                patched.setattr(os, name, failing(getattr(os, name)))
            yield


def session(folder):
    """Run three trials in a store, one batch each, and write a file of what they came to."""
    with Store(folder) as store:
        store.note_run(ASKED)
        run(WORKS, store, Local(every=0.0))
        rows = store.rows(work.key for work in WORKS)
    with atomic_write(folder / "table.csv", "w") as file:
        file.write("new" * len(rows))


def rows_of(folder, works):
    with Store(folder) as store:
        return list(store.rows(work.key for work in works)), store.runs()


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "new"])
def test_any_step_may_fail(tmp_path, monkeypatch, filled, code):
    def prepared(name):
        folder = tmp_path / name
        if filled:
            with Store(folder) as store:
                store.add([outcome(work.number) for work in BEFORE], HERE)
                store.note_run(replace(ASKED, scale="quick"))
            (folder / "table.csv").write_text("old")
        return folder

    counted, folder = Faults(), prepared("whole")
    with counted.injected(monkeypatch):
        session(folder)
    assert counted.steps > 25
    told = list[str]()
    # All steps of one kind of trouble; of the others, which go the same ways, a sample.
    steps = range(1, counted.steps + 1, 1 if code == errno.ENOSPC else 4)
    for step in steps:
        folder = prepared(str(step))
        before = rows_of(folder, BEFORE) if filled else ([], [])
        with Faults(step, code).injected(monkeypatch):
            try:
                session(folder)
            except FissileError as error:
                told.append(str(error))
        old = (folder / "table.csv").read_text() if (folder / "table.csv").exists() else None
        assert old in ("old" if filled else None, "newnewnew")
        found, runs = rows_of(folder, BEFORE)
        assert found == before[0]
        assert [one for one in runs if one.scale == "quick"] == before[1]
        session(folder)  # the same command goes on
        assert len(rows_of(folder, WORKS)[0]) == 3
        assert (folder / "table.csv").read_text() == "newnewnew"
        left = {one.name for one in folder.iterdir() if not one.name.startswith(".")}
        assert left <= {"trials.sqlite", "flight.lock", "table.csv"}
    assert len(told) > len(steps) / 2  # others are made up for, or come when all is done
    assert not any("\n" in text for text in told)
