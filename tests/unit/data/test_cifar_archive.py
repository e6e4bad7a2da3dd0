"""Archives that ask for endless time or memory: each is refused at once."""

import gzip
import tarfile
import tracemalloc

import pytest
from data_files import CIFAR, cifar_archive, cifar_parts, images

from fissile import FileError
from fissile.data import cifar
from fissile.data.cifar import read_cifar

DATA = images()
PARTS = cifar_parts(DATA)


def header(name, size, kind=tarfile.REGTYPE):
    """A block of tar that may claim any size."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size.to_bytes(12, "big", signed=True)  # base 256: its first bit is the sign
    block[124] |= 0x80
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


FIRST = header(f"{CIFAR}/x", 0)
HEADERS = {
    "backwards": FIRST + header(f"{CIFAR}/y", -512),
    "gigantic": header(f"{CIFAR}/train", 2**40),
    "long name": header("././@LongLink", 1000 * 2**20, tarfile.GNUTYPE_LONGNAME),
    "long link": header("././@LongLink", 8, tarfile.GNUTYPE_LONGLINK),
    "pax": header("pax", 1000 * 2**20, tarfile.XHDTYPE),
    "pax for all": header("pax", 8, tarfile.XGLTYPE),
    "sparse": header(f"{CIFAR}/train", 0, tarfile.GNUTYPE_SPARSE),
    "link": header(f"{CIFAR}/train", 0, tarfile.SYMTYPE),
    "folder with contents": header(f"{CIFAR}/", 512, tarfile.DIRTYPE),
    "many": FIRST * 1001,
}


@pytest.mark.parametrize("why", HEADERS)
def test_a_lying_archive_is_refused_at_once(why, tmp_path):
    path = tmp_path / "c.tar.gz"
    path.write_bytes(gzip.compress(HEADERS[why] + bytes(1024)))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=f"^{path}: .*get the original|damaged"):
            read_cifar(path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_an_archive_is_read_to_its_checksum(tmp_path):
    path = cifar_archive(tmp_path / "c.tar.gz", PARTS, extra=[("readme", b"x" * 700)])
    content = path.read_bytes()
    assert read_cifar(path).fingerprint() == DATA.fingerprint()
    path.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(FileError, match="CRC check failed"):
        read_cifar(path)
    whole = gzip.decompress(content)
    path.write_bytes(gzip.compress(whole[: whole.index(b"x" * 700) + 9]))
    with pytest.raises(FileError, match="unexpected end of data"):
        read_cifar(path)
    head = whole.index(f"{CIFAR}/test".encode())
    path.write_bytes(gzip.compress(whole[:head] + b"?" + whole[head + 1 :]))
    with pytest.raises(FileError, match=f"it holds no {CIFAR}/test"):
        read_cifar(path)


def test_an_archive_that_does_not_end_is_refused(tmp_path, monkeypatch):
    path = cifar_archive(tmp_path / "c.tar.gz", PARTS)
    monkeypatch.setattr(cifar, "_MOST", 10**6)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(10**6)))
    with pytest.raises(FileError, match="unpacks to more than 1,000,000 bytes, refused"):
        read_cifar(path)
