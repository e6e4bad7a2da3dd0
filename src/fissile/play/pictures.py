"""Small pictures: FashionMNIST where it is installed, and scikit-learn's digits."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.errors import FissileError, needs
from fissile.bank import Data
from fissile.data.catalogue import CLOTHES, ENTRIES, find, load
from fissile.play.settings import TEST


def installed() -> dict[str, str]:
    """Return the data sets of pictures, each with what is missing: nothing where it is installed.

    >>> installed()["fashionmnist"]
    ''
    """
    fashion = "" if find("fashionmnist") else ENTRIES["fashionmnist"].get
    found = importlib.util.find_spec("sklearn") is not None
    return {"fashionmnist": fashion, "digits": "" if found else "pip install scikit-learn"}


@lru_cache(maxsize=1)
def _arrays(name: str) -> tuple[NDArray[Any], ...]:
    """Return training and test pictures, grey from 0 to 1, and their labels."""
    if missing := installed()[name]:
        raise FissileError(f"{name} is not installed here: {missing}")
    if name == "fashionmnist":
        known = load("fashionmnist").flat()
        return known.x, known.y, known.x_test, known.y_test
    needs("sklearn", "sklearn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return x[:1300], y[:1300], x[1300:], y[1300:]


def classes(name: str) -> list[str]:
    """Return what the classes are called: ``classes("digits")[3] == "3"``."""
    known = {"fashionmnist": list(CLOTHES), "digits": list("0123456789")}
    return known.get(name, ["false", "true"])


@lru_cache(maxsize=2)
def pictures(name: str, samples: int) -> Data:
    """Return the first samples of a data set of pictures, as many as there are.

    >>> pictures("digits", 500).inputs
    64
    """
    x, y, x_test, y_test = _arrays(name)
    arrays = x[:samples], y[:samples], x_test[:TEST], y_test[:TEST]
    return Data(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
