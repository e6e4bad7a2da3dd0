"""LayerNorm in the compiled kernel: neurons of one layer, a tile of samples side by side."""

from __future__ import annotations

import numpy as np

from fissile.bank.cpu.instructions import LANES, inner
from fissile.bank.cpu.layout import Array

__all__ = ["add_normalized", "normalize"]


@inner
def normalize(
    neurons: Array,
    scale: Array,
    shift: Array,
    eps: float,
    relu: bool,
    hat: Array,
    inverse: Array,
    mean: Array,
) -> None:
    """Bring neurons [neurons, LANES] to mean 0 and deviation 1 in place; scale, shift and cut them.

    What is between, and one over the deviation, stay in ``hat`` and ``inverse`` for the way back.
    """
    real = neurons.dtype.type
    share, low = real(1 / len(neurons)), real(0) if relu else real(-np.inf)
    mean[:] = 0
    inverse[:] = 0
    for r in range(len(neurons)):
        for k in range(LANES):
            mean[k] += neurons[r, k] * share
    for r in range(len(neurons)):
        for k in range(LANES):
            inverse[k] += (neurons[r, k] - mean[k]) ** 2 * share
    for k in range(LANES):
        inverse[k] = real(1) / np.sqrt(inverse[k] + real(eps))
    for r in range(len(neurons)):
        for k in range(LANES):
            hat[r, k] = (neurons[r, k] - mean[k]) * inverse[k]
            neurons[r, k] = max(scale[r] * hat[r, k] + shift[r], low)


@inner
def add_normalized(
    delta: Array,
    scale: Array,
    hat: Array,
    inverse: Array,
    grad_scale: Array,
    grad_shift: Array,
    first: Array,
    second: Array,
) -> None:
    """Add the gradients of scales and shifts, and pass ``delta`` back through the norm in place."""
    real = delta.dtype.type
    share = real(1 / len(delta))
    first[:] = 0
    second[:] = 0
    for r in range(len(delta)):
        scaled, shifted = real(0), real(0)
        for k in range(LANES):
            scaled += delta[r, k] * hat[r, k]
            shifted += delta[r, k]
            delta[r, k] *= scale[r]
            first[k] += delta[r, k] * share
            second[k] += delta[r, k] * hat[r, k] * share
        grad_scale[r] += scaled
        grad_shift[r] += shifted
    for r in range(len(delta)):
        for k in range(LANES):
            delta[r, k] = inverse[k] * (delta[r, k] - first[k] - hat[r, k] * second[k])
