"""A file is written whole or not at all, with the permissions it should have."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from fissile import FileError
from fissile._common.files import atomic_write, open_regular, read_bounded

posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_and_one_that_is_replaced(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"old")
    assert path.read_bytes() == b"old"
    with atomic_write(str(path), "w") as file:
        file.write("\N{GREEK SMALL LETTER ALPHA}")
        assert path.read_bytes() == b"old", "nothing is replaced before the end"
    assert path.read_text(encoding="utf-8") == "\N{GREEK SMALL LETTER ALPHA}"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_be_written_by_its_name(tmp_path):
    with atomic_write(tmp_path / "file") as file, open(file.name, "wb") as other:
        other.write(b"by name")
    assert (tmp_path / "file").read_bytes() == b"by name"
    with atomic_write(tmp_path / "file") as file:  # as safetensors does
        (tmp_path / "other").write_bytes(b"renamed")
        (tmp_path / "other").chmod(0o600)
        os.replace(tmp_path / "other", file.name)
    assert (tmp_path / "file").read_bytes() == b"renamed"


@pytest.mark.parametrize("error", [ValueError("torn"), KeyboardInterrupt(), SystemExit(3)])
def test_after_an_error_the_old_file_is_there(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with atomic_write(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_error_of_the_disk_is_ours(tmp_path, monkeypatch, function):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(FileError, match=r"could not write .*: No space left"), atomic_write(path):
        pass
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@posix
def test_a_really_full_disk_keeps_the_old_file(tmp_path):
    """Writes under a file size limit of the operating system, in a process of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource, signal, sys\n"
        "from fissile._common.files import FileError, atomic_write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n"
        "    with atomic_write(sys.argv[1]) as file: file.write(bytes(100_000))\n"
        "except FileError as error: print('refused:', error)"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert run.stdout.startswith("refused: could not write"), run
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_there_must_be_a_folder_and_no_folder_of_that_name(tmp_path):
    with pytest.raises(FileError, match="could not write"), atomic_write(tmp_path / "no" / "file"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="could not write"), atomic_write(tmp_path / "folder"):
        pass
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="could not write"), atomic_write(tmp_path / "file" / "a"):
        pass


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_follows_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with atomic_write(tmp_path / "file") as file:
            os.chmod(file.name, 0o600)  # as a library may leave it
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o666 & ~mask


@posix
@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o444, 0o755])
def test_an_existing_file_keeps_its_permissions(tmp_path, permissions):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(permissions)
    with atomic_write(path) as file:
        hidden = os.stat(file.name).st_mode & 0o077
        assert not hidden & ~permissions, "others could read what is being written"
        file.write(b"new")
    assert mode(path) == permissions
    assert path.read_bytes() == b"new"


@posix
def test_files_that_other_threads_create_meanwhile_are_not_world_writable(tmp_path):
    """os.umask belongs to the whole process, so nothing here may call it."""
    done = threading.Event()
    others = tmp_path / "others"
    others.mkdir()

    def create():
        number = 0
        while not done.is_set():
            (others / str(number)).touch()
            number += 1

    before = os.umask(0o022)
    thread = threading.Thread(target=create)
    thread.start()
    try:
        for number in range(200):
            with atomic_write(tmp_path / str(number)) as file:
                file.write(b"mine")
    finally:
        done.set()
        thread.join()
        os.umask(before)
    assert {mode(path) for path in others.iterdir()} == {0o644}
    assert {mode(path) for path in tmp_path.iterdir() if path.is_file()} == {0o644}


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path):
    contents = [bytes([number]) * 10_000 for number in range(8)]

    def write(content):
        with atomic_write(tmp_path / "file") as file:
            file.write(content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_umask_is_never_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("os.umask is not thread-safe"))
    with atomic_write(tmp_path / "file"):
        pass


# ---- reading


@posix
def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # which nobody ever writes to
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        for read in (open_regular, lambda path: read_bounded(path, 10)):
            with pytest.raises(FileError, match="it is not a regular file; give one"):
                read(tmp_path / name)
    for missing in (tmp_path, tmp_path / "no"):
        with pytest.raises(OSError, match="directory"):
            open_regular(missing)


def test_no_more_is_read_than_may_be(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    assert read_bounded(path, 2**62) == b"12345", "room is made for what the file has"
    with pytest.raises(FileError, match="file has more than 4 bytes; get it again"):
        read_bounded(path, 4)


def test_an_error_never_commands_the_terminal_and_is_never_long():
    error = FileError("\x1b[2J" + "a" * 10**6 + "\nadvice")
    assert str(error).isprintable()
    assert len(str(error)) < 5000
    assert str(error).endswith("\\nadvice")
