"""Several processes on one store, and processes that are killed."""

import contextlib
import errno
import itertools
import multiprocessing
import shutil
import sys

import pytest
from fake_stores import HERE, contents, filled, keys, outcome, outcomes, posix, resource, smear

from fissile import FileError
from fissile.lab.store import Store

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


@pytest.mark.slow
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
