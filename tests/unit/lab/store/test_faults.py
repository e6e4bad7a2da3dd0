"""Every step of a small run fails in turn: what was stored before is kept, and the run goes on."""

import ctypes
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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


def survived(folder, filled, faults):
    """Run the session with faults; return its error, if any, once all that must hold is checked."""
    before, told = ([], []), None
    if filled:
        with Store(folder) as store:
            store.add([outcome(work.number) for work in BEFORE], HERE)
            store.note_run(replace(ASKED, scale="quick"))
        (folder / "table.csv").write_text("old")
        before = rows_of(folder, BEFORE)
    with faults:
        try:
            session(folder)
        except FissileError as error:
            told = str(error)
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
    assert told is None or "\n" not in told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "new"])
def test_any_step_may_fail(tmp_path, monkeypatch, filled, code):
    counted = Faults()
    assert survived(tmp_path / "whole", filled, counted.injected(monkeypatch)) is None
    assert counted.steps > 25
    # All steps of one kind of trouble; of the others, which go the same ways, a sample.
    steps = range(1, counted.steps + 1, 1 if code == errno.ENOSPC else 4)
    told = [
        survived(tmp_path / str(step), filled, Faults(step, code).injected(monkeypatch))
        for step in steps
    ]
    assert sum(map(bool, told)) > len(steps) / 2  # others are made up for, or come when all is done


#: Stands before the system's own functions: the write, or whatever it is, of that number fails.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>
int fails_at, fails_with, calls;
static int fails(int fd) {
    struct stat about;
    if (fails_at < 0 || fstat(fd, &about) || S_ISFIFO(about.st_mode) || ++calls != fails_at)
        return 0;
    errno = fails_with;
    return 1;
}
#define STANDING(result, name, declared, given) \
    result name declared { \
        if (fails(fd)) return -1; \
        return ((result (*) declared) dlsym(RTLD_NEXT, #name)) given; \
    }
STANDING(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size))
STANDING(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
STANDING(int, ftruncate64, (int fd, off64_t size), (fd, size))
STANDING(int, fsync, (int fd), (fd))
STANDING(int, fdatasync, (int fd), (fd))
"""


def fail_each_call(filled):
    """In a process with the shim: let each write, fsync and truncation fail, SQLite's included."""
    at, code, calls = (
        ctypes.c_int.in_dll(ctypes.CDLL(None), name) for name in ("fails_at", "fails_with", "calls")
    )

    @contextmanager
    def failing(step, why):
        calls.value, code.value, at.value = 0, why, step
        try:
            yield
        finally:
            at.value = -1

    at.value, told = -1, list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        survived(Path(folder, "whole"), filled, failing(0, 0))
        steps = calls.value
        for why in (errno.ENOSPC, errno.EIO):
            for step in range(1, steps + 1):
                found = survived(Path(folder, f"{why}-{step}"), filled, failing(step, why))
                told.append(found is not None)
    print(json.dumps([steps, sum(told)]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stands before functions of Linux")
@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a few lines of C")
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "new"])
def test_any_write_of_sqlite_may_fail(tmp_path, filled):
    (tmp_path / "shim.c").write_text(SHIM)
    compiled = ["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"]
    subprocess.run(compiled, check=True)
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    ask = f"import test_faults; test_faults.fail_each_call({filled})"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"LD_PRELOAD": str(tmp_path / "shim.so"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps, told = json.loads(done.stdout)
    assert steps > 30
    assert told > steps  # of twice as many; others are made up for, or come when all is done
