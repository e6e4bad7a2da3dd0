"""Pickles of CIFAR-100: the originals are read, and no other does anything."""

import io
import os
import pickle
import pickletools
import struct

import numpy as np
import pytest
from data_files import CIFAR, cifar_archive, cifar_folder, cifar_parts, images, original, rows

from fissile import FileError
from fissile.data import cifar
from fissile.data.cifar import read_cifar

DATA = images()
NAMES = tuple(f"f{n}" for n in range(10))


def old_pickle(array, labels):
    """What Python 2 wrote, byte by byte: text as bytes of unknown encoding, memo and all."""

    def text(word):
        return b"U" + bytes([len(word)]) + word

    raw = array.tobytes()
    made = b"\x80\x02}q\x01(" + text(b"data") + b"q\x02"
    made += b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04"
    made += b"K\x00\x85" + text(b"b") + b"\x87Rq\x05(K\x01"
    made += b"J" + struct.pack("<i", array.shape[0]) + b"M\x00\x0c\x86"
    made += b"cnumpy\ndtype\nq\x06" + text(b"u1") + b"K\x00K\x01\x87Rq\x07"
    made += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    made += text(b"fine_labels") + b"]q\x08(" + b"".join(b"K" + bytes([k]) for k in labels) + b"e"
    return made + text(b"batch_label") + text(b"training batch 1 of 1") + b"u."


def old_parts():
    meta = b"\x80\x02}q\x01U\x10fine_label_namesq\x02]q\x03("
    meta += b"".join(b"U\x02f" + bytes([48 + n]) for n in range(10)) + b"es."
    return {
        "train": original(old_pickle(rows(DATA.x), DATA.y)),
        "test": original(old_pickle(rows(DATA.x_test), DATA.y_test)),
        "meta": original(meta),
    }


def test_what_python_2_wrote(tmp_path):
    parts = old_parts()
    for part in parts.values():
        pickletools.dis(part, io.StringIO())  # the bytes above are a whole pickle
    read = read_cifar(cifar_folder(tmp_path / CIFAR, parts))
    assert read.fingerprint() == DATA.fingerprint()
    assert read.names == NAMES
    archive = read_cifar(cifar_archive(tmp_path / f"{CIFAR}.tar.gz", parts))
    assert archive.fingerprint() == DATA.fingerprint()
    assert sorted(os.listdir(tmp_path)) == [CIFAR, f"{CIFAR}.tar.gz"], "nothing is unpacked"


