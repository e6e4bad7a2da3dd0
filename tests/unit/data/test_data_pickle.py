"""Pickles of CIFAR-100 without running them: every honest one is read, no other does anything."""

import io
import os
import pickle
import pickletools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import CIFAR, cifar_archive, cifar_folder, cifar_parts, images, rows

from fissile import FileError
from fissile.data.cifar import read_cifar
from fissile.data.safe_pickle import read_pickle

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
        "train": old_pickle(rows(DATA.x), DATA.y),
        "test": old_pickle(rows(DATA.x_test), DATA.y_test),
        "meta": meta,
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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("key", [str, lambda text: text.encode()], ids=["str", "bytes"])
def test_what_python_3_writes(protocol, key, tmp_path):
    folder = cifar_folder(tmp_path / CIFAR, cifar_parts(DATA, protocol, key))
    read = read_cifar(folder)
    assert read.fingerprint() == DATA.fingerprint()
    assert read.names == NAMES
    coarse = read_cifar(folder, coarse=True)
    assert coarse.names == ("c0", "c1")
    np.testing.assert_array_equal(coarse.y, DATA.y // 5)
    assert not coarse.x.flags["OWNDATA"] or coarse.x.flags.writeable


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(4, dtype=np.uint8).reshape(1, 2, 2),
    ],
)
def test_arrays_of_every_kind(protocol, array):
    back = read_pickle(pickle.dumps({"a": array}, protocol))["a"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text() | st.binary(min_size=1),
    lambda inner: st.lists(inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(plain=st.dictionaries(st.text() | st.integers(), PLAIN), protocol=st.integers(2, 5))
def test_plain_data_is_what_pickle_says(plain, protocol):
    assert read_pickle(pickle.dumps(plain, protocol)) == plain


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
    with pytest.raises(FileError, match="contains code"):
        read_pickle(content)
    for part in ("train", "test", "meta"):
        folder = cifar_folder(tmp_path / CIFAR, old_parts() | {part: content})
        with pytest.raises(FileError, match=f"^{folder}: it contains code"):
            read_cifar(folder)
    assert not sprung.exists()
    pickletools.dis(content, io.StringIO())  # a whole pickle, refused for what it does


CODE = "it contains code"
ODD = {
    "persistent id": (b"\x80\x02U\x01aQ.", CODE),
    "extension": (b"\x80\x02\x82\x01.", CODE),
    "buffer out of band": (b"\x80\x05\x97.", CODE),
    "set": (b"\x80\x04\x8f.", CODE),
    "number called": (b"\x80\x02K\x01K\x02\x85R.", "not callable"),
    "number built": (b"\x80\x02K\x01K\x02\x85b.", "damaged"),
    "dict built": (b"\x80\x02}K\x01K\x02\x86b.", "damaged"),
    "list built": (b"\x80\x02](K\x01)NNNtb.", "damaged"),
    "built with a dict": (b"\x80\x02}}b.", "damaged"),
    "encoded oddly": (b"\x80\x02c_codecs\nencode\nU\x01aU\x03hex\x86R.", "oddly, refused"),
    "dtype of objects": (b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.", "an array of 'O', refused"),
    "function built": (b"\x80\x02cnumpy\ndtype\n}U\x0c__defaults__K\x01sb.", CODE),
    "function built in slots": (b"\x80\x02cnumpy\ndtype\nN}X\x08\0\0\0__code__Ns\x86b.", CODE),
    "array built oddly": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)RK\x01K\x02\x86b.",
        CODE,
    ),
    "ndarray called": (b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.", CODE),
    "dtype of a number": (b"\x80\x02cnumpy\ndtype\nK\x01\x85R.", "of no known type"),
    "big-endian": (pickle.dumps({"a": np.arange(3, dtype=">i4")}, 2), "big-endian"),
    "array of objects": (pickle.dumps({"a": np.array([{}])}, 2), "an array of 'O8', refused"),
    "array without contents": (
        b"\x80\x02}U\x01acnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87Rs.",
        "without contents",
    ),
    "list as key": (b"\x80\x02}]K\x01s.", "unhashable type"),
    "odd number of items": (b"\x80\x02}(K\x01u.", "odd number of items"),
    "append to a number": (b"\x80\x02K\x01K\x02a.", "damaged"),
    "no mark": (b"\x80\x02}K\x01u.", "could not find MARK"),
    "pop a mark": (b"\x80\x02(\x85.", "damaged"),
    "nothing there": (b"\x80\x02.", "damaged"),
    "cut": (b"\x80\x02}", "damaged"),
    "empty": (b"", "damaged"),
    "no table": (b"\x80\x02].", "train holds no table"),
}


@pytest.mark.parametrize("why", ODD)
def test_what_is_no_data_is_refused(why, tmp_path):
    content, message = ODD[why]
    folder = cifar_folder(tmp_path / CIFAR, old_parts() | {"train": content})
    with pytest.raises(FileError, match=f"^{folder}: .*{message}"):
        read_cifar(folder)


def array_of(raw, shape, code=b"u1"):
    """A pickle of an array that says what it likes about itself."""
    made = b"\x80\x05cnumpy.core.numeric\n_frombuffer\n(" + raw
    return made + b"cnumpy\ndtype\nU\x02" + code + b"\x85R" + shape + b"U\x01CtR."


def test_an_array_accounts_for_all_its_bytes():
    four, shape = b"U\x04abcd", b"K\x02K\x02\x86"
    assert read_pickle(array_of(four, shape)).tolist() == [[97, 98], [99, 100]]
    for raw, claim, message in (
        (four, b"K\x02K\x03\x86", "4 bytes for the shape"),
        (four, b"K\x01K\x02\x86", "4 bytes for the shape"),
        (four, b"J\xfe\xff\xff\xffJ\xfe\xff\xff\xff\x86", "of no shape"),
        (four, b"K\x04", "of no shape"),
        (b"K\x04", shape, "not made of bytes"),
        (b"X\x04\0\0\0abcd", shape, "not made of bytes"),
    ):
        with pytest.raises(FileError, match=message):
            read_pickle(array_of(raw, claim))


def test_text_cannot_grow_without_end():
    long = "ä" * 10_000
    once = b"X" + struct.pack("<I", 20_000) + long.encode() + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\0\0\0latin1\x86Rq\x01"
    assert read_pickle(b"\x80\x02" + once + again + b".") == long.encode("latin-1")
    with pytest.raises(FileError, match="grows beyond its size"):
        read_pickle(b"\x80\x02" + once + 50 * again + b".")


CHANGES = {
    "labels out of range": {"fine_labels": [10] * 20},
    "labels of text": {"fine_labels": ["a"] * 20},
    "labels not whole": {"fine_labels": [0.5] * 20},
    "too few labels": {"fine_labels": [0]},
    "no labels": {"fine_labels": None},
    "images of floats": {"data": rows(DATA.x).astype(np.float32)},
    "images too small": {"data": rows(DATA.x)[:, :-1]},
    "images a list": {"data": [[0] * 3072]},
    "no images": {"data": rows(DATA.x)[:0], "fine_labels": []},
}


@pytest.mark.parametrize("why", CHANGES)
def test_a_bad_table_is_refused(why, tmp_path):
    parts = old_parts() | {"train": cifar_parts(DATA, **CHANGES[why])["train"]}
    folder = cifar_folder(tmp_path / CIFAR, parts)
    message = "not rows of 3,072 bytes" if why.startswith("images") else ""
    with pytest.raises(FileError, match=f"^{folder}: .*{message}"):
        read_cifar(folder)


def test_labels_may_be_an_array(tmp_path):
    parts = old_parts() | {"train": cifar_parts(DATA, fine_labels=DATA.y)["train"]}
    assert read_cifar(cifar_folder(tmp_path / CIFAR, parts)).fingerprint() == DATA.fingerprint()


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
    with pytest.raises(FileError, match="test is too large"):
        read_cifar(folder)


HARMLESS = {
    "APPEND", "APPENDS", "BINBYTES", "BINBYTES8", "BINFLOAT", "BINGET", "BININT", "BININT1",
    "BININT2", "BINPUT", "BINSTRING", "BINUNICODE", "BINUNICODE8", "BYTEARRAY8", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE",
    "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINBYTES",
    "SHORT_BINSTRING", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


CHECKED = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}  # what they name or change is looked at
ARGUMENTS = {"long4": bytes(4), "stringnl": b"'a'\n", "stringnl_noescape_pair": b"os\nsystem\n"}


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_every_other_operation_is_refused(opcode):
    if opcode.name in HARMLESS | CHECKED:
        return
    argument = b""
    if opcode.arg is not None:
        argument = ARGUMENTS.get(opcode.arg.name, b"1\n" if opcode.arg.n < 0 else b"\1\0\0\0")
    with pytest.raises(FileError, match=rf"contains code \({opcode.name}\)"):
        read_pickle(b"\x80\x02" + opcode.code.encode("latin-1") + argument + b".")
