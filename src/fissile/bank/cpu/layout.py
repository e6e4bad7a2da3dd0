"""How networks, samples and working memory lie in memory for the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fissile._common.llvm import CACHE_LINE
from fissile.bank.cpu.instructions import GROUP, LANES, compiled

__all__ = [
    "BLOCK", "Architecture", "Array", "Samples", "Scratch", "Wiring", "blocks", "make_scratch",
]  # fmt: skip

Array = npt.NDArray[Any]
#: Inputs per block: a tile of them stays in the first-level cache while all neurons read it.
BLOCK = 64


@dataclass(frozen=True)
class Architecture:
    """The linear layers of a network: their widths, what is behind them, and which is W1.

    >>> Architecture((32, 8, 1), relu=(True, False), biased=(True, True))

    ``norm`` holds the epsilon of the LayerNorm behind each layer, 0 where there is none, or nothing
    if there is none at all. Scales and shifts come before the biases in a flat row.
    """

    sizes: tuple[int, ...]
    relu: tuple[bool, ...]
    biased: tuple[bool, ...]
    first: int = 0
    norm: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        """Count the neurons of all layers, outputs included."""
        return sum(self.sizes[1:])

    @property
    def front(self) -> int:
        """Count what comes before the biases in a flat row: scales and shifts of LayerNorms."""
        return 2 * self.rows if self.norm else 0


class Samples(NamedTuple):
    """Samples and their labels, as the kernel reads them; nothing is copied if it need not be.

    >>> train = Samples.of(x, y)  # x may be a read-only memory map
    """

    x: Array
    y: Array

    @classmethod
    def of(cls, x: npt.ArrayLike, y: npt.ArrayLike) -> Samples:
        """Take anything that numpy understands, CPU tensors included."""
        kept = np.asarray(x)
        if kept.dtype not in (np.float32, np.float64):
            kept = kept.astype(np.float32)
        return cls(_read_only(kept), _read_only(np.asarray(y, np.int64)))


def _read_only(array: Array) -> Array:
    """Return a view that cannot be written, so that the kernel is compiled for one kind only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Wiring:
    """Which weights exist, for a stack of networks of one architecture.

    >>> wiring = Wiring.of([w1 != 0, w2 != 0])  # masks [networks, outputs, inputs]
    >>> theta = wiring.pack([w1, w2], [b1, b2])
    >>> (w1, w2), (b1, b2) = wiring.unpack(theta)

    Row n of ``theta`` holds the biases of all neurons, then the weights of neuron after neuron;
    networks with fewer weights than others are padded with zeros that nothing touches.
    """

    sizes: tuple[int, ...]
    ptr: Array  # [networks, rows + 1]: where each neuron's weights begin
    col: Array  # [networks, width]: which input each weight reads

    @classmethod
    def of(cls, masks: Sequence[npt.ArrayLike]) -> Wiring:
        """List the weights under masks, one [networks, outputs, inputs] per layer."""
        layers = [np.asarray(mask, bool) for mask in masks]
        sizes = (layers[0].shape[2], *[layer.shape[1] for layer in layers])
        counts = np.concatenate([layer.sum(2) for layer in layers], 1)
        ptr = np.zeros((len(counts), counts.shape[1] + 1), np.int32)
        np.cumsum(counts, 1, out=ptr[:, 1:])
        flat = np.concatenate([layer.reshape(len(layer), -1) for layer in layers], 1)
        network, place = np.nonzero(flat)
        inputs = np.concatenate([np.tile(np.arange(i), o) for i, o in pairwise(sizes)])
        col = np.zeros((len(flat), int(ptr[:, -1].max())), np.int32)
        col[network, _rank(network, ptr)] = inputs[place]
        return cls(sizes, ptr, col)

    @property
    def rows(self) -> int:
        """Count the neurons of one network."""
        return sum(self.sizes[1:])

    @property
    def width(self) -> int:
        """Count the entries of one network's flat row."""
        return self.rows + int(self.col.shape[1])

    def pack(
        self, weights: Sequence[npt.ArrayLike], biases: Sequence[npt.ArrayLike | None]
    ) -> Array:
        """Write stacks of weights [networks, outputs, inputs] and biases out as flat rows."""
        stacks = [np.asarray(weight) for weight in weights]
        dense = np.concatenate([stack.reshape(len(stack), -1) for stack in stacks], 1)
        theta = np.zeros((len(dense), self.rows + self.col.shape[1]), dense.dtype)
        row = 0
        for outputs, bias in zip(self.sizes[1:], biases, strict=True):
            if bias is not None:
                theta[:, row : row + outputs] = np.asarray(bias)
            row += outputs
        network, slot, place = self._places()
        theta[network, self.rows + slot] = dense[network, place]
        return theta

    def unpack(self, theta: Array) -> tuple[list[Array], list[Array]]:
        """Read the stacks back, with zeros where no weight exists; biases come for all layers."""
        network, slot, place = self._places()
        shapes = [(outputs, inputs) for inputs, outputs in pairwise(self.sizes)]
        dense = np.zeros((len(theta), sum(o * i for o, i in shapes)), theta.dtype)
        dense[network, place] = theta[network, self.rows + slot]
        ends = np.cumsum([o * i for o, i in shapes])[:-1]
        parts = np.split(dense, ends, 1)
        weights = [p.reshape(-1, *s) for p, s in zip(parts, shapes, strict=True)]
        biases = np.split(theta[:, : self.rows], np.cumsum(self.sizes[1:])[:-1], 1)
        return weights, [bias.copy() for bias in biases]

    def _places(self) -> tuple[Array, Array, Array]:
        """Return, for every weight, its network, its slot there, and its place in dense layers."""
        fan_in = np.concatenate([np.full(o, i) for i, o in pairwise(self.sizes)])
        begin = np.cumsum(fan_in) - fan_in
        counts = np.diff(self.ptr, axis=1)
        network = np.repeat(np.arange(len(counts)), counts.sum(1))
        slot = _rank(network, self.ptr)
        row = np.repeat(np.tile(np.arange(self.rows), len(counts)), counts.reshape(-1))
        return network, slot, begin[row] + self.col[network, slot]


def _rank(network: Array, ptr: Array) -> Array:
    """Number the weights of each network from zero; they are listed network after network."""
    ends = np.cumsum(ptr[:, -1], dtype=np.int64)
    return np.arange(len(network)) - (ends - ptr[:, -1])[network]


@compiled
def blocks(inputs: int) -> int:
    """Return how many blocks the inputs are cut into."""
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
