"""Samples as the engines want them: tensors, and something to watch while they are learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fissile._common.errors import FissileError
from fissile.bank import Data
from fissile.data.sets import Labelled

__all__ = ["can_hold_out", "check_same", "held", "logits", "numbered", "parted", "watched"]

Array = NDArray[Any]
#: Samples that go through a network at once when it predicts.
_ROWS = 1 << 14


def numbered(labels: Array, classes: Array) -> NDArray[np.int64]:
    """Return the number of every label among the classes, which are in order.

    >>> numbered(np.array(["b", "a"]), np.array(["a", "b"]))
    array([1, 0])
    """
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise FissileError(
            f"y holds {unknown.tolist()}, which the classes {classes.tolist()} lack; "
            "name all classes in the first call of partial_fit"
        )
    return np.searchsorted(classes, labels)


def check_same(classes: Array, known: Array) -> None:
    """Refuse other classes than those of the first call."""
    if not np.array_equal(classes, known):
        raise FissileError(
            f"classes are now {classes.tolist()}, and were {known.tolist()} in the first call of "
            "partial_fit; give the same again, or none"
        )


def held(x: Array, y: Array) -> Data:
    """Return samples to train on; nothing is watched, so one of them stands for a test set."""
    return _data(x, y, x[:1], y[:1])


def watched(x: Array, y: Array, share: float, seed: int) -> Data:
    """Hold out a share of the samples, of every class alike, to watch the accuracy there."""
    parts = parted(x, y, share, seed)
    return _data(parts.x, parts.y, parts.x_test, parts.y_test)


def parted(x: Array, y: Array, share: float, seed: int) -> Labelled:
    """Return samples to train on and, of every class alike, a share to test on."""
    _check_share(share)
    return Labelled(x, y, x[:1], y[:1]).held_out(float(share), seed)


def can_hold_out(y: Array, share: float) -> bool:
    """Tell whether every class has samples enough to be held out, and to be learned from."""
    _check_share(share)
    least = int(np.bincount(y).min())
    return least * min(share, 1 - share) >= 1


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise FissileError(f"validation_fraction={share!r} is no share; give one such as 0.1")


def _data(x: Array, y: Array, x_test: Array, y_test: Array) -> Data:
    return Data(_tensor(x), torch.tensor(y), _tensor(x_test), torch.tensor(y_test))


def _tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x if x.flags.writeable else x.copy())


@torch.no_grad()
def logits(model: nn.Module, x: Array) -> NDArray[np.float64]:
    """Return what a network in double precision and evaluation mode makes of samples."""
    parts = [
        model(torch.tensor(x[begin : begin + _ROWS], dtype=torch.float64))
        for begin in range(0, len(x), _ROWS)
    ]
    found: NDArray[np.float64] = torch.cat(parts).numpy()
    return found
