"""The unfinished part of a download: one process at a time, and whole before it takes its place."""

import errno
import fcntl
import os

import pytest
from web_server import CONTENT, MD5, Handler, beside, serving

from fissile import FileError
from fissile.data.download import download


@pytest.fixture
def site():
    with serving() as server:
        yield server.site


@pytest.fixture
def to(tmp_path):
    return tmp_path / "data" / "a.tar.gz"


def test_two_at_once(site, to):
    told = []

    def second(done, total):
        if not told:
            with pytest.raises(FileError, match="another process is downloading this; wait for it"):
                download(site.url, to, md5=MD5)
            told.append(done)

    download(site.url, to, md5=MD5, progress=second)
    assert told
    assert to.read_bytes() == CONTENT
    assert len(site.asked) == 1
    assert beside(to) == ["a.tar.gz"]


def test_a_disk_without_locks(site, to, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    assert download(site.url, to, md5=MD5).read_bytes() == CONTENT


def test_a_part_that_another_program_changes(site, to):
    def meddle(done, total):
        if done == total:
            with open(to.parent / "a.tar.gz.part", "ab") as part:
                part.write(b"more")

    with pytest.raises(FileError, match=r"has 1,\d+,\d+ bytes, not 1,048,576.*try again"):
        download(site.url, to, progress=meddle)
    assert beside(to) == []


def test_a_server_that_always_sends_a_part(site, to, monkeypatch):
    send = Handler.send_response
    monkeypatch.setattr(Handler, "send_response", lambda self, _: send(self, 206))
    with pytest.raises(FileError, match="sends a part when asked for the whole; get it by hand"):
        download(site.url, to)
    assert len(site.asked) == 2
    assert beside(to) == []


def test_a_file_is_kept_until_the_new_one_is_there(site, to):
    to.parent.mkdir()
    to.write_bytes(b"old")
    download(site.url, to)
    assert (to.read_bytes(), site.asked) == (b"old", [])
    site.cut = 1000
    with pytest.raises(FileError, match="cut after"):
        download(site.url, to, md5=MD5)
    assert to.read_bytes() == b"old"
    site.cut = None
    download(site.url, to, md5=MD5)
    assert to.read_bytes() == CONTENT
