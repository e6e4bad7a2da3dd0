"""The command ``fissile``: as a process of its own, or its entry point in this one."""

import contextlib
import io
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from fissile.cli.__main__ import main

FISSILE = shutil.which("fissile", path=Path(sys.executable).parent)
#: A wide terminal without colours.
QUIET = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
#: Sixty trials, each a task of its own.
LONG_RUN = (
    "theory", "--scale", "paper", "--trials", "2", "--set", "networks=150", "--every", "0",
    "--device", "cpu",
)  # fmt: skip


def spawned(*arguments, code=0, text=True, **environment):
    """Run the command as a user does."""
    done = subprocess.run(
        [FISSILE, *map(str, arguments)],
        capture_output=True,
        text=text,
        env=os.environ | QUIET | environment,
        timeout=300,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in str(done.stderr)
    return done


def called(*arguments, code=0, **environment):
    """Call the entry point itself: starting Python anew for every command would be slow."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, QUIET | environment),
        mock.patch.object(sys, "argv", ["fissile", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    said = SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())
    assert end.value.code == code, said
    assert "Traceback" not in said.stderr
    return said


def stored_trials(folder):
    """Count the trials in a store that a process may be filling."""
    try:
        with sqlite3.connect(f"file:{folder / 'trials.sqlite'}?mode=ro", uri=True) as db:
            (count,) = db.execute("SELECT count(*) FROM trials").fetchone()
        db.close()
    except sqlite3.OperationalError:
        return 0
    return count
