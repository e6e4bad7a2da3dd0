"""The order of samples of `fissile._common.random`, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from fissile._common.random import ROUNDS
from fissile.bank.cpu.instructions import compiled, inner
from fissile.bank.cpu.layout import Array

__all__ = ["fill_keys", "fill_order"]

_WORD = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B9)


@inner
def _mixed(state: Any, word: Any) -> Any:
    """Mix a word into a hash, as `fissile._common.random.hash32` does."""
    state = ((state ^ word) + _GOLDEN) & _WORD
    state = state ^ (state >> np.uint64(16))
    state = (state * np.uint64(0x85EBCA6B)) & _WORD
    state = state ^ (state >> np.uint64(13))
    state = (state * np.uint64(0xC2B2AE35)) & _WORD
    return state ^ (state >> np.uint64(16))


@compiled
def fill_keys(keys: Array, seed: int, start: int) -> None:
    """Write what `fissile._common.random.order_keys` gives for a seed and consecutive epochs."""
    half, zero = np.uint64(32), np.uint64(0)
    for e in range(len(keys)):
        state = _GOLDEN
        for number in (np.uint64(seed), np.uint64(start + e)):
            state = _mixed(_mixed(state, number & _WORD), number >> half)
        for k in range(2 * ROUNDS):
            word = _mixed(_mixed(state, np.uint64(k)), zero)
            keys[e, k // 2, k % 2] = np.uint32(word | np.uint64(k % 2 == 0))


@compiled
def fill_order(order: Array, outside: Array, keys: Array, places: tuple[int, int]) -> None:
    """Write the order of an epoch; positions that land beyond the samples are moved on together."""
    samples = len(order)
    for i in range(samples):
        order[i] = _place(np.uint32(i), keys, places)
    count = 0
    for i in range(samples):
        outside[count] = i
        count += order[i] >= samples
    while count:
        waiting, count = count, 0
        for k in range(waiting):
            i = outside[k]
            order[i] = _place(order[i], keys, places)
            outside[count] = i
            count += order[i] >= samples


@inner
def _place(position: Any, keys: Array, places: tuple[int, int]) -> Any:
    mask, shift = np.uint32(places[0]), np.uint32(places[1])
    for k in range(ROUNDS):
        position = np.uint32(np.uint32(position * keys[k, 0]) + keys[k, 1]) & mask
        position = np.uint32(position ^ (position >> shift))
    return position
