"""The kernel's working memory: allocated once a call, laid out for the first-level cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fissile.bank.cpu.instructions import CACHE_LINE, GROUP, LANES, compiled
from fissile.bank.cpu.layout import Architecture, Array, Wiring

__all__ = ["BLOCK", "Scratch", "blocks", "make_scratch"]

#: Inputs per block: a tile of them stays in the first-level cache while all neurons read it.
BLOCK = 64


@compiled
def blocks(inputs: int) -> int:
    """Count the blocks that so many inputs are cut into."""
    return (inputs + BLOCK - 1) // BLOCK


class Scratch(NamedTuple):
    """What the kernel needs besides the network: tiles, gradients, the order of samples."""

    tile: Array  # [inputs + rows, LANES]: the samples, then every neuron's activation
    delta: Array  # [rows, LANES]: the loss's gradient for every neuron
    grad: Array  # biases, then weights, then room for a group of dots
    kept: Array  # theta, m and v of the last finished epoch
    order: Array
    outside: Array
    rows: Array  # the samples in the tile
    y: Array  # and their labels
    bits: Array  # exponents, to be read as powers of two
    work: Array  # [3 + outputs, LANES]: what the loss needs, in double precision
    dense: Array  # W1 written out, its Gram matrix and a row, for orthogonality only
    gram: Array
    line: Array
    hat: Array  # [rows, LANES]: what a LayerNorm has made of every neuron, before scale and shift
    spread: Array  # [layers + 2, LANES]: one over its deviation, and two sums
    # The pattern of the network at hand, as _Net has it.
    cut: Array
    outptr: Array
    slot: Array
    target: Array


def make_scratch(
    architecture: Architecture, wiring: Wiring, state: Array, samples: int, orthogonal: bool
) -> Scratch:
    """Return working memory for networks of an architecture."""
    kind, rows = state.dtype, architecture.rows
    width = architecture.front + wiring.width
    normed = rows if architecture.norm else 0
    inputs, outputs = architecture.sizes[architecture.first : architecture.first + 2]
    square = (outputs, inputs) if orthogonal else (0, 0)
    cuts = max(blocks(inputs) for inputs in architecture.sizes[:-1]) + 1
    return Scratch(
        _aligned((architecture.sizes[0] + rows, LANES), kind),
        _aligned((rows, LANES), kind),
        _aligned((1, width + GROUP), kind)[0],
        np.empty((3, width), kind),
        np.empty(samples, np.uint32),
        np.empty(samples, np.uint32),
        np.zeros(LANES, np.int64),
        np.zeros(LANES, np.int64),
        np.zeros(LANES, np.int64),
        _aligned((3 + architecture.sizes[-1], LANES), np.dtype(np.float64)),
        np.zeros(square, kind),
        np.zeros((square[0], square[0]), kind),
        np.zeros(square[1], kind),
        _aligned((normed, LANES), kind),
        _aligned((len(architecture.norm) + 2, LANES), kind),
        np.empty((cuts, rows), np.int64),
        np.empty(rows + 1, np.int64),
        np.empty(width, np.int32),
        np.empty(width, np.int32),
    )


def _aligned(shape: tuple[int, int], kind: np.dtype[Any]) -> Array:
    """Return an array on a boundary of cache lines, so that no vector straddles two."""
    size = shape[0] * shape[1] * kind.itemsize
    room = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % CACHE_LINE
    return room[begin : begin + size].view(kind).reshape(shape)
