"""Accuracy weighed against parameters and against the dense network."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fissile._common.errors import FissileError

__all__ = ["accuracy_per_parameter", "relative_improvement"]

Number = TypeVar("Number", float, Tensor)


def accuracy_per_parameter(accuracy: Number, nonzeros: Number | float) -> Number:
    """Accuracy divided by the number of parameters that are not zero.

    >>> accuracy_per_parameter(0.5, 100)
    0.005
    """
    _check_positive("nonzeros", nonzeros)
    return accuracy / nonzeros


def relative_improvement(expanded: Number, dense: Number | float) -> Number:
    """The gain of the expanded network's accuracy as a fraction of the dense network's.

    >>> relative_improvement(0.75, 0.5)
    0.5
    """
    _check_positive("dense", dense)
    return (expanded - dense) / dense


def _check_positive(name: str, value: float | Tensor) -> None:
    if not bool((torch.as_tensor(value) > 0).all()):
        raise FissileError(f"{name}={value} divides, so it must be above 0.")
