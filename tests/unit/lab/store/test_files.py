"""Files and folders that are no store, or cannot be written: refused, and left as they are."""

import contextlib
import math
import os
import pickle
import shutil
import sqlite3
import tempfile
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from fake_stores import HERE, contents, cut, filled, key, keys, outcomes, posix, smear
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile import FileError
from fissile.lab.store import Store

# --- files that are not a store


def foreign(file, *statements):
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return (filled(tmp_path_factory.mktemp("whole"), *range(100)) / "trials.sqlite").read_bytes()


BAD = {
    "text": (lambda f: f.write_text("dear diary\n" * 500), "no store of fissile"),
    "a short text": (lambda f: f.write_text("hi"), "no store of fissile"),
    "empty": (lambda f: cut(f, 0), "no store of fissile"),
    "header only": (lambda f: cut(f, 100), "no store|damaged"),
    "cut": (lambda f: cut(f, f.stat().st_size // 2), "damaged"),
    "cut askew": (lambda f: cut(f, f.stat().st_size - 1), "damaged"),
    "pages of zeros": (lambda f: smear(f, 4096, bytes(f.stat().st_size - 4096)), "damaged"),
    "pages of noise": (lambda f: smear(f, 8192, b"\x93" * (f.stat().st_size - 8192)), "damaged"),
    "newer": (lambda f: foreign(f, "PRAGMA user_version = 3"), "version 3.*update fissile"),
    "older": (lambda f: foreign(f, "PRAGMA user_version = 0"), "version 0"),
    "other owner": (lambda f: foreign(f, "PRAGMA application_id = 7"), "no store of fissile"),
    "other tables": (lambda f: foreign(f, "ALTER TABLE trials RENAME TO tried"), "tables are not"),
    "other names": (
        lambda f: foreign(f, "ALTER TABLE runs RENAME started TO s"),
        "tables are not",
    ),
    "a trigger": (
        lambda f: foreign(
            f, "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END"
        ),
        "the trigger t is none of a store's",
    ),
    "a view": (lambda f: foreign(f, "CREATE VIEW v AS SELECT 1"), "the view v is none"),
    "an index": (lambda f: foreign(f, "CREATE INDEX i ON trials (kind)"), "the index i is none"),
    "one more table": (lambda f: foreign(f, "CREATE TABLE t (a)"), "the tables are not"),
    "odd letters": (lambda f: smear(f, f.read_bytes().index(b"TABLE trials"), b"\xdf"), "damaged"),
    "foreign": (lambda f: (f.unlink(), foreign(f, "CREATE TABLE t (a)")), "no store of fissile"),
    "foreign, no table": (lambda f: (f.unlink(), foreign(f, "VACUUM")), "no store of fissile"),
    "foreign, with log": (
        lambda f: (f.unlink(), foreign(f, "PRAGMA journal_mode = WAL", "CREATE TABLE t (a)")),
        "no store of fissile",
    ),
    "folder": (lambda f: (f.unlink(), f.mkdir()), "unable to open"),
    "dangling link": (lambda f: (f.unlink(), f.symlink_to("nowhere")), "unable to open|no store"),
}


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_and_left_alone(tmp_path, whole, name, create):
    file = tmp_path / "trials.sqlite"
    file.write_bytes(whole)
    spoil, message = BAD[name]
    spoil(file)
    before = contents(tmp_path) if file.is_file() else None
    with pytest.raises(FileError, match=rf"{tmp_path}.*({message})") as caught:
        Store(tmp_path, create=create)
    assert "\n" not in str(caught.value)
    assert before is None or contents(tmp_path) == before
    assert [one.name for one in tmp_path.iterdir()] == ["trials.sqlite"]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_torn_or_flipped_file_never_does_anything_else(data, whole, tmp_path_factory):
    folder, size = tmp_path_factory.mktemp("torn"), len(whole)
    file = folder / "trials.sqlite"
    file.write_bytes(whole)
    if data.draw(st.booleans()):
        cut(file, data.draw(st.integers(0, size - 1)))
        before = contents(folder)
        with pytest.raises(FileError):
            Store(folder)
        assert contents(folder) == before
        return
    position = data.draw(st.integers(0, size - 1))
    smear(file, position, bytes([whole[position] ^ data.draw(st.integers(1, 255))]))
    # A flipped bit of a measure is another measure; everything else is an error of ours.
    with contextlib.suppress(FileError), Store(folder) as store:
        store.runs()
        store.rows(keys(*range(100)))
        store.add(outcomes(*range(120)), HERE)


MADE_BY = '{"version": %s, "commit": "", "torch": "", "device": "", "python": ""}'


def test_a_damaged_row_is_named(tmp_path):
    filled(tmp_path, 1, 2)
    for column, value in [
        ("measures", '{"a": {}}'),
        ("measures", "{" * 10_000),
        ("measures", "[1]"),
        ("measures", '{"\\ud800": 1}'),
        ("measures", b"{}"),
        ("provenance", '{"by": "me"}'),
        ("provenance", 3),
        ("provenance", MADE_BY % '["a", "list"]'),
        ("provenance", MADE_BY % '"\\ud800"'),
        ("seconds", "long"),
        ("seconds", -1.0),
        ("seconds", math.inf),
        ("finished", b"2026"),
        ("finished", "yesterday"),
        ("finished", 7),
    ]:
        with contextlib.closing(sqlite3.connect(tmp_path / "trials.sqlite")) as db, db:
            whole = db.execute(f"SELECT {column} FROM trials WHERE key = ?", keys(2)).fetchone()
            db.execute(f"UPDATE trials SET {column} = ? WHERE key = ?", (value, key(2)))
        with Store(tmp_path) as store:
            assert len(store.rows(keys(1))) == 1
            with pytest.raises(FileError, match=rf"{key(2)} is damaged"):
                store.rows(keys(1, 2))
        with contextlib.closing(sqlite3.connect(tmp_path / "trials.sqlite")) as db, db:
            db.execute(f"UPDATE trials SET {column} = ? WHERE key = ?", (*whole, key(2)))
    with Store(tmp_path) as store:
        assert len(store.rows(keys(1, 2))) == 2


@pytest.mark.parametrize(
    "values",
    [
        ("[1]", "", ""),
        ('["codes", "smoke", 1, {}]', b"", ""),
        ('[["codes"], "smoke", 1, {}]', "", ""),
        ('["codes", null, 1, {}]', "", ""),
        ('["codes", "smoke", "1", {}]', "", ""),
        ('["codes", "smoke", true, {}]', "", ""),
        ('["codes", "smoke", 0, {}]', "", ""),
        ('["codes", "smoke", 1e999, {}]', "", ""),
        ('["codes", "smoke", 1, []]', "", ""),
        ('["codes", "smoke", 1, {"train": {}}]', "", ""),
        ('["codes", "smoke", 1, {"train": NaN}]', "", ""),
        ('["codes", "smoke", 1, {"train": 1' + "0" * 400 + "}]", "", ""),
        ('["codes", "smoke", 1, {"data": "\\ud800"}]', "", ""),
    ],
)
def test_a_damaged_run_is_an_error(tmp_path, values):
    with Store(tmp_path) as store:
        store._db.execute("INSERT INTO runs VALUES (?, ?, ?, 1)", values)
        with pytest.raises(FileError, match="list of runs is damaged"):
            store.runs()


def test_damaged_settings_are_an_error_where_they_are_read(tmp_path):
    filled(tmp_path / "there", 1, 2)
    with Store(tmp_path / "there") as there, Store(tmp_path / "here") as here:
        for spec in ("not json", "[]", b"{}"):
            there._db.execute("UPDATE trials SET spec = ? WHERE key = ?", (spec, key(2)))
            with pytest.raises(FileError, match="a trial is damaged"):
                there.times()
            with pytest.raises(FileError, match=rf"there/trials.sqlite: the trial {key(2)} is dam"):
                here.take(there)
            assert here.count() == 0


def test_arrays_are_read_only_when_asked_for_and_only_so_many(tmp_path, monkeypatch):
    blob = BytesIO()
    np.savez_compressed(blob, w1=np.zeros(50 << 20, np.uint8))
    assert len(blob.getvalue()) < 100_000
    filled(tmp_path / "there", 1, 2)
    monkeypatch.setattr("fissile.lab.store._ROOM", 40 << 20)
    with Store(tmp_path / "there") as store, Store(tmp_path / "here") as here:
        for bad in (blob.getvalue(), b"PK no zip", "text", 3):
            store._db.execute("UPDATE trials SET arrays = ? WHERE key = ?", (bad, key(2)))
            assert len(store.rows(keys(1, 2))) == 2
            assert store.arrays(keys(1)) == {}
            tracemalloc.start()
            for read in (lambda: store.arrays(keys(1, 2)), lambda: here.take(store)):
                with pytest.raises(FileError, match=f"the trial {key(2)} is damaged"):
                    read()
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
            tracemalloc.stop()
        # Many trials share the room of one.
        small = BytesIO()
        np.savez_compressed(small, w1=np.zeros(25 << 20, np.uint8))
        store._db.execute("UPDATE trials SET arrays = ?", (small.getvalue(),))
        assert store.arrays(keys(2))[key(2)]["w1"].nbytes == 25 << 20
        with pytest.raises(FileError, match="larger than any that fissile stores"):
            store.arrays(keys(1, 2))


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    npz, npy = BytesIO(), BytesIO()
    np.save(npy, np.array([Trap()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(npz, "w") as zipped:
        zipped.writestr("w1.npy", npy.getvalue())
    filled(tmp_path / "store", 1)
    with Store(tmp_path / "store") as store:
        for blob in (npz.getvalue(), npy.getvalue(), pickle.dumps(Trap())):
            store._db.execute("UPDATE trials SET arrays = ?", (blob,))
            with pytest.raises(FileError, match=r"is damaged \(.*\)"):
                store.arrays(keys(1))
    assert not (tmp_path / "sprung").exists()


# --- two processes that make one store


def test_a_store_that_another_process_has_just_made_is_never_replaced(tmp_path, monkeypatch):
    file = tmp_path / "store" / "trials.sqlite"

    def no_links(*_):
        if not file.exists():
            monkeypatch.undo()
            filled(tmp_path / "store", *range(40))  # the other process is faster
            monkeypatch.setattr(os, "link", no_links)
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    with Store(tmp_path / "store") as store:
        assert store.count() == 40
    assert contents(tmp_path / "store").keys() == {"trials.sqlite"}


def test_a_store_is_made_without_links_too(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "refused")

    monkeypatch.setattr(os, "link", refused)
    filled(tmp_path / "one", 1)
    assert contents(tmp_path / "one").keys() == {"trials.sqlite"}
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(FileError, match="refused"):
        Store(tmp_path / "two")
    assert contents(tmp_path / "two") == {}


def test_a_store_whose_place_is_taken_is_waited_for(tmp_path, monkeypatch):
    filled(tmp_path / "made", 1)
    file = tmp_path / "store" / "trials.sqlite"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(
        "fissile.lab.store.database.time.sleep",
        lambda _: os.replace(tmp_path / "made" / file.name, file),
    )
    assert Store(file.parent).count() == 1


def test_a_log_may_vanish_at_any_time(tmp_path, monkeypatch):
    filled(tmp_path, 1)
    exists = Path.exists
    vanishing = lambda path: True if path.name.endswith("-wal") else exists(path)  # noqa: E731
    monkeypatch.setattr(Path, "exists", vanishing)
    for create in (True, False):
        with Store(tmp_path, create=create) as store:
            assert store.count() == 1


def test_a_place_that_cannot_be_a_store(tmp_path):
    with pytest.raises(FileError, match=r"there is no store here; fill one with `fissile run`"):
        Store(tmp_path / "none", create=False)
    with pytest.raises(FileError, match="there is no store here"):
        Store(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("mine")
    for create in (True, False):
        with pytest.raises(FileError, match="a store is a folder, and this is a file"):
            Store(file, create=create)
    with pytest.raises(FileError, match="Not a directory"):
        Store(file / "below")
    assert file.read_text() == "mine"
    filled(tmp_path / "a" / "b" / "c", 1)


# --- folders that cannot be written


@contextlib.contextmanager
def unprivileged():
    """Be somebody who is bound by the rights to files, which root is not."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)


@contextlib.contextmanager
def locked_up(folder):
    for one in (*folder.iterdir(), folder):
        one.chmod(0o555)
    try:
        with unprivileged():
            yield
    finally:
        for one in (folder, *folder.iterdir()):
            one.chmod(0o755)


@pytest.fixture
def public():
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@posix
def test_a_store_that_can_only_be_read(public):
    filled(public / "store", 1, 2)
    before = contents(public / "store")
    with locked_up(public / "store"):
        with Store(public / "store", create=False) as store:
            assert [row.key for row in store.rows(keys(2, 1))] == keys(2, 1)
            with pytest.raises(FileError, match="see that you may write"):
                store.add(outcomes(3), HERE)
            with pytest.raises(FileError, match=r"Permission denied.*see that you may write"):
                store.claim(keys(3))
        with pytest.raises(FileError, match="see that you may write"):
            Store(public / "store")
    assert contents(public / "store") == before


@posix
def test_a_file_that_can_only_be_read(public):
    filled(public / "store", 1)
    (public / "store").chmod(0o777)
    (public / "store" / "trials.sqlite").chmod(0o444)
    with unprivileged():
        with pytest.raises(FileError, match="readonly database; see that you may write"):
            Store(public / "store")
        with Store(public / "store", create=False) as store:
            assert store.count() == 1


@posix
def test_a_folder_that_cannot_be_written(public):
    (public / "empty").mkdir()
    with locked_up(public / "empty"):
        for path in (public / "empty", public / "empty" / "below"):
            with pytest.raises(FileError, match="see that you may write"):
                Store(path)
    assert list((public / "empty").iterdir()) == []
