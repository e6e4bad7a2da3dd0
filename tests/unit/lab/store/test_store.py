"""The store: what goes in comes out, and trouble while writing costs nothing."""

import contextlib
import itertools
import math
import os
import shutil
import sqlite3
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_stores import HERE, contents, filled, keys, outcome, outcomes, same
from hypothesis import given, settings
from hypothesis import strategies as st

import fissile
from fissile import FileError
from fissile.lab.compute import TrialResult
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.trial import Arm, Sampling, Trial, from_spec

# --- round trip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store for many examples, and numbers for their trials."""
    return tmp_path_factory.mktemp("shared"), itertools.count()


@settings(max_examples=40, deadline=None)
@given(
    measures=st.dictionaries(st.text(max_size=8), st.floats(), max_size=8),
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3),
    seconds=st.floats(0, 1e6),
)
def test_what_goes_in_comes_out(shared, measures, shapes, seconds):
    path, numbers = shared
    trial = Trial(arm=Arm("clause", 4), number=next(numbers), pictures=True)
    arrays = {f"w{i}": torch.full(shape, torch.nan) for i, shape in enumerate(shapes)}
    with Store(path) as store:
        store.add([TrialResult(trial, measures, seconds, arrays)], HERE)
    with Store(path, create=False) as store:
        (row,), time = store.rows([trial.key]), store.times()[-1]
        found = store.arrays([trial.key]).get(trial.key, {})
    assert (row.key, row.seconds, row.provenance) == (trial.key, seconds, HERE)
    assert (time.kind, time.seconds, time.device) == ("network", seconds, HERE.device)
    assert from_spec(time.kind, time.spec) == trial
    assert row.measures.keys() == measures.keys()
    assert all(same(row.measures[name], measures[name]) for name in measures)
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[k], v, equal_nan=True) for k, v in arrays.items())
    assert abs(datetime.now(UTC) - datetime.fromisoformat(row.finished)).total_seconds() < 60


def test_the_database_holds_plain_json(tmp_path):
    with Store(tmp_path) as store:
        store.add([outcome(0, a=math.nan, b=math.inf, c=-math.inf, d=0.1)], HERE)
    with contextlib.closing(sqlite3.connect(tmp_path / "trials.sqlite")) as db:
        found = db.execute("SELECT measures, arrays FROM trials").fetchall()
    assert found == [('{"a": null, "b": "inf", "c": "-inf", "d": 0.1}', None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.bool])
def test_arrays_keep_their_type(tmp_path, dtype):
    with Store(tmp_path) as store:
        array = torch.eye(3).to(dtype).requires_grad_(dtype.is_floating_point)
        store.add([TrialResult(Sampling(), {}, 0.0, {"w": array})], HERE)
        found = store.arrays([Sampling().key])[Sampling().key]
        assert found["w"].dtype == array.detach().numpy().dtype


def test_rows_come_in_the_order_asked_for(tmp_path):
    with Store(tmp_path) as store:
        store.add(outcomes(*range(1200)), HERE)  # more than SQLite takes at once
        asked = keys(*reversed(range(1300)), 7, 7)
        assert [row.key for row in store.rows(asked)] == keys(*reversed(range(1200)), 7, 7)
        assert store.finished(asked) == set(keys(*range(1200)))
        assert store.count() == 1200
        assert list(store.rows([])) == []
        assert store.finished(iter([])) == set()


def test_the_first_result_stays(tmp_path):
    with Store(tmp_path) as store:
        store.add([outcome(0, who=1)], HERE)
        store.add([outcome(0, who=2), outcome(1, who=2)], replace(HERE, device="another"))
        assert [row.measures["who"] for row in store.rows(keys(0, 1))] == [1, 2]
        assert store.rows(keys(0))[0].provenance == HERE


