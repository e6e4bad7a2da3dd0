"""Labelled sets: what is refused, subsets, held-out parts and fingerprints."""

import re
from dataclasses import replace

import numpy as np
import pytest
from data_files import features, images
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile import FissileError
from fissile.data import sets
from fissile.data.sets import Labelled, chunks, mean_length

BAD = {
    "one label per sample": lambda d: replace(d, y=d.y[:-1]),
    "x_test has 9 samples": lambda d: replace(d, x_test=d.x_test[:-1]),
    "x has shape": lambda d: replace(d, x=d.x[:0], y=d.y[:0]),
    "y is empty": lambda d: replace(d, y=d.y[:0]),
    "give both the same": lambda d: replace(d, x_test=d.x_test[:, :-1]),
    "x holds float16 of shape (5,) and x_test float32": lambda d: replace(
        d, x_test=d.x_test.astype(np.float32)
    ),
    "give one whole number per sample": lambda d: replace(d, y=d.y.astype(float)),
    "y holds bool": lambda d: replace(d, y=d.y > 0),
    "y_test holds int64 of shape (10, 1)": lambda d: replace(d, y_test=d.y_test[:, None]),
    "number the classes from 0": lambda d: replace(d, y=d.y - 1),
    "a label is 3, and there are 3 classes": lambda d: replace(d, y_test=d.y_test + 1),
    "x holds NaN": lambda d: replace(d, x=np.where(np.arange(24)[:, None] == 23, np.nan, d.x)),
    "x_test holds NaN or infinity": lambda d: replace(d, x_test=d.x_test / np.float16(0)),
    "x holds int64; give images": lambda d: replace(d, x=d.x.astype(np.int64)),
    "x holds uint16": lambda d: replace(d, x=d.x.astype(np.uint16)),
    "save it as float16 or float32": lambda d: replace(d, x=d.x.astype(np.longdouble)),
    "x holds object": lambda d: replace(d, x=d.x.astype(object)),
    "x holds >f2": lambda d: replace(d, x=d.x.astype(">f2")),
    "x holds complex": lambda d: replace(d, x=d.x.astype(complex)),
    "images or rows": lambda d: replace(d, x=d.x[:, :, None]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_a_set_is_refused(message):
    with pytest.raises(FissileError, match=re.escape(message)):
        BAD[message](features(names=("a", "b", "c")))


def test_labels_that_cannot_be_classes_are_refused():
    data = features()
    assert data.classes == 3
    assert features(names=tuple("abcde")).classes == 5, "two have no samples"
    with pytest.raises(FissileError, match="a label is 34, and there are 34 samples"):
        replace(data, y=np.full(24, 34))
    assert replace(data, y=np.full(24, 33)).classes == 34
    with pytest.raises(FissileError, match="out of range"):
        replace(data, y=np.full(24, 2**63, np.uint64))


def test_labels_of_any_whole_type_become_int64():
    data = features()
    for dtype in (np.uint8, np.int16, ">i4", np.uint64):
        other = replace(data, y=data.y.astype(dtype), y_test=data.y_test.astype(dtype))
        assert other.y.dtype == np.int64
        assert other.fingerprint() == data.fingerprint()


def test_a_fingerprint_sees_everything_but_the_names():
    data = features()
    seen = {data.fingerprint()}
    for other in (
        replace(data, x=data.x + np.float16(1)),
        replace(data, y=data.y[::-1]),
        replace(data, x_test=data.x_test[::-1]),
        replace(data, y_test=data.y_test[::-1]),
        replace(data, x=data.x.astype(np.float32), x_test=data.x_test.astype(np.float32)),
        Labelled(data.x_test, data.y_test, data.x, data.y),
    ):
        assert other.fingerprint() not in seen
        seen.add(other.fingerprint())
    named = replace(data, names=("a", "b", "c"), encoder="mine")
    assert named.fingerprint() == data.fingerprint()
    strided = replace(data, x=np.asfortranarray(data.x))
    assert strided.fingerprint() == data.fingerprint()


def test_pieces_make_no_difference(monkeypatch):
    data = features()
    whole = data.fingerprint()
    monkeypatch.setattr(sets, "_CHUNK", 25)  # two rows and a half
    assert [len(part) for part in chunks(data.x)] == [2] * 12
    assert data.fingerprint() == whole
    late = data.x.copy()
    late[-1, -1] = np.inf
    with pytest.raises(FissileError, match="infinity"):
        replace(data, x=late)


def test_a_mapped_set_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float16, (4096, 256))
    monkeypatch.setattr(sets, "_CHUNK", 2**12)
    sizes = []
    finite = np.isfinite
    monkeypatch.setattr(np, "isfinite", lambda part: sizes.append(part.nbytes) or finite(part))
    y = np.arange(4096) % 2
    data = Labelled(x, y, x[:10], y[:10])
    assert data.x is x
    assert sum(sizes) == x.nbytes + 10 * 512
    assert max(sizes) == 2**12


def test_images_become_rows_from_0_to_1():
    data = images()
    flat = data.flat()
    assert flat.x.shape == (20, data.inputs) == (20, 3072)
    assert flat.x.dtype == np.float32
    np.testing.assert_array_equal(flat.x, data.x.reshape(20, -1) / np.float32(255))
    assert (flat.x_test.min(), flat.x_test.max()) == (0, 1)
    assert features().flat().x.dtype == np.float16


def test_features_are_brought_to_another_scale():
    data = features(train=40, test=20)
    x = data.x.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1)
    assert data.scaled("raw") is data
    assert mean_length(data.x) == pytest.approx(lengths.mean(), rel=1e-5)
    unit, ten, standard = (data.scaled(name) for name in ("unit", "length-10", "standard"))
    np.testing.assert_allclose(np.linalg.norm(unit.x_test, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(unit.x, x / lengths[:, None], rtol=1e-5, atol=1e-6)
    assert mean_length(ten.x) == pytest.approx(10, rel=1e-5)
    np.testing.assert_allclose(ten.x_test / 10 * lengths.mean(), data.x_test, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(standard.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(standard.x.std(0), 1, rtol=1e-5)
    shifted = (data.x_test - x.mean(0)) / x.std(0)  # by the training set alone
    np.testing.assert_allclose(standard.x_test, shifted, rtol=1e-3, atol=1e-4)


def test_an_unknown_scale_is_refused():
    with pytest.raises(FissileError, match="scaling='Unit' is not known; give raw, unit"):
        features().scaled("Unit")


def test_samples_and_features_without_a_scale_stay_finite():
    data = features(train=40, test=20)
    x = np.array(data.x)
    x[0], x[:, 1] = 0, 0
    for name in ("unit", "length-10", "standard"):
        assert np.isfinite(replace(data, x=x).scaled(name).x).all()


def test_fewer_classes_are_among_more():
    data = features(train=60, test=30, classes=10, names=tuple("abcdefghij"), encoder="mine")
    earlier = set()
    for count in range(2, 11):
        some = data.some_classes(count)
        assert earlier < set(some.names)
        earlier = set(some.names)
        assert some.classes == count
        assert some.encoder == "mine"
        for x, y, new_x, new_y in (
            (data.x, data.y, some.x, some.y),
            (data.x_test, data.y_test, some.x_test, some.y_test),
        ):
            kept = [row for row in range(len(y)) if data.names[y[row]] in some.names]
            np.testing.assert_array_equal(new_x, x[kept])
            assert [some.names[k] for k in new_y] == [data.names[k] for k in y[kept]]
    assert data.some_classes(10) is data
    assert data.some_classes(4).names == data.some_classes(4).names
    assert list(data.some_classes(4).names) != list("abcd"), "the first are not always the same"
    for count in (1, 11, 2.5, True):
        with pytest.raises(FissileError):
            data.some_classes(count)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_a_held_out_part_has_each_class_in_proportion(counts, seed):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    x = np.arange(len(y), dtype=np.float32)[:, None]
    data = Labelled(x, y, x[:1] - 5, y[:1])
    count = max(1, len(y) // 3)
    held = data.held_out(count, seed)
    assert len(held.y_test) == count
    rows = np.concatenate([held.x[:, 0], held.x_test[:, 0]]).astype(int)
    assert sorted(rows) == list(range(len(y))), "every row once, and none of the test set"
    np.testing.assert_array_equal(np.concatenate([held.y, held.y_test]), y[rows])
    share = np.bincount(held.y_test, minlength=len(counts)) - count * np.array(counts) / len(y)
    assert np.abs(share).max() < 2


def test_a_held_out_part_depends_on_its_seed_alone():
    data = features(train=200)
    assert data.held_out(0.1).fingerprint() == data.held_out(20).fingerprint()
    assert data.held_out(0.1).fingerprint() != data.held_out(0.1, seed=1).fingerprint()
    assert data.held_out(0.25).y_test.shape == (50,)
    for part in (0, 1.0, 0.0, -1, 200, 1.5, 0.001, True):
        with pytest.raises(FissileError):
            data.held_out(part)
