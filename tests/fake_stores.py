"""What the tests of the store share: outcomes without training, and stores filled with them."""

import math
import os
import sys

import pytest

from fissile.lab.compute import TrialResult
from fissile.lab.store import Provenance, Store
from fissile.lab.trial import Sampling

HERE = Provenance("0.1.0", "c0ffee", "2.0", "abacus", "3.11")
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks and signals")
resource = None if sys.platform == "win32" else __import__("resource")


def outcome(number, **measures):
    return TrialResult(Sampling(number=number), measures or {"coverage": number / 7}, 0.5)


def outcomes(*numbers):
    return [outcome(number) for number in numbers]


def key(number):
    return Sampling(number=number).key


def keys(*numbers):
    return [key(number) for number in numbers]


def filled(path, *numbers):
    with Store(path) as store:
        store.add(outcomes(*numbers), HERE)
    return path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


def cut(file, size):
    os.truncate(file, size)


def smear(file, start, bytes_):
    with open(file, "r+b") as opened:
        opened.seek(start)
        opened.write(bytes_)
