"""What an interruption, a crash or a full disk costs while features are made: nothing twice."""

import fcntl
import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from letter_encoder import Letters, whole, words

from fissile._common.errors import FileError
from fissile.data.embed import embed
from fissile.data.embed.part import Part


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ""])
@pytest.mark.parametrize("pca", [None, 3])
def test_an_interruption_at_any_batch_changes_no_byte(tmp_path, suffix, pca):
    calm = tmp_path / f"calm{suffix}"
    embed(words(), Letters(), calm, batch=5, pca=pca)
    batches = 5 + 2  # of 23 and of 9 rows
    for stop in range(batches):
        to = tmp_path / f"stopped{stop}{suffix}"
        first, second = Letters(stop=stop), Letters()
        with pytest.raises(KeyboardInterrupt):
            embed(words(), first, to, batch=5, pca=pca)
        assert not to.exists()
        embed(words(), second, to, batch=5, pca=pca)
        assert whole(to) == whole(calm)
        assert [*first.seen, *second.seen] == [5, 5, 5, 5, 3, 5, 4]  # nothing twice
        assert not Path(f"{to}.part").exists()


def test_what_a_crash_left_behind_the_finished_rows_is_cut_off(tmp_path):
    embed(words(), Letters(), tmp_path / "calm.npz", batch=5)
    to = tmp_path / "x.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=2), to, batch=5)
    with open(f"{to}.part/train.rows", "ab") as file:
        file.write(b"half a row")
    embed(words(), Letters(), to, batch=5)
    assert to.read_bytes() == (tmp_path / "calm.npz").read_bytes()


def test_a_crash_after_the_file_is_written(tmp_path, monkeypatch):
    """The target is there and so are all rows: the second run only tidies up."""
    to = tmp_path / "x.npz"
    with monkeypatch.context() as patch:
        patch.setattr(
            "fissile.data.embed.part.Part.remove", lambda part: Letters(stop=0).encode([])
        )
        with pytest.raises(KeyboardInterrupt):
            embed(words(), Letters(), to)
    before, again = to.read_bytes(), Letters()
    embed(words(), again, to)
    assert again.seen == []
    assert to.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("source", {"source": words(24)}),
        ("encoder", {"name": "numbers"}),
        ("weights", {"key": "2"}),
        ("batch", {"batch": 6}),
        ("pca", {"pca": 2}),
        ("normalize", {"normalize": True}),
        ("dtype", {"dtype": "float32"}),
    ],
)
def test_other_arguments_are_refused(tmp_path, name, change):
    to, options = tmp_path / "x.npz", {"source": words(), "batch": 5}
    with pytest.raises(KeyboardInterrupt):
        embed(encoder=Letters(stop=2), to=to, **options)
    second = Letters()
    for key in ("name", "key"):
        setattr(second, key, change.get(key, getattr(second, key)))
    changed = options | {k: v for k, v in change.items() if k not in ("name", "key")}
    with pytest.raises(FileError, match=rf"10 rows of something else: .*{name} was .*begin anew"):
        embed(encoder=second, to=to, **changed)
    embed(encoder=Letters(), to=to, **options)  # and the rows are still there


def test_a_beginning_without_rows_binds_nobody(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=0), tmp_path / "x.npz", batch=23)
    assert len(embed(words(), Letters(), tmp_path / "x.npz", batch=4).y) == 23


@pytest.mark.parametrize("text", ["", "{", "[]", '{"what": 1, "done": 2}', '{"what": {}}'])
def test_a_damaged_part(tmp_path, text):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=1), tmp_path / "x.npz", batch=4)
    (tmp_path / "x.npz.part/about.json").write_text(text)
    with pytest.raises(FileError, match="remove it to begin anew"):
        embed(words(), Letters(), tmp_path / "x.npz", batch=4)


def test_rows_that_count_but_are_gone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        embed(words(), Letters(stop=1), tmp_path / "x.npz", batch=4)
    (tmp_path / "x.npz.part/train.rows").unlink()
    with pytest.raises(FileError, match="files are not as long"):
        embed(words(), Letters(), tmp_path / "x.npz", batch=4)


def test_only_one_at_a_time(tmp_path):
    class Greedy(Letters):
        def encode(self, batch):
            with pytest.raises(FileError, match="another process works in"):
                embed(words(), Letters(), tmp_path / "x.npz")
            return super().encode(batch)

    embed(words(), Greedy(), tmp_path / "x.npz")


@contextmanager
def room_for(size):
    """Let larger files fail, as they do on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_one_clear_error_and_costs_nothing(tmp_path):
    texts = words(1500, 9)
    calm, to = (tmp_path / f"{name}.safetensors" for name in ("calm", "x"))
    embed(texts, Letters(), calm, batch=100)
    with room_for(8000), pytest.raises(FileError, match="finished rows stay there: make room"):
        embed(texts, Letters(), to, batch=100)
    done = json.loads((tmp_path / "x.safetensors.part/about.json").read_text())["done"]["train"]
    assert done == 8000 // 1000 * 100
    # All rows fit, the labels beside them do not: the part stays for the next try.
    with room_for(20_000), pytest.raises(FileError, match="could not write"):
        embed(texts, Letters(), to, batch=100)
    assert not to.exists()
    last = Letters()
    embed(texts, last, to, batch=100)
    assert last.seen == []
    assert to.read_bytes() == calm.read_bytes()


# --- tidying up


def test_killed_while_tidying_up(tmp_path, monkeypatch):
    """The target is there: nothing is encoded again, and the next run finishes the tidying."""
    to = tmp_path / "x.npz"

    def half(folder, **_):
        (folder / "train.rows").unlink()
        with open(tmp_path / "x.npz.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # still ours
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fissile.data.embed.part.shutil.rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            embed(words(), Letters(), to)
    assert sorted(os.listdir(tmp_path)) == ["x.npz", "x.npz.part"]
    before, again = to.read_bytes(), Letters()
    with pytest.raises(FileError, match="is there already"):
        embed(words(), again, to)
    assert again.seen == []
    assert to.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize(("stop", "left"), [(None, ["x.npz"]), (1, ["x.npz", "x.npz.part"])])
def test_a_finished_target_is_not_encoded_again(stop, left, tmp_path):
    to, part = tmp_path / "x.npz", tmp_path / "x.npz.part"
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            embed(words(), Letters(stop=stop), to, batch=5)
        part.rename(tmp_path / "aside")
    before = embed(words(), Letters(), to, batch=5).x.copy()
    part.mkdir() if stop is None else (tmp_path / "aside").rename(part)
    again = Letters()
    with pytest.raises(FileError, match="is there already; remove it"):
        embed(words(), again, to, batch=5)
    assert again.seen == []
    assert sorted(os.listdir(tmp_path)) == left
    assert (embed(words(), Letters(), tmp_path / "y.npz", batch=5).x == before).all()


@pytest.mark.parametrize("pca", [None, 2])
def test_nothing_is_mapped_any_more_when_the_part_is_removed(pca, tmp_path, monkeypatch):
    """Windows deletes no file that is mapped."""
    remove = Part.remove

    def check(part):
        assert str(part.folder) not in Path("/proc/self/maps").read_text()
        remove(part)

    monkeypatch.setattr(Part, "remove", check)
    embed(words(), Letters(), tmp_path / "x.npz", pca=pca)
