"""The store: what was reported as stored is there, and nobody else's file is ever touched."""

import contextlib
import errno
import itertools
import math
import multiprocessing
import os
import pickle
import shutil
import sqlite3
import sys
import tempfile
import zipfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fissile
from fissile import FileError
from fissile.lab.compute import Outcome
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.trial import Arm, Sampling, Trial, from_spec

HERE = Provenance("0.1.0", "c0ffee", "2.0", "abacus", "3.11")
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks and signals")
resource = None if sys.platform == "win32" else __import__("resource")


def outcome(number, **measures):
    return Outcome(Sampling(number=number), measures or {"coverage": number / 7}, 0.5)


def outcomes(*numbers):
    return [outcome(number) for number in numbers]


def key(number):
    return Sampling(number=number).key


def keys(*numbers):
    return [key(number) for number in numbers]


def filled(path, *numbers):
    with Store(path) as store:
        store.add(outcomes(*numbers), HERE)
    return path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


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
        store.add([Outcome(trial, measures, seconds, arrays)], HERE)
    with Store(path, create=False) as store:
        (row,) = store.rows([trial.key])
    assert (row.key, row.kind, row.seconds, row.provenance) == (trial.key, "network", seconds, HERE)
    assert from_spec(row.kind, row.spec) == trial
    assert row.measures.keys() == measures.keys()
    assert all(same(row.measures[name], measures[name]) for name in measures)
    assert row.arrays.keys() == arrays.keys()
    assert all(np.array_equal(row.arrays[k], v, equal_nan=True) for k, v in arrays.items())
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
        store.add([Outcome(Sampling(), {}, 0.0, {"w": array})], HERE)
        (row,) = store.rows([Sampling().key])
        assert row.arrays["w"].dtype == array.detach().numpy().dtype


def test_rows_come_in_the_order_asked_for(tmp_path):
    with Store(tmp_path) as store:
        store.add(outcomes(*range(1200)), HERE)  # more than SQLite takes at once
        asked = keys(*reversed(range(1300)), 7, 7)
        assert [row.key for row in store.rows(asked)] == keys(*reversed(range(1200)), 7, 7)
        assert store.finished(asked) == set(keys(*range(1200)))
        assert store.count() == 1200
        assert store.rows([]) == []
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
        assert store.runs() == [other, first]
        again = replace(
            first, command="fissile run scaling -q", started="2099-01-01T00:00:00+00:00"
        )
        store.note_run(again)
        store.note_run(first)  # the older start does not come back
        store.note_run(replace(other, changes=dict(reversed(other.changes.items()))))
        assert store.runs() == [again, other]


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


# --- files that are not a store


def foreign(file, *statements):
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return (filled(tmp_path_factory.mktemp("whole"), *range(100)) / "trials.sqlite").read_bytes()


def cut(file, size):
    os.truncate(file, size)


def smear(file, start, bytes_):
    with open(file, "r+b") as opened:
        opened.seek(start)
        opened.write(bytes_)


