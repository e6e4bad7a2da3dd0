"""Commands on damaged, hostile and unlucky stores: one clear error, and nothing old is lost."""

import contextlib
import errno
import io
import json
import os
import sqlite3
import sys
from contextlib import closing
from unittest import mock

import pytest
from command import called
from fake_stores import HERE

from fissile._common.errors import printable
from fissile.cli.__main__ import main
from fissile.cli.common import show, table_of
from fissile.lab.compute import TrialResult
from fissile.lab.frame import table
from fissile.lab.results import judged, readable
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b1mred\u202egnp.exe"


def invented(folder, *, changes=None, command="fissile run codes"):
    """Fill a store with numbers that nobody has computed."""
    works = STUDIES["codes"].works("smoke", changes=changes)
    names = "accuracy", "best", "capacity", "absolute_cosine", "collisions", "nonzeros"
    with Store(folder) as store:
        found = [
            TrialResult(work, dict.fromkeys(names, 0.5 + 0.1 * work.number), 1.0) for work in works
        ]
        store.add(found, HERE)
        store.note_run(Run("codes", "smoke", None, changes or {}, command))
    return folder


def changed(folder, *statement):
    with closing(sqlite3.connect(folder / "trials.sqlite")) as db, db:
        db.execute(*statement)


# --- what comes from data is text


def test_text_for_a_terminal_is_no_command():
    assert printable(EVIL) == "\\x1b]0;owned\\x07\\x1b[31m\\x9b1mred\\u202egnp.exe"
    assert printable("α = 2,\xa0“naïve”\n") == "α = 2,\xa0“naïve”\n"
    assert printable("\ud800").encode() == b"\\ud800"


def test_cells_and_titles_of_tables_are_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = table_of("name", title=f"[bold]title[/bold]{EVIL}")
    table.add_row(f"[red]cell[/red]{EVIL}")
    show(table)
    said = capsys.readouterr().out
    assert f"[bold]title[/bold]{printable(EVIL)}" in said
    assert f"[red]cell[/red]{printable(EVIL)}" in said
    assert not any(c in said for c in EVIL if not c.isprintable())


def test_no_store_sends_commands_to_the_terminal(tmp_path):
    invented(tmp_path)
    with Store(tmp_path) as store:
        store.note_run(Run(f"none{EVIL}", "smoke", None, {}, f"fissile run {EVIL}"))
        store.note_run(Run("codes", f"smoke{EVIL}", None, {}, EVIL))
    said = called("status", "--out", tmp_path).stdout
    assert f"another version of fissile: fissile run {printable(EVIL)}" in said
    changed(tmp_path, "UPDATE trials SET finished = ?", (EVIL,))
    said += called("results", "codes-1", "--out", tmp_path, code=1).stderr
    with closing(sqlite3.connect(tmp_path / "trials.sqlite", isolation_level=None)) as db:
        db.execute(f'CREATE TRIGGER "{EVIL}" AFTER INSERT ON trials BEGIN SELECT 1; END')
    said += called("status", "--out", tmp_path, code=1).stderr
    assert f"the trigger {printable(EVIL)}" in said
    assert all(c.isprintable() or c == "\n" for c in said)


# --- damaged rows

BAD = (b"", "", 0, -1, 1e308, None, "null", "[]", "{}", "[[]]", '{"a": []}', '{"arm": 7}', "2026",
       '["codes", "smoke", 2, {"train": "x"}]', '["codes", "smoke", 999999999999, {}]',
       '["codes", "smoke", 2, {"embedding": null, "train": 1e3}]', '["codes", "x", 2, {}]',
       '{"accuracy": 0.5}', '{"nonzeros": 0}', '{"accuracy": null, "nonzeros": null}')  # fmt: skip
PLACES = [
    *(("trials", name) for name in ("key", "kind", "spec", "measures", "arrays", "provenance")),
    *(("trials", name) for name in ("seconds", "finished")),
    *(("runs", name) for name in ("request", "command", "started")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), PLACES)
def test_a_changed_row_is_one_clear_error_or_none(tmp_path, table, column):
    """Many values in every column, in one row and in all, through commands that read the store."""
    whole, seen = (invented(tmp_path) / "trials.sqlite").read_bytes(), set()
    for number, value in enumerate(BAD):
        (tmp_path / "trials.sqlite").write_bytes(whole)
        which = "rowid = 1" if number % 2 else "rowid > 0"
        try:
            changed(tmp_path, f"UPDATE {table} SET {column} = ? WHERE {which}", (value,))
        except sqlite3.IntegrityError:
            continue
        commands = (("results", "codes"), ("status",), ("plan", "codes", "--scale", "smoke"))
        for command in commands[: 3 if column in ("measures", "request") else 2]:
            code = ended(*command, "--out", tmp_path)
            seen.add(code)
    assert seen <= {0, 1}


def ended(*command):
    """Return how a command ended; an error is one line."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fissile", *map(str, command)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    said = err.getvalue()
    assert end.value.code == 0 or (said.count("\n") == 1 and said.startswith("error: "))
    return end.value.code


@pytest.mark.parametrize("study", STUDIES)
def test_claims_can_do_without_any_measure_but_accuracy(study):
    works = STUDIES[study].works("smoke", 2)
    names = ("coverage",) if works[0].kind == "sampling" else ("accuracy", "nonzeros")
    frame = table(works, {work.key: dict.fromkeys(names, 0.5) for work in works})
    assert len(judged(STUDIES[study], frame)) == len(STUDIES[study].claims)


def test_a_run_of_more_trials_than_anybody_has_computed_is_not_looked_for():
    asked = Run("codes", "smoke", 10**9, {}, "")
    assert not readable(asked)
    assert readable(Run("codes", "smoke", 10**5, {}, ""))


# --- files


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_results_replace_a_file_whole_or_not_at_all(tmp_path, monkeypatch, format, step):
    invented(tmp_path / "lab")
    target = tmp_path / "table"
    target.write_text("old")
    target.chmod(0o640)
    command = ("results", "codes", "--format", format, "--out", tmp_path / "lab", "--to", target)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        assert "No space left" in called(*command, code=1).stderr
    assert target.read_text() == "old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lab", "table"]
    called(*command)
    assert len(target.read_bytes()) > 100
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_device_or_a_pipe_is_written_to_and_never_replaced(tmp_path):
    invented(tmp_path)
    called("results", "codes", "--out", tmp_path, "--to", os.devnull)
    assert not os.path.isfile(os.devnull)


def test_what_was_read_is_what_was_stored(tmp_path):
    said = called("results", "codes", "--format", "json", "--out", invented(tmp_path)).stdout
    rows = [row for row in json.loads(said) if row["measure"] == "capacity"]
    assert {row["value"] for row in rows} == {0.5, 0.6}
