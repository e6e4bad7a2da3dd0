"""Texts and their intents: CLINC150 and Banking77."""

import json

import numpy as np
import pytest

from fissile import FileError, FissileError
from fissile.data.text import Texts, read_banking, read_characters, read_clinc


def clinc(folder, **parts):
    rows = {"train": [["hi", "b"], ["bye", "a"]], "test": [["hello", "b"]]}
    rows |= {"val": [["hm", "c"]], "oos_test": [["eh", "oos"]]} | parts
    folder.mkdir(exist_ok=True)
    (folder / "data_full.json").write_text(json.dumps(rows))
    return folder


def test_clinc(tmp_path):
    texts = read_clinc(clinc(tmp_path))
    assert (texts.train, texts.test, texts.names) == (["hi", "bye"], ["hello"], ("a", "b"))
    assert (texts.y.tolist(), texts.y_test.tolist()) == ([1, 0], [1])
    other = read_clinc(clinc(tmp_path, test=[["hello", "a"]]))
    assert other.fingerprint() != texts.fingerprint() == read_clinc(clinc(tmp_path)).fingerprint()


def banking(folder, train='text,category\n"hi, ""you""\nthere",b\nbye,a\n', names='["b", "a"]'):
    folder.mkdir(exist_ok=True)
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text("text,category\nhello,b\n")
    (folder / "categories.json").write_text(names)
    return folder


def test_banking(tmp_path):
    texts = read_banking(banking(tmp_path))
    assert (texts.train, texts.test) == (['hi, "you"\nthere', "bye"], ["hello"])
    assert (texts.names, texts.y.tolist()) == (("b", "a"), [0, 1])


@pytest.mark.parametrize("parts", [
    {"train": [["hi"]]}, {"train": []}, {"test": [["hello", "z"]]}, {"train": "hi"},
    {"test": [[1, "a"]]}, {"test": None},
])  # fmt: skip
def test_bad_clinc(parts, tmp_path):
    with pytest.raises(FileError, match=f"^{tmp_path}"):
        read_clinc(clinc(tmp_path, **parts))


@pytest.mark.parametrize("change", [
    {"train": "a,b\nhi,b\n"}, {"train": ""}, {"train": "text,category\nhi\n"},
    {"train": 'text,category\n"hi,b\n'}, {"train": "text,category\nhi,z\n"}, {"names": "{}"},
    {"names": "[1]"}, {"names": "["}, {"train": "text,category\n"},
])  # fmt: skip
def test_bad_banking(change, tmp_path):
    with pytest.raises(FileError, match=f"^{tmp_path}: "):
        read_banking(banking(tmp_path, **change))


def test_texts_that_do_not_fit():
    for y, names in (([0], ("a",)), ([0, 1], ("a",)), ([0, -1], ("a", "b"))):
        with pytest.raises(FissileError):
            Texts(["hi", "bye"], y, ["hello"], [0], names)
    fitting = Texts(["hi", "bye"], [0, 1], ["hello"], [0], ("a", "b"))
    assert (fitting.classes, fitting.y.dtype) == (2, np.int64)


def test_characters_and_what_comes_next(tmp_path):
    text = "abcab\n" * 10
    (tmp_path / "input.txt").write_text(text, "utf-8")
    found = read_characters(tmp_path)
    assert found.names == ("\n", "a", "b", "c")
    assert found.x.shape == (53, 1)
    assert found.x_test.shape == (5, 1)
    for x, y, part in ((found.x, found.y, text[:54]), (found.x_test, found.y_test, text[54:])):
        assert "".join(found.names[k] for k in [*x[:, 0], y[-1]]) == part
        assert (x[1:, 0] == y[:-1]).all()


@pytest.mark.parametrize("text", ["aaaa", "", "".join(map(chr, range(33, 400)))])
def test_a_text_of_too_few_or_too_many_characters(text, tmp_path):
    (tmp_path / "input.txt").write_text(text, "utf-8")
    with pytest.raises(FissileError, match="different characters, not 2 to 256"):
        read_characters(tmp_path)
