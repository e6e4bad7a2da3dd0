"""Archives and pickles that ask for endless time or memory: each is refused at once."""

import gzip
import pickle
import struct
import tarfile
import tracemalloc

import pytest
from labelled import CIFAR, cifar_archive, cifar_folder, cifar_parts, images

from fissile import FileError
from fissile.data import cifar, safe_pickle
from fissile.data.cifar import read_cifar
from fissile.data.safe_pickle import read_pickle

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


def shared(leaf, twice, depth=40):
    """A pickle's value that holds itself two to the power of forty times."""
    made = leaf + b"q\x00"
    for k in range(depth):
        made += twice(k) + b"q" + bytes([k + 1])
    return made


TUPLES = shared(b"K\x01", lambda k: b"h" + bytes([k]) + b"\x86")
LISTS = shared(b"]", lambda k: b"](h" + bytes([k]) + b"h" + bytes([k]) + b"e")
NAMES = b"X\x10\0\0\0fine_label_names"
TWICE = "uses a tuple twice, refused"
EXPONENTIAL = {
    "names": (b"\x80\x02}" + NAMES + b"](" + LISTS + b"es.", "no short text"),
    "a module": (b"\x80\x04" + TUPLES + b"\x8c\x01a\x93.", TWICE),
    "a name": (b"\x80\x04\x8c\x05numpy" + TUPLES + b"\x93.", TWICE),
    "a dtype": (b"\x80\x02cnumpy\ndtype\n" + TUPLES + b"\x85R.", TWICE),
    "a text": (b"\x80\x02c_codecs\nencode\n" + TUPLES + b"X\x06\0\0\0latin1\x86R.", TWICE),
    "a key": (b"\x80\x02}" + TUPLES + b"K\x01s.", TWICE),
}


@pytest.mark.parametrize("why", EXPONENTIAL)
def test_what_is_shared_is_never_written_out(why, tmp_path):
    content, message = EXPONENTIAL[why]
    folder = cifar_folder(tmp_path / CIFAR, PARTS | {"meta": content})
    with pytest.raises(FileError, match=message):
        read_cifar(folder)


def test_many_long_names_are_refused(tmp_path):
    text = b"T" + struct.pack("<i", 10**6) + b"a" * 10**6 + b"q\x00"
    long = b"\x80\x02}" + NAMES + b"](" + text + b"h\x00" * 9 + b"es."
    many = b"\x80\x02}" + NAMES + b"](" + b"U\x01a" * 1001 + b"es."
    for meta, message in ((long, "no short text"), (many, "no list of texts")):
        folder = cifar_folder(tmp_path / CIFAR, PARTS | {"meta": meta})
        with pytest.raises(FileError, match=message):
            read_cifar(folder)


HIDDEN = {
    "remembered twice": b"K\x01\x85q\x00q\x01h\x01\x86.",
    "remembered after nothing": b"K\x01\x85\x95" + bytes(8) + b"q\x00h\x00\x86.",
    "remembered in order": b"K\x01\x94K\x01\x85\x94h\x01\x86.",
}


@pytest.mark.parametrize("why", HIDDEN)
def test_no_detour_shares_a_tuple(why):
    with pytest.raises(FileError, match=TWICE):
        read_pickle(b"\x80\x04" + HIDDEN[why])


def test_a_far_place_in_the_memo_takes_no_memory():
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="remembers more than honest data"):
            read_pickle(b"\x80\x02Nr\xff\xff\xff\x7f.")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("opcode", [b"\x8e", b"\x8d", b"\x96", b"\x95"])
@pytest.mark.parametrize("size", [2**40, 2**62, 2**64 - 1])
def test_a_claimed_length_takes_no_memory(opcode, size, tmp_path):
    content = b"\x80\x05" + opcode + struct.pack("<Q", size) + b"abc."
    folder = cifar_folder(tmp_path / CIFAR, PARTS | {"meta": content})
    tracemalloc.start()
    try:
        with pytest.raises(FileError):
            read_cifar(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("maker", [b"}", b"]", b")\x85"])
def test_a_pickle_of_empty_tables_is_refused(maker):
    with pytest.raises(FileError, match="more lists and tables than honest data"):
        read_pickle(b"\x80\x02" + maker * 10**5 + b".")


def test_a_pickle_takes_as_many_steps_as_the_real_one_and_not_many_more(monkeypatch):
    names = [f"{k:06}.png" for k in range(50_000)]
    table = {"filenames": names, "fine_labels": [7] * 50_000, "coarse_labels": [1] * 50_000}

    assert read_pickle(pickle.dumps(table, 2)) == table  # with a memo for each text: 250,000 steps
    monkeypatch.setattr(safe_pickle, "_STEPS", 1000)
    with pytest.raises(FileError, match="more steps than honest data"):
        read_pickle(b"\x80\x02" + b"N" * 1002 + b".")


def test_a_shape_of_many_dimensions_is_refused():
    shape = b"(" + b"\x8a\xff" + b"\x7f" * 255 + b"q\x00" + b"h\x00" * 10**5 + b"t"
    made = b"\x80\x05cnumpy.core.numeric\n_frombuffer\n(U\x01acnumpy\ndtype\nU\x02u1\x85R"
    with pytest.raises(FileError, match="of no shape"):
        read_pickle(made + shape + b"U\x01CtR.")
