"""Texts: CLINC150 and Banking77, to be embedded by an encoder, and single characters."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError
from fissile._common.files import read_bounded, reading
from fissile._common.shapes import brief
from fissile.data.sets import Labelled

_MOST = 2**24  # bytes of a file; the real ones have a few million


@dataclass(frozen=True, eq=False)
class Texts:
    """A training and a test set of texts.

    >>> Texts(["hi", "bye"], [0, 1], ["hello"], [0], ("greeting", "farewell")).classes
    2
    """

    train: list[str]
    y: NDArray[np.int64]
    test: list[str]
    y_test: NDArray[np.int64]
    names: tuple[str, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        for texts, labels in (("train", "y"), ("test", "y_test")):
            y = np.asarray(getattr(self, labels), dtype=np.int64)
            object.__setattr__(self, labels, y)
            if not len(y) or len(y) != len(getattr(self, texts)):
                raise FissileError(f"{texts} and {labels} must be of one length; give both whole")
            if y.min() < 0 or y.max() >= len(self.names):
                raise FissileError(f"{labels} names a class that is not there; number from 0")

    @property
    def classes(self) -> int:
        return len(self.names)

    def fingerprint(self) -> str:
        """Sixteen digits that the texts and their labels decide.

        >>> read_banking(Path("banking77")).fingerprint()
        '4b7074c5b63d9ffd'
        """
        whole = [self.train, self.y.tolist(), self.test, self.y_test.tolist(), self.names]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def read_clinc(path: Path) -> Texts:
    """The 150 intents of ``data_full.json``, without what is out of scope and without ``val``.

    >>> len(read_clinc(Path("clinc150")).train)
    15000
    """
    file = path / "data_full.json"
    with reading(file):
        lists = json.loads(_text(file))
        if not isinstance(lists, dict) or not {"train", "test"} <= lists.keys():
            raise FileError("it has no lists train and test; get CLINC150's data_full.json")
        train, test = (_pairs(lists[split]) for split in ("train", "test"))
        return _texts(train, test, tuple(sorted({intent for _, intent in train})))


def read_banking(path: Path) -> Texts:
    """The 77 intents of ``train.csv`` and ``test.csv``, in the order of ``categories.json``.

    >>> read_banking(Path("banking77")).names[0]
    'card_arrival'
    """
    with reading(path):
        names = json.loads(_text(path / "categories.json"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FileError("categories.json is no list of names; get Banking77's")
        train, test = (_rows(path / f"{split}.csv") for split in ("train", "test"))
        return _texts(train, test, tuple(names))


def read_characters(path: Path) -> Labelled:
    """A text as numbers: each sample is a character, its label the next; the last tenth tests.

    >>> read_characters(Path("tinyshakespeare")).classes
    65
    """
    file = path / "input.txt"
    with reading(file):
        text = _text(file)
        names = tuple(sorted(set(text)))
        if not 2 <= len(names) <= 256:
            raise FileError(f"it has {len(names)} different characters, not 2 to 256; get it again")
        number = {name: k for k, name in enumerate(names)}
        return characters(np.array([number[one] for one in text], dtype=np.uint8), names)


def characters(text: NDArray[np.uint8], names: tuple[str, ...]) -> Labelled:
    """Return the numbers of a text's characters as samples, each with the next as its label."""
    tested = len(text) // 10
    train, test = text[:-tested], text[-tested:]
    x, x_test = (part[:-1, None] for part in (train, test))
    return Labelled(x, train[1:].astype(np.int64), x_test, test[1:].astype(np.int64), names)


def _text(path: Path) -> str:
    text = read_bounded(path, _MOST).decode("utf-8")
    return io.StringIO(text, newline=None).read()  # every end of a line becomes one character


def _rows(path: Path) -> list[list[str]]:
    first, *rest = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    if first != ["text", "category"]:
        raise FileError(f"{path.name} does not begin with text,category; get Banking77's")
    return _pairs(rest)


def _pairs(rows: Any) -> list[list[str]]:
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or [type(part) for part in row] != [str, str]:
            raise FileError("a row is no pair of a text and its intent; get it again")
    return list(rows)


def _texts(train: list[list[str]], test: list[list[str]], names: tuple[str, ...]) -> Texts:
    number = {name: k for k, name in enumerate(names)}
    if unknown := {intent for _, intent in [*train, *test]} - number.keys():
        raise FileError(f"the intent {min(unknown)!r} is not among the classes; get it again")
    y, y_test = (np.array([number[intent] for _, intent in rows]) for rows in (train, test))
    return Texts([text for text, _ in train], y, [text for text, _ in test], y_test, names)
