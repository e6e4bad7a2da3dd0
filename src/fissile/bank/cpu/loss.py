"""The task loss of a tile of samples and its gradient, binary or over classes."""

from __future__ import annotations

import math

import numpy as np

from fissile.bank.cpu.instructions import LANES, inner
from fissile.bank.cpu.layout import Array

__all__ = ["loss_and_gradient"]

_LOG2_E = 1 / math.log(2)
_LN2 = math.log(2)
#: The series of exp from its smallest term, exact to double precision within half of ln 2.
_TAYLOR = tuple(1 / math.factorial(i) for i in range(13, -1, -1))


@inner
def _exp(work: Array, x: int, to: int, bits: Array) -> None:
    """Set work[to] = exp(work[x]) for numbers <= 0: a polynomial that runs in vector registers."""
    power = bits.view(np.float64)
    for k in range(LANES):
        z = max(work[x, k], -700.0)
        n = np.floor(z * _LOG2_E + 0.5)
        r = z - n * _LN2
        t = 0.0
        for factor in _TAYLOR:
            t = t * r + factor
        work[to, k] = t
        bits[k] = (np.int64(n) + 1023) << 52
    for k in range(LANES):
        work[to, k] *= power[k]


@inner
def _loss_of_one(
    tile: Array, y: Array, count: int, samples: int, delta: Array, work: Array, bits: Array
) -> float:
    """Binary cross-entropy: write its gradient and return its sum over the tile."""
    top, end = len(tile) - 1, len(delta) - 1
    for k in range(LANES):
        work[0, k] = -abs(tile[top, k])
    _exp(work, 0, 1, bits)
    total, product, share = 0.0, 1.0, 1.0 / samples
    for k in range(LANES):
        z, odds, real = np.float64(tile[top, k]), work[1, k], k < count
        inverse = 1.0 / (1.0 + odds)
        chance = inverse if z >= 0.0 else odds * inverse
        delta[end, k] = (chance - y[k]) * share if real else 0.0
        total += max(z, 0.0) - z * y[k] if real else 0.0
        product *= 1.0 + odds if real else 1.0  # one logarithm for all samples
    return float(total + np.log(product))


@inner
def _loss_of_many(
    tile: Array, y: Array, count: int, samples: int, delta: Array, work: Array, bits: Array
) -> float:
    """Cross-entropy over classes: write its gradient and return its sum over the tile."""
    classes = len(work) - 3
    top, end = len(tile) - classes, len(delta) - classes
    peak, z, mass = 0, 1, 2  # rows of work; the odds of every class follow
    for k in range(LANES):
        work[peak, k], work[mass, k] = tile[top, k], 0.0
    for c in range(1, classes):
        for k in range(LANES):
            work[peak, k] = max(work[peak, k], tile[top + c, k])
    total, product = 0.0, 1.0
    for c in range(classes):
        for k in range(LANES):
            work[z, k] = tile[top + c, k] - work[peak, k]
            total -= work[z, k] if y[k] == c and k < count else 0.0
        _exp(work, z, 3 + c, bits)
        for k in range(LANES):
            work[mass, k] += work[3 + c, k]
    for k in range(LANES):
        product *= work[mass, k] if k < count else 1.0  # one logarithm for all samples
        work[mass, k] = 1.0 / work[mass, k]
    for c in range(classes):
        for k in range(LANES):
            miss = work[3 + c, k] * work[mass, k] - (1.0 if y[k] == c else 0.0)
            delta[end + c, k] = miss / samples if k < count else 0.0
    return float(total + np.log(product))


@inner
def loss_and_gradient(
    tile: Array, y: Array, count: int, samples: int, delta: Array, work: Array, bits: Array
) -> float:
    """Write the gradient of the logits and return the summed loss: NaN if a logit is not finite."""
    classes = len(work) - 3
    for r in range(len(tile) - classes, len(tile)):
        odd = 0
        for k in range(LANES):
            odd += not abs(tile[r, k]) < np.inf  # a comparison is exact in any arithmetic
        if odd:
            return np.nan
    if classes == 1:
        return _loss_of_one(tile, y, count, samples, delta, work, bits)
    return _loss_of_many(tile, y, count, samples, delta, work, bits)
