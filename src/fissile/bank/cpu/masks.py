"""Masks in the compiled kernel: DropConnect's draw, and lists of the weights that take part."""

from __future__ import annotations

from typing import Any

import numpy as np

from fissile._common.random import GOLDEN
from fissile.bank.cpu.instructions import compiled, inner
from fissile.bank.cpu.layout import Array, Part


@compiled
def draw(key: Any, first: int, degree: int, hashes: Array, flags: Array) -> None:
    """Mark the ``degree`` inputs of a neuron with the smallest hashes: ``draw_mask`` of the layer.

    ``first`` is the number of the neuron's first weight in its layer. No two hashes of a key are
    equal, because mixing can be undone.
    """
    for i in range(len(flags)):
        hashes[i] = _scramble(_scramble(key ^ np.uint32(first + i)))
    # The border is found bit by bit, from the highest: no more than ``degree`` hashes are below.
    border, below, bit = np.uint32(0), np.uint32(0), np.uint32(1 << 31)
    while bit and below != degree:
        middle, count = np.uint32(border | bit), np.uint32(0)
        for i in range(len(flags)):
            count = np.uint32(count + np.uint32(hashes[i] < middle))
        if count <= degree:
            border, below = middle, count
        bit = np.uint32(bit >> np.uint32(1))
    for i in range(len(flags)):
        flags[i] = hashes[i] < border or degree == len(flags)


@inner
def _scramble(state: Any) -> Any:
    """Mix a word into a state, as ``fissile._common.random`` does."""
    h = np.uint32(state + np.uint32(GOLDEN))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return h ^ (h >> np.uint32(16))


@inner
def list_chosen(part: Part, cut: Array, col: Array, begin: int, end: int) -> None:
    """List the marked weights of some neurons; ``cut`` is where blocks cut the list of all."""
    last = part.ptr[end]
    behind = part.place[last]
    for r in range(begin, end):
        p = np.uint64(part.ptr[r])
        part.cut[0, r] = p
        for block in range(1, len(cut)):
            # What is not marked is written too, and then overwritten: no branch is predicted wrong.
            for i in range(cut[block - 1, r], cut[block, r]):
                part.place[p] = i
                p = np.uint64(p + np.uint64(part.flags[i]))
            part.cut[block, r] = p
    part.place[last] = behind
    for k in range(part.ptr[begin], last):
        part.col[k] = col[part.place[k]]


@inner
def count_chosen(part: Part, ptr: Array) -> None:
    """Note where the list of each neuron's marked weights begins."""
    part.ptr[0] = 0
    for r in range(len(ptr) - 1):
        count = 0
        for i in range(ptr[r], ptr[r + 1]):
            count += part.flags[i]
        part.ptr[r + 1] = part.ptr[r] + count


@inner
def take_weights(part: Part, w: Array) -> None:
    """Copy the weights that take part side by side."""
    for p in range(part.ptr[len(part.ptr) - 1]):
        part.w[p] = w[part.place[p]]


@inner
def spread_gradient(part: Part, grad: Array, start: int) -> None:
    """Write the gradient of what takes part out; weights, from ``start`` on, have else none."""
    weights, mine = grad[start:], part.grad[start:]
    for i in range(start):
        grad[i] = part.grad[i]
    for i in range(len(weights)):
        weights[i] = 0
    for p in range(part.ptr[len(part.ptr) - 1]):
        weights[part.place[p]] = mine[p]


@inner
def cut_gradient(part: Part, grad: Array, start: int) -> None:
    """Set the gradient of the weights that do not take part to zero."""
    for i in range(start):
        part.grad[i] = grad[i]
    for p in range(part.ptr[len(part.ptr) - 1]):
        part.grad[start + p] = grad[start + np.int64(part.place[p])]
    spread_gradient(part, grad, start)