def test_both_kinds_of_labels(tmp_path):
    folder = cifar_folder(tmp_path / CIFAR, cifar_parts(DATA))
    read = read_cifar(folder)
    assert read.fingerprint() == DATA.fingerprint()
    assert read.names == NAMES
    coarse = read_cifar(folder, coarse=True)
    assert coarse.names == ("c0", "c1")
    np.testing.assert_array_equal(coarse.y, DATA.y // 5)
    assert coarse.x.flags.writeable


def by(method):
    """A class whose pickle calls os.mkdir on a folder when it is opened, one way or another."""

    class Trap:
        def __init__(self, path):
            self.path = str(path)

    setattr(Trap, *method)
    return Trap


def traps(path):
    """Pickles that make a folder when opened by pickle.loads."""
    reduced = by(("__reduce__", lambda self: (os.mkdir, (self.path,))))(path)
    text = str(path).encode()
    word = b"X" + struct.pack("<I", len(text)) + text
    made = {f"reduce {protocol}": pickle.dumps(reduced, protocol) for protocol in range(6)}
    made["instance"] = b"(S'" + text + b"'\nios\nmkdir\n."
    made["object"] = b"(cos\nmkdir\n" + word + b"o."
    made["new object"] = b"\x80\x02cos\nmkdir\n" + word + b"\x85\x81."
    made["new object of words"] = b"\x80\x04cos\nmkdir\n" + word + b"\x85}\x92."
    made["stack global"] = b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + word + b"\x85R."
    made["build"] = b"\x80\x02cos\nmkdir\n}b" + word + b"\x85R."
    made["in a dict"] = b"\x80\x02}U\x04datacos\nmkdir\n" + word + b"\x85Rs."
    made["eval"] = (
        b"\x80\x02cbuiltins\neval\n"
        + (b"X" + struct.pack("<I", len(text) + 26) + b"__import__('os').mkdir('" + text)
        + b"')\x85R."
    )
    made["dotted"] = b"\x80\x04\x8c\x05numpy\x8c\x09os.system\x93" + word + b"\x85R."
    return made


@pytest.mark.parametrize("way", list(traps("x")))
def test_no_pickle_runs_anything(way, tmp_path):
    sprung = tmp_path / "sprung"
    content = traps(sprung)[way]
    pickletools.dis(content, io.StringIO())  # a whole pickle
    for part in ("train", "test", "meta"):
        folder = cifar_folder(tmp_path / CIFAR, old_parts() | {part: content})
        with pytest.raises(FileError, match=f"^{folder}: {part} is not the original, refused"):
            read_cifar(folder)
    # Even with the right md5 nothing but arrays and plain data is made.
    cifar_folder(folder, old_parts() | {"train": original(content)})
    with pytest.raises(FileError, match=f"^{folder}: it contains code"):
        read_cifar(folder)
    assert not sprung.exists()


def test_an_altered_part_is_refused(tmp_path):
    for part, content in old_parts().items():
        for altered in (content[:-1], content + b".", content.replace(b"\x02", b"\x03", 1), b""):
            folder = cifar_folder(tmp_path / CIFAR, old_parts() | {part: altered})
            with pytest.raises(FileError, match=f"{part} is not the original"):
                read_cifar(folder)


def test_the_originals_are_those_that_torchvision_names():
    assert {
        "16019d7e3df5f24257cddd939b257f8d",  # train
        "f0ef6b0ae62326f3e7ffdfab6717acfc",  # test
        "7973b15100ade9c7d40fb424638fde48",  # meta
    } <= cifar._ORIGINALS


ARCHIVES = {
    "there twice": {"extra": [(f"{CIFAR}/meta", pickle.dumps({}))]},
    f"no {CIFAR}/train": {"prefix": "cifar-10-batches-py/"},
}


@pytest.mark.parametrize("why", ARCHIVES)
def test_a_hostile_archive_is_refused(why, tmp_path):
    (tmp_path / "in").mkdir()
    path = cifar_archive(tmp_path / "in" / "c.tar.gz", old_parts(), **ARCHIVES[why])
    with pytest.raises(FileError, match=f"^{path}: .*{why}"):
        read_cifar(path)
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == ["c.tar.gz"]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", f"{CIFAR}/../../evil"])
def test_no_name_in_an_archive_is_a_path(name, tmp_path):
    (tmp_path / "in").mkdir()
    path = cifar_archive(tmp_path / "in" / "c.tar.gz", old_parts(), extra=[(name, b"x")])
    assert read_cifar(path).fingerprint() == DATA.fingerprint()
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == ["c.tar.gz"]


def test_an_archive_too_large_is_refused(tmp_path, monkeypatch):
    path = cifar_archive(tmp_path / "c.tar.gz", old_parts(), extra=[("zeros", bytes(10**6))])
    assert read_cifar(path).fingerprint() == DATA.fingerprint()
    monkeypatch.setattr("fissile.data.cifar._MOST", 10**6)
    with pytest.raises(FileError, match="unpacks to more than 1,000,000 bytes, refused"):
        read_cifar(path)
    folder = cifar_folder(tmp_path / CIFAR, old_parts() | {"test": bytes(10**6 + 1)})
    with pytest.raises(FileError, match="test has more than 1,000,000 bytes"):
        read_cifar(folder)