def test_all_outcomes_or_none(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(FileError, match="NOT NULL"):
            store.add([outcome(0), replace(outcome(1), seconds=math.nan)], HERE)
        assert store.count() == 0
        store.add(outcomes(0), HERE)
        assert store.count() == 1


def test_runs(tmp_path):
    first = Run("scaling", "quick", None, {}, "fissile run scaling", "2025-01-01T00:00:00+00:00")
    other = Run("scaling", "quick", 5, {"lr": 3e-3, "moments": "fresh"}, "fissile run --trials 5")
    with Store(tmp_path) as store:
        assert store.runs() == []
        for run in (other, first):
            store.note_run(run)
        assert store.runs() == [first, other]
        again = replace(other, command="fissile run -t 5", started="1970-01-01T00:00:00+00:00")
        store.note_run(replace(again, changes=dict(reversed(other.changes.items()))))
        assert store.runs() == [again, first]


def test_runs_are_in_the_order_of_asking_whatever_the_clock_says(tmp_path):
    ahead, now = (
        Run("capacity", "smoke", trials, {}, "", f"{year}-01-01T00:00:00+00:00")
        for trials, year in ((1, 2036), (2, 2026))
    )
    with Store(tmp_path / "here") as store, Store(tmp_path / "there") as other:
        store.note_run(ahead)
        store.note_run(now)
        assert store.runs() == [now, ahead]
        other.note_run(replace(now, trials=3))
        other.note_run(replace(ahead, command="of another clock"))
        for _ in range(2):  # what is known here keeps its place
            store.take(other)
            assert store.runs() == [replace(now, trials=3), now, ahead]


def test_a_copy_is_a_store(tmp_path):
    filled(tmp_path / "one", 1, 2)
    assert sorted(contents(tmp_path / "one")) == ["trials.sqlite"]
    odd = tmp_path / "50% of #1? ä"
    shutil.copytree(tmp_path / "one", odd)
    filled(odd, 2, 3)
    with Store(odd, create=False) as store:
        assert store.finished(keys(1, 2, 3, 4)) == set(keys(1, 2, 3))


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(FileError, match=r"closed database.*open the store again"):
        store.count()


# --- trouble while writing


def test_a_full_disk_costs_nothing_stored(tmp_path):
    with Store(tmp_path) as store:
        store.add(outcomes(*range(50)), HERE)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(FileError, match=r"disk is full; .* free some space.* not repeated"):
            store.add(outcomes(*range(50, 500)), HERE)
        assert store.finished(keys(*range(500))) == set(keys(*range(50)))
        store._db.execute("PRAGMA max_page_count = 100000")
        store.add(outcomes(*range(50, 500)), HERE)
        assert store.count() == 500


def test_a_store_that_stays_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("fissile.lab.store.database._PATIENCE", 0.05)
    filled(tmp_path, 1)
    with Store(tmp_path) as store, Store(tmp_path) as other:
        other._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(FileError, match=r"locked; what was stored is kept: wait"):
            store.add(outcomes(2), HERE)
        assert len(store.rows(keys(1, 2))) == 1
        other._db.execute("ROLLBACK")
        store.add(outcomes(2), HERE)


def test_an_interrupted_write_leaves_nothing_open(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(KeyboardInterrupt), store._transaction():
            raise KeyboardInterrupt
        store.add(outcomes(1), HERE)
        assert store.count() == 1


# --- provenance


def test_provenance_of_this_machine():
    here = Provenance.here("cpu")
    assert here.version == fissile.__version__
    assert here.torch == str(torch.__version__)
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.device.endswith(f", {os.cpu_count()} cores")
    assert Provenance(**asdict(here)) == here


def test_provenance_never_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert Provenance.here("cpu").commit == ""
    monkeypatch.setattr(fissile, "__file__", str(tmp_path / "a" / "b" / "__init__.py"))
    assert Provenance.here("cpu").commit == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert Provenance.here("cuda:1").device == "GPU cuda:1"
    monkeypatch.undo()
    assert Provenance.here("no such device").device == "no such device"
    assert Provenance.here("cuda:77").device == "cuda:77"
    assert Provenance.here("meta").device == "meta"


def test_a_processor_without_a_model(monkeypatch):
    def gone(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", gone)
    for name, expected in (("i486", "i486"), ("", "riscv")):
        monkeypatch.setattr("platform.processor", lambda name=name: name)
        monkeypatch.setattr("platform.machine", lambda: "riscv")
        assert Provenance.here("cpu").device.startswith(f"{expected}, ")


def test_a_store_takes_what_another_has_finished(tmp_path):
    ours, theirs = outcome(0), [outcome(0), outcome(1)]
    with Store(tmp_path / "here") as here, Store(tmp_path / "there") as there:
        here.add([ours], HERE)
        there.add([replace(theirs[0], seconds=99.0), theirs[1]], HERE)
        there.note_run(Run("capacity", "smoke", None, {}, "fissile run capacity"))
        assert here.take(there) == 1
        assert here.take(there) == 0
        assert here.count() == 2
        rows = {row.key: row for row in here.rows([one.work.key for one in theirs])}
        assert rows[ours.work.key].seconds == ours.seconds  # the first result stays
        assert [run.study for run in here.runs()] == ["capacity"]


def test_nothing_is_taken_from_a_damaged_store(tmp_path):
    with Store(tmp_path / "here") as here, Store(tmp_path / "there") as there:
        there.add([outcome(0), outcome(1)], HERE)
        there._db.execute("UPDATE trials SET measures = '{' WHERE rowid = 2")
        with pytest.raises(FileError, match="damaged"):
            here.take(there)
        assert here.count() == 0
