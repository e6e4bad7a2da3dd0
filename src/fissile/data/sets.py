"""A training and a test set as arrays, whatever file they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import brief

#: How features may be scaled; see :meth:`Labelled.scaled`.
Scaling = Literal["raw", "unit", "length-10", "standard"]

_CHUNK = 2**24  # bytes looked at in one go: a mapped file is never in memory as a whole
_LEAST = 1e-12  # a row this short has no direction
_ORDER = 2026  # seeds the one order in which classes join a subset


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images (samples, height, width[, channels]) of bytes or features (samples, inputs) of floats.

    >>> data = Labelled(x, y, x_test, y_test, names=("cat", "dog"))
    >>> data.classes, data.inputs
    (2, 512)

    Args:
        x: what to train on; may be mapped from a file, and is then read piece by piece.
        y: its labels, whole numbers from 0.
        x_test: what to test on.
        y_test: its labels.
        names: of the classes; without them there are as many as the largest label says.
        encoder: what made the features; nothing for raw data.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    names: tuple[str, ...] = ()
    encoder: str = ""

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for x, labels in (("x", "y"), ("x_test", "y_test")):
            _check_inputs(x, getattr(self, x))
            y, samples = _labels(labels, getattr(self, labels)), len(getattr(self, x))
            object.__setattr__(self, labels, y)
            if samples != len(y):
                raise FissileError(
                    f"{x} has {samples:,} samples and {labels} has {len(y):,} labels; give one "
                    "label per sample"
                )
        if self.x.shape[1:] != self.x_test.shape[1:] or self.x.dtype != self.x_test.dtype:
            kinds = [f"{x.dtype} of shape {x.shape[1:]}" for x in (self.x, self.x_test)]
            raise FissileError(f"x holds {kinds[0]} and x_test {kinds[1]}; give both the same")
        # More classes than samples are no classes: a label that says so is a mistake.
        most = len(self.names) or len(self.y) + len(self.y_test)
        if (top := max(self.y.max(), self.y_test.max())) >= most:
            raise FissileError(
                f"a label is {top}, and there are {most:,} "
                f"{'classes' if self.names else 'samples'}; number the classes from 0"
            )

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names) or int(max(self.y.max(), self.y_test.max())) + 1

    @property
    def inputs(self) -> int:
        """How many numbers a sample has."""
        return int(np.prod(self.x.shape[1:]))

    def fingerprint(self) -> str:
        """Return sixteen digits of the four arrays, the same for every format of their file.

        >>> load("fashionmnist").fingerprint()
        'ad7b16dc82fbed35'
        """
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.x_test, self.y_test):
            digest.update(f"{array.dtype.str} {array.shape};".encode())
            for part in chunks(array):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()[:16]

    def flat(self) -> Labelled:
        """Return images as rows of floats from 0 to 1, and features as they are.

        >>> Labelled(images, y, images_test, y_test).flat().x.shape
        (60000, 784)
        """
        if self.x.dtype != np.uint8:
            return self
        x, x_test = (
            images.reshape(len(images), -1) / np.float32(255) for images in (self.x, self.x_test)
        )
        return replace(self, x=x, x_test=x_test)

    def scaled(self, scaling: Scaling) -> Labelled:
        """Return features at another scale, in single precision and in memory.

        >>> data.scaled("unit")  # every sample divided by its length
        >>> data.scaled("length-10")  # one factor: training samples have a mean length of 10
        >>> data.scaled("standard")  # each feature: mean 0 and deviation 1 over the training set
        """
        if scaling == "raw":
            return self
        if scaling == "unit":
            return self._mapped(lambda part: part / np.maximum(_lengths(part), _LEAST))
        if scaling == "length-10":
            factor = 10 / max(mean_length(self.x), _LEAST)
            return self._mapped(lambda part: part * factor)
        if scaling == "standard":
            mean = _column_means(self.x, 0.0)
            deviation = np.sqrt(_column_means(self.x, mean, power=2))
            deviation[deviation < _LEAST] = 1  # a feature that never changes says nothing
            return self._mapped(lambda part: (part - mean) / deviation)
        known = ", ".join(get_args(Scaling))
        raise FissileError(f"scaling={scaling!r} is not known; give {known}")

    def _mapped(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Labelled:
        """Return features that a function has changed, a few rows at a time."""
        made = []
        for source in (self.x, self.x_test):
            x, done = np.empty(source.shape, dtype=np.float32), 0
            for part in chunks(source):
                x[done : done + len(part)] = function(part.astype(np.float32))
                done += len(part)
            made.append(x)
        return replace(self, x=made[0], x_test=made[1])

    def some_classes(self, count: int) -> Labelled:
        """Return `count` of the classes, renumbered, in memory; fewer are always among more.

        >>> data.some_classes(40).classes
        40
        """
        if whole("count", count, least=2) > self.classes:
            raise FissileError(f"there are {self.classes} classes, not {count}; give fewer")
        if count == self.classes:
            return self
        order = np.random.default_rng(_ORDER).permutation(self.classes)
        kept = np.sort(order[:count])
        rows, rows_test = np.isin(self.y, kept), np.isin(self.y_test, kept)
        return Labelled(
            np.asarray(self.x[rows]), np.searchsorted(kept, self.y[rows]),
            np.asarray(self.x_test[rows_test]), np.searchsorted(kept, self.y_test[rows_test]),
            tuple(self.names[k] for k in kept) if self.names else (), self.encoder,
        )  # fmt: skip

    def held_out(self, part: float, seed: int = 0) -> Labelled:
        """Return the training set alone, in memory, a share or a number of it held out to test on.

        >>> data.held_out(0.1)  # a tenth of each class
        >>> data.held_out(5000)
        """
        count = _held_count(part, len(self.y))
        rng = np.random.default_rng(whole("seed", seed, least=0))
        held = np.zeros(len(self.y), dtype=np.bool_)
        held[_spread(self.y, rng)[:count]] = True
        x, x_held = np.asarray(self.x[~held]), np.asarray(self.x[held])
        return Labelled(x, self.y[~held], x_held, self.y[held], self.names, self.encoder)


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array in pieces of some megabytes, so that a mapped one need not fit in memory."""
    rows = max(1, _CHUNK // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def mean_length(x: NDArray[Any]) -> float:
    """Return the mean length of the rows."""
    return float(sum(_lengths(part).sum(dtype=np.float64) for part in chunks(x)) / len(x))


def _column_means(x: NDArray[Any], shift: NDArray[Any] | float, power: int = 1) -> NDArray[Any]:
    total = sum(((part.astype(np.float64) - shift) ** power).sum(0) for part in chunks(x))
    return np.asarray(total / len(x))


def _lengths(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.linalg.norm(x.astype(np.float32), axis=1, keepdims=True))


def _spread(y: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.intp]:
    """Return all rows in an order whose beginnings have each class in proportion, to one sample."""
    shuffled = rng.permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    counts = np.bincount(y)
    begins = np.cumsum(counts) - counts
    labels = y[by_class]
    place = (np.arange(len(y)) - begins[labels] + rng.random(len(counts))[labels]) / counts[labels]
    return by_class[np.argsort(place, kind="stable")]


def _held_count(part: float, samples: int) -> int:
    share = isinstance(part, float)
    count = round(part * samples) if share and 0 < part < 1 else 0
    if not share:
        count = whole("part", part, least=1)  # type: ignore[arg-type]
    if not 0 < count < samples:
        raise FissileError(
            f"part={part!r} of {samples:,} samples leaves nothing to train or to test on; "
            "give a share like 0.1 or a smaller number"
        )
    return count


def _check_inputs(name: str, x: NDArray[Any]) -> None:
    if x.dtype.hasobject or x.dtype.kind not in "uf" or (x.dtype.kind == "u" and x.itemsize > 1):
        raise FissileError(f"{name} holds {x.dtype}; give images as uint8 or features as floats")
    if not x.dtype.isnative or x.itemsize > 8:
        raise FissileError(f"{name} holds {x.dtype}; save it as float16 or float32 of this machine")
    if x.ndim < 2 or not x.size:
        raise FissileError(f"{name} has shape {x.shape}; give at least one sample with inputs")
    if x.ndim > (4 if x.dtype.kind == "u" else 2):
        raise FissileError(f"{name} has shape {x.shape}; give images or rows of features")
    if x.dtype.kind != "u" and not all(np.isfinite(part).all() for part in chunks(x)):
        raise FissileError(f"{name} holds NaN or infinity; make the features again")


def _labels(name: str, y: NDArray[Any]) -> NDArray[np.int64]:
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise FissileError(
            f"{name} holds {y.dtype} of shape {y.shape}; give one whole number per sample"
        )
    if not len(y) or y.min() < 0 or y.max() > np.iinfo(np.int64).max:
        raise FissileError(f"{name} is empty or out of range; number the classes from 0")
    return y.astype(np.int64)
