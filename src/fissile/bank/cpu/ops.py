"""The compiled functions a training step is made of: sample order, loss, LayerNorm, Adam."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fissile._common.random import ROUNDS
from fissile.bank.cpu.instructions import LANES, compiled, float_of_bits, inner
from fissile.bank.cpu.layout import Array
from fissile.bank.step import BETA1, BETA2, EPS

_LOG2_E = 1 / math.log(2)
_LN2 = math.log(2)
#: The series of exp from its smallest term, exact to double precision within half of ln 2.
_TAYLOR = tuple(1 / math.factorial(i) for i in range(13, -1, -1))


@compiled
def fill_order(order: Array, outside: Array, keys: Array, low: int, shift: int) -> None:
    """Write the order of an epoch; positions that land beyond the samples are moved on together."""
    samples = len(order)
    for i in range(samples):
        order[i] = _place(np.uint32(i), keys, low, shift)
    count = 0
    for i in range(samples):
        outside[count] = i
        count += order[i] >= samples
    while count:
        waiting, count = count, 0
        for k in range(waiting):
            i = outside[k]
            order[i] = _place(order[i], keys, low, shift)
            outside[count] = i
            count += order[i] >= samples


@inner
def _place(position: Any, keys: Array, low: int, shift: int) -> Any:
    for k in range(ROUNDS):
        position = np.uint32(np.uint32(position * keys[k, 0]) + keys[k, 1]) & np.uint32(low)
        position = np.uint32(position ^ (position >> np.uint32(shift)))
    return position


@inner
def _exp(x: float) -> float:
    """Return exp(x) for a number <= 0: a polynomial, so that loops run in vector registers."""
    z = max(x, -700.0)
    n = np.floor(z * _LOG2_E + 0.5)
    r = z - n * _LN2
    t = 0.0
    for factor in _TAYLOR:
        t = t * r + factor
    return float(t * float_of_bits((np.int64(n) + 1023) << 52))


@inner
def _loss_of_one(tile: Array, y: Array, count: int, samples: int, delta: Array) -> float:
    """Binary cross-entropy: write its gradient and return its sum over the tile."""
    top, end = len(tile) - 1, len(delta) - 1
    total, product, share = 0.0, 1.0, 1.0 / samples
    for k in range(LANES):
        z, real = np.float64(tile[top, k]), k < count
        odds = _exp(-abs(z))
        inverse = 1.0 / (1.0 + odds)
        chance = inverse if z >= 0.0 else odds * inverse
        delta[end, k] = (chance - y[k]) * share if real else 0.0
        total += max(z, 0.0) - z * y[k] if real else 0.0
        product *= 1.0 + odds if real else 1.0  # one logarithm for all samples
    return float(total + np.log(product))


@inner
def _loss_of_many(
    tile: Array, y: Array, count: int, samples: int, delta: Array, work: Array
) -> float:
    """Cross-entropy over classes: write its gradient and return its sum over the tile."""
    classes = len(work) - 2
    top, end = len(tile) - classes, len(delta) - classes
    peak, mass = 0, 1  # rows of work; the odds of every class follow
    for k in range(LANES):
        work[peak, k], work[mass, k] = tile[top, k], 0.0
    for c in range(1, classes):
        for k in range(LANES):
            work[peak, k] = max(work[peak, k], tile[top + c, k])
    for c in range(classes):
        for k in range(LANES):
            odds = _exp(tile[top + c, k] - work[peak, k])
            work[2 + c, k] = odds
            work[mass, k] += odds
    total, product = 0.0, 1.0
    for k in range(count):
        total -= tile[top + y[k], k] - work[peak, k]
        product *= work[mass, k]  # one logarithm for all samples
    for k in range(LANES):
        work[mass, k] = 1.0 / work[mass, k]
    for c in range(classes):
        for k in range(LANES):
            miss = work[2 + c, k] * work[mass, k] - (1.0 if y[k] == c else 0.0)
            delta[end + c, k] = miss / samples if k < count else 0.0
    return float(total + np.log(product))


@inner
def loss_and_gradient(
    tile: Array, y: Array, count: int, samples: int, delta: Array, work: Array
) -> float:
    """Write the gradient of the logits and return the summed loss: NaN if a logit is not finite."""
    classes = len(work) - 2
    for r in range(len(tile) - classes, len(tile)):
        odd = 0
        for k in range(LANES):
            odd += not abs(tile[r, k]) < np.inf  # a comparison is exact in any arithmetic
        if odd:
            return np.nan
    if classes == 1:
        return _loss_of_one(tile, y, count, samples, delta)
    return _loss_of_many(tile, y, count, samples, delta, work)


@inner
def normalize(
    neurons: Array, scale: Array, shift: Array, eps: float, relu: bool, hat: Array, inverse: Array,
    mean: Array,
) -> None:  # fmt: skip
    """Normalize neurons [neurons, LANES] in place to mean 0, deviation 1; scale, shift, cut them.

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
    delta: Array, scale: Array, hat: Array, inverse: Array, grad_scale: Array, grad_shift: Array,
    first: Array, second: Array,
) -> None:  # fmt: skip
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


@inner
def adam(theta: Array, m: Array, v: Array, grad: Array, step: int, lr: float, l2: float) -> None:
    """Make one step of ``torch.optim.Adam``, with the gradient of L2 added on the way."""
    real = theta.dtype.type
    ahead, keep, rest = real(1 - BETA1), real(BETA2), real(1 - BETA2)
    eps, twice = real(EPS), real(2 * l2)
    rate = real(lr / (1 - BETA1**step))
    root = real(np.sqrt(1 - BETA2**step))
    for i in range(len(theta)):
        g = grad[i] + twice * theta[i]
        m[i] += (g - m[i]) * ahead
        v[i] = v[i] * keep + rest * g * g
        theta[i] -= rate * (m[i] / (np.sqrt(v[i]) / root + eps))
