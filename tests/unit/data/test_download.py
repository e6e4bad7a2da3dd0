"""Downloads from a real server: cut, resumed, changed, refused."""

import errno
import http.client
import json
import os
import threading

import pytest
from web_server import CONTENT, MD5, Handler, beside, serving

from fissile import FileError, FissileError
from fissile.data import download as module
from fissile.data.download import download

OTHER = CONTENT[::-1]


@pytest.fixture
def site():
    with serving() as server:
        yield server.site


@pytest.fixture
def to(tmp_path):
    return tmp_path / "data" / "a.tar.gz"


def cut(site, to, at=300_000):
    """A first try that loses its connection."""
    site.cut = at
    with pytest.raises(FileError, match=r"cut after 300,000 of 1,048,576 bytes.*try again"):
        download(site.url, to, md5=MD5)
    site.cut = None
    assert beside(to) == ["a.tar.gz.part", "a.tar.gz.part.json"]
    assert (to.parent / "a.tar.gz.part").stat().st_size == at


def test_a_file_comes_whole(site, to):
    seen = []
    assert download(site.url, to, md5=MD5, progress=lambda *at: seen.append(at)) == to
    assert to.read_bytes() == CONTENT
    assert beside(to) == ["a.tar.gz"]
    assert (seen[0], seen[-1]) == ((0, len(CONTENT)), (len(CONTENT), len(CONTENT)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 3
    download(site.url, to, md5=MD5)
    download(site.url, to)
    assert len(site.asked) == 1, "what is there is not downloaded again"
    to.write_bytes(b"damaged")
    download(site.url, to, md5=MD5)
    assert to.read_bytes() == CONTENT


@pytest.mark.parametrize("etag", ['"one"', 'W/"one"', ""])
@pytest.mark.parametrize("modified", ["Thu, 31 Aug 2017 10:50:27 GMT", ""])
def test_a_cut_download_goes_on(site, to, etag, modified):
    site.etag, site.modified = etag, modified
    cut(site, to)
    seen = []
    download(site.url, to, md5=MD5, progress=lambda done, total: seen.append((done, total)))
    assert to.read_bytes() == CONTENT
    assert seen[0] == (300_000, len(CONTENT))
    assert site.asked[1]["Range"] == "bytes=300000-"
    strong = "" if etag.startswith("W/") else etag
    assert site.asked[1].get("If-Range", "") == (strong or modified)
    assert beside(to) == ["a.tar.gz"]


def test_a_server_that_knows_no_ranges(site, to):
    cut(site, to)
    site.ranges = False
    download(site.url, to, md5=MD5)
    assert to.read_bytes() == CONTENT
    assert len(site.asked) == 2


@pytest.mark.parametrize("validators", [True, False])
def test_a_file_that_changed_between_tries(site, to, validators):
    site.etag = '"one"' if validators else ""
    cut(site, to)
    site.content = OTHER if validators else OTHER[:-1]
    site.etag = '"two"' if validators else ""
    download(site.url, to)
    assert to.read_bytes() == site.content


def test_a_range_of_another_file_is_not_glued_on(site, to):
    """A careless server that ignores If-Range and sends the rest of the new file."""
    cut(site, to)
    site.content, site.etag = OTHER, '"two"'
    current = Handler.wanted
    Handler.wanted = lambda self, site: int(self.headers.get("Range", "bytes=0-")[6:-1])
    try:
        download(site.url, to)
    finally:
        Handler.wanted = current
    assert to.read_bytes() == OTHER
    assert ["Range" in asked for asked in site.asked] == [False, True, False]


def test_a_part_longer_than_the_file(site, to):
    cut(site, to)
    with open(to.parent / "a.tar.gz.part", "ab") as part:
        part.write(bytes(len(CONTENT)))
    download(site.url, to, md5=MD5)
    assert to.read_bytes() == CONTENT


def test_a_whole_part_is_only_checked(site, to):
    cut(site, to)
    (to.parent / "a.tar.gz.part").write_bytes(CONTENT)
    download(site.url, to, md5=MD5)
    assert to.read_bytes() == CONTENT
    assert len(site.asked) == 1


ELSEWHERE = {"url": "http://elsewhere", "size": len(CONTENT), "etag": '"one"', "modified": ""}


@pytest.mark.parametrize("note", ["{", "[]", '{"url": 3}', json.dumps(ELSEWHERE), "null"])
def test_a_part_of_unknown_origin_is_not_trusted(site, to, note):
    cut(site, to)
    (to.parent / "a.tar.gz.part.json").write_text(note)
    (to.parent / "a.tar.gz.part").write_bytes(b"x" * 1000)
    download(site.url, to)
    assert to.read_bytes() == CONTENT
    assert "Range" not in site.asked[1]


def test_a_note_cannot_forge_a_request(site, to):
    cut(site, to)
    note = to.parent / "a.tar.gz.part.json"
    note.write_text(note.read_text().replace('\\"one\\"', "a\\r\\nEvil: yes"))
    download(site.url, to)
    assert to.read_bytes() == CONTENT
    assert all("Evil" not in asked for asked in site.asked)


def test_a_wrong_checksum_leaves_nothing(site, to):
    with pytest.raises(FileError, match=f"its md5 is {MD5}, not 0+:.*get it by hand"):
        download(site.url, to, md5="0" * 32)
    assert beside(to) == []


def test_a_file_of_unknown_length(site, to):
    site.length = False
    seen = []
    download(site.url, to, md5=MD5, progress=lambda done, total: seen.append(total))
    assert to.read_bytes() == CONTENT
    assert set(seen) == {None}


def test_too_many_bytes_are_refused(site, to):
    with pytest.raises(FileError, match="has 1,048,576 bytes, more than 1,000; refused"):
        download(site.url, to, most=1000)
    site.length = False
    with pytest.raises(FileError, match="sends more than it said"):
        download(site.url, to, most=1000)
    assert not to.exists()


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_server_that_says_no(site, to, status):
    site.status = status
    with pytest.raises(FileError, match=rf"a.tar.gz: the server answers {status}.*get it by hand"):
        download(site.url, to)
    assert not to.exists()


def test_a_server_that_says_no_to_the_rest(site, to):
    cut(site, to)
    site.status = 503
    with pytest.raises(FileError, match="the server answers 503"):
        download(site.url, to)
    assert len(site.asked) == 2, "it is not asked for all again"
    site.status = 200
    download(site.url, to, md5=MD5)
    assert "Range" in site.asked[2], "what came before is not lost"


def test_nobody_there(to):
    with pytest.raises(FileError, match="refused; see that you are connected and try again"):
        download("http://127.0.0.1:9/a", to)


def test_a_lost_connection_is_not_a_full_disk(site, to, monkeypatch):
    read = http.client.HTTPResponse.read

    def lost(self, amount):
        if self.length < 500_000:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return read(self, amount)

    with monkeypatch.context() as patch:
        patch.setattr(http.client.HTTPResponse, "read", lost)
        with pytest.raises(FileError, match=r"cut: Connection reset.*goes on from where it was"):
            download(site.url, to)
    download(site.url, to, md5=MD5)
    assert "Range" in site.asked[1]


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/a", "a.tar.gz", ""])
def test_only_the_web(site, to, address):
    with pytest.raises(FissileError, match="is no web address"):
        download(address, to)
    if ":" in address:
        site.redirect = address
        with pytest.raises(FileError):
            download(site.url, to)
    assert not to.exists()


def test_an_interrupted_download_goes_on(site, to):
    def stop(done, total):
        if done > 500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(site.url, to, progress=stop)
    kept = (to.parent / "a.tar.gz.part").stat().st_size
    assert 500_000 < kept < len(CONTENT)
    download(site.url, to, md5=MD5)
    assert site.asked[1]["Range"] == f"bytes={kept}-"
    assert to.read_bytes() == CONTENT


def test_a_full_disk(site, to, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        with pytest.raises(FileError, match=r"No space left on device; make room.*goes on"):
            download(site.url, to)
    assert not to.exists()
    download(site.url, to, md5=MD5)
    assert len(site.asked) == 1, "what came before is not lost"


def test_a_folder_that_cannot_be_made(site, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(FileError, match="give another folder"):
        download(site.url, tmp_path / "data" / "a")


def test_a_server_that_never_answers(site, to, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    started = threading.Event()

    def sleep(self):
        started.set()
        threading.Event().wait(0.5)

    monkeypatch.setattr(Handler, "do_GET", sleep)
    with pytest.raises(FileError, match="timed out; see that you are connected"):
        download(site.url, to)
    assert started.is_set()


def test_what_a_server_says_never_commands_the_terminal(site, to, monkeypatch):
    send = Handler.send_response
    monkeypatch.setattr(Handler, "send_response", lambda self, _: send(self, 404, "\x1b[2Jgone"))
    with pytest.raises(FileError, match="the server answers 404") as refused:
        download(site.url, to)
    assert str(refused.value).isprintable()