BAD = {
    "text": (lambda f: f.write_text("dear diary\n" * 500), "no store of fissile"),
    "a short text": (lambda f: f.write_text("hi"), "no store of fissile"),
    "empty": (lambda f: cut(f, 0), "no store of fissile"),
    "header only": (lambda f: cut(f, 100), "no store|damaged"),
    "cut": (lambda f: cut(f, f.stat().st_size // 2), "damaged"),
    "cut askew": (lambda f: cut(f, f.stat().st_size - 1), "damaged"),
    "pages of zeros": (lambda f: smear(f, 4096, bytes(f.stat().st_size - 4096)), "damaged"),
    "pages of noise": (lambda f: smear(f, 8192, b"\x93" * (f.stat().st_size - 8192)), "damaged"),
    "newer": (lambda f: foreign(f, "PRAGMA user_version = 2"), "version 2.*update fissile"),
    "older": (lambda f: foreign(f, "PRAGMA user_version = 0"), "version 0"),
    "other owner": (lambda f: foreign(f, "PRAGMA application_id = 7"), "no store of fissile"),
    "other tables": (lambda f: foreign(f, "ALTER TABLE trials RENAME TO tried"), "tables are not"),
    "other names": (
        lambda f: foreign(f, "ALTER TABLE runs RENAME started TO s"),
        "tables are not",
    ),
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


@settings(max_examples=60, deadline=None)
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


def test_a_damaged_row_is_named(tmp_path):
    filled(tmp_path, 1, 2)
    for column, value in [
        ("arrays", b"PK no zip"),
        ("measures", '{"a": {}}'),
        ("measures", "{" * 10_000),
        ("spec", "not json"),
        ("provenance", '{"by": "me"}'),
        ("provenance", 3),
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


def test_a_damaged_run_is_an_error(tmp_path):
    with Store(tmp_path) as store:
        store._db.execute("INSERT INTO runs VALUES ('[1]', '', '')")
        with pytest.raises(FileError, match="list of runs is damaged"):
            store.runs()


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
                store.rows(keys(1))
    assert not (tmp_path / "sprung").exists()


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


# --- other processes

WORKERS = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
WORKERS.set_forkserver_preload(["fissile.lab.store"])  # torch is imported once for all of them


def answer(path, pipe):
    """Call methods of a store on request."""
    with Store(path) as store:
        while request := pipe.recv():
            name, *arguments = request
            pipe.send(getattr(store, name)(*arguments))


def write_forever(path, pipe):
    with Store(path) as store:
        for number in itertools.count(0, 3):
            store.add(outcomes(*range(number, number + 3)), HERE)
            pipe.send(number + 3)


def write_with_another(path, pipe):
    me, seen = pipe.recv(), {}
    with Store(path) as store:
        for start in range(0, 120, 6):
            mine = range(start, start + 9) if me else range(114 - start, 123 - start)
            store.add([outcome(number, who=me) for number in mine], HERE)
            for row in store.rows(keys(*mine)):
                seen.setdefault(row.key, row.measures["who"])
            if start == 0:
                pipe.send("ready")
                pipe.recv()
    pipe.send(seen)


def write_until_full(path, pipe):
    with Store(path) as store:
        store.add(outcomes(*range(10)), HERE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        for number in itertools.count(10):
            try:
                store.add(outcomes(number), HERE)
            except FileError as error:
                pipe.send((number, str(error), store.count()))
                break
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with Store(path, create=False) as store:
        pipe.send(store.count())


@pytest.fixture
def start():
    """Run a function on a store in another process; answer with the process and a pipe to it."""
    running = []

    def start(work, path):
        here, there = WORKERS.Pipe()
        process = WORKERS.Process(target=work, args=(path, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
        return process, here

    yield start
    for process, pipe in running:
        process.kill()
        process.join()
        process.close()
        pipe.close()


def ask(pipe, *request):
    pipe.send(request)
    assert pipe.poll(60)
    return pipe.recv()


@posix
def test_two_writers(tmp_path, start):
    path = tmp_path / "new"  # which both of them make
    pipes = [start(write_with_another, path)[1] for _ in range(2)]
    for me, pipe in enumerate(pipes):
        pipe.send(me)
    assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
    for pipe in pipes:
        pipe.send("go")
    seen = [pipe.recv() for pipe in pipes]
    with Store(path, create=False) as store:
        rows = {row.key: row.measures["who"] for row in store.rows(keys(*range(200)))}
    assert rows.keys() == set(keys(*range(123)))
    assert set(rows.values()) == {0, 1}
    assert all(rows[key] == who for one in seen for key, who in one.items())


@posix
def test_a_kill_loses_nothing(tmp_path, start):
    process, pipe = start(write_forever, tmp_path)
    while pipe.recv() < 60:
        pass
    process.kill()
    process.join()
    stored = 60
    with contextlib.suppress(EOFError):
        while True:
            stored = pipe.recv()
    assert (tmp_path / "trials.sqlite-wal").stat().st_size > 0
    torn = halfway(tmp_path, tmp_path.with_name("torn"))
    for folder in (tmp_path, torn):
        with Store(folder, create=False) as store:
            assert set(keys(*range(stored))) <= store.finished(keys(*range(stored + 3)))
        assert sorted(contents(folder)) == ["trials.sqlite"]


def halfway(killed, folder):
    """Make what a kill leaves while the log is being copied into the file, page after page."""
    shutil.copytree(killed, folder)
    Store(folder).close()
    later = (folder / "trials.sqlite").read_bytes()
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    smear(folder / "trials.sqlite", 0, later[:4096])
    assert (folder / "trials.sqlite").stat().st_size < len(later)
    return folder


@posix
def test_a_damaged_file_with_a_log_is_left_alone(tmp_path, start):
    filled(tmp_path, *range(300))
    process, pipe = start(answer, tmp_path)
    ask(pipe, "add", outcomes(300), HERE)
    process.kill()
    process.join()
    smear(tmp_path / "trials.sqlite", 4096 * 8, b"\x93" * 4096 * 8)
    before = contents(tmp_path)
    for create in (True, False):
        with pytest.raises(FileError, match="damaged"):
            Store(tmp_path, create=create)
    after = contents(tmp_path)
    before.pop("trials.sqlite-shm")  # an index of the log, which SQLite makes anew
    after.pop("trials.sqlite-shm")
    assert after == before


@posix
def test_a_disk_that_really_takes_no_more(tmp_path, start):
    _, pipe = start(write_until_full, tmp_path)
    number, message, count = pipe.recv()
    assert count == number > 10
    assert "what was stored is kept" in message
    assert pipe.recv() == number
    with Store(tmp_path) as store:
        assert store.finished(keys(*range(number + 1))) == set(keys(*range(number)))
        store.add(outcomes(number), HERE)


@posix
def test_claims(tmp_path, start):
    process, pipe = start(answer, tmp_path)
    with Store(tmp_path) as store:
        assert store.claim(keys(1, 2)) == set(keys(1, 2))
        assert store.claim(keys(1, 2)) == set(keys(1, 2))  # one's own
        assert ask(pipe, "claim", keys(1, 2, 3, 4)) == set(keys(3, 4))
        assert store.claim(keys(3, 4, 5)) == set(keys(5))
        store.release(keys(1, 4, 9))  # 4 is not ours to release
        assert store.claim(keys(4)) == set()
        assert ask(pipe, "claim", keys(1, 2)) == set(keys(1))
        store.add(outcomes(2), HERE)
        assert ask(pipe, "claim", keys(2)) == set()  # finished
        with Store(tmp_path) as other:  # neither opening nor closing one costs the other's claims
            assert other.claim(keys(5, 6)) == set(keys(6))
        assert ask(pipe, "claim", keys(5, 6)) == set(keys(6))
        process.kill()
        process.join()
        assert store.claim(keys(1, 2, 3, 4, 5, 6)) == set(keys(1, 3, 4, 5, 6))
    _, pipe = start(answer, tmp_path)
    assert ask(pipe, "claim", keys(1, 3)) == set(keys(1, 3))


def test_a_finished_trial_is_not_claimed(tmp_path):
    with Store(tmp_path) as store:
        assert store.claim(keys(1)) == set(keys(1))
        store.add(outcomes(1, 2), HERE)
        assert not store._mine  # what is stored needs no lock
        assert store.claim(keys(1, 2, 3)) == set(keys(3))


@posix
@pytest.mark.parametrize("missing", ["platform", "locks"])
def test_claims_without_locks(tmp_path, monkeypatch, missing):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if missing == "locks":
        monkeypatch.setattr("fcntl.lockf", refuse)
    with Store(tmp_path) as store, monkeypatch.context() as patch:
        if missing == "platform":
            patch.setattr(sys, "platform", "win32")
        assert store.claim(keys(1, 2)) == set(keys(1, 2))
        store.release(keys(1))
        assert store.claim(keys(1)) == set(keys(1))


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
