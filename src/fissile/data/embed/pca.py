"""Principal components of more rows than memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FissileError
from fissile.data.sets import chunks

__all__ = ["Components", "fit"]


@dataclass(frozen=True)
class Components:
    """The directions in which rows differ most, and the middle they are measured from."""

    mean: NDArray[np.float64]  # (width,)
    directions: NDArray[np.float64]  # (width, count)

    def __call__(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return (n, count) coordinates of (n, width) rows.

        >>> fit(x, 2)(x[:5]).shape
        (5, 2)
        """
        found: NDArray[np.float64] = (rows - self.mean) @ self.directions
        return found


def fit(x: NDArray[Any], count: int) -> Components:
    """Return the first ``count`` principal components of rows, read piece by piece, twice.

    >>> fit(np.random.default_rng(0).random((100, 8)), 3).directions.shape
    (8, 3)
    """
    samples, width = x.shape
    if count > min(width, samples - 1):
        raise FissileError(
            f"{samples:,} rows of {width} features have at most {min(width, samples - 1)} "
            f"principal components, not {count}; ask for fewer"
        )
    mean = sum((part.sum(0) for part in _doubles(x)), np.zeros(width)) / samples
    scatter = np.zeros((width, width))
    for part in _doubles(x):
        part -= mean
        scatter += part.T @ part
    directions = np.linalg.eigh(scatter)[1][:, ::-1][:, :count]
    # A direction and its opposite are as good: the larger entries shall be positive.
    largest = directions[np.abs(directions).argmax(0), np.arange(count)]
    return Components(mean, directions * np.sign(largest))


def _doubles(x: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    for part in chunks(x):
        yield part.astype(np.float64)
