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

Array = npt.NDArray[Any]
#: Inputs per block: a tile of them stays in the first-level cache while all neurons read it.
BLOCK = 64


class Architecture(NamedTuple):
    """The linear layers of a network: their widths, what is behind them, and which is W1."""

    sizes: Array
    relu: Array
    biased: Array
    first: int
    norm: Array  # the epsilon of the LayerNorm behind each layer, 0 where there is none

    @property
    def rows(self) -> int:
        """Count the neurons of all layers, outputs included."""
        return int(self.sizes[1:].sum())

    @property
    def vectors(self) -> tuple[str, ...]:
        """Name what a flat row has of every neuron before the weights."""
        return ("scale", "shift", "bias") if self.norm.any() else ("bias",)


class Samples(NamedTuple):
    """Samples and their labels, as the kernel reads them; nothing is copied if it need not be."""

    x: Array
    y: Array

    @classmethod
    def of(cls, x: npt.ArrayLike, y: npt.ArrayLike) -> Samples:
        """Return samples of anything that numpy understands, CPU tensors included."""
        return cls(_read_only(np.asarray(x)), _read_only(np.asarray(y, np.int64)))


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

    A row of ``theta`` is a network: one or more vectors over all neurons (the biases), then the
    weights of neuron after neuron. Zeros fill up the rows of networks with fewer weights.
    """

    sizes: tuple[int, ...]
    ptr: Array  # [networks, rows + 1]: where each neuron's weights begin
    col: Array  # [networks, width]: which input each weight reads
    place: Array  # [networks, width]: where each weight lies in the matrices, one past all for none

    @classmethod
    def of(cls, masks: Sequence[npt.ArrayLike]) -> Wiring:
        """List the weights under masks, one [networks, outputs, inputs] per layer."""
        layers = [np.asarray(mask, bool) for mask in masks]
        sizes = (layers[0].shape[2], *[layer.shape[1] for layer in layers])
        counts = np.concatenate([layer.sum(2) for layer in layers], 1)
        ptr = np.zeros((len(counts), counts.shape[1] + 1), np.int32)
        np.cumsum(counts, 1, out=ptr[:, 1:])
        flat = np.concatenate([layer.reshape(len(layer), -1) for layer in layers], 1)
        width = int(ptr[:, -1].max())
        place = np.argsort(~flat, 1, kind="stable")[:, :width]  # those that exist come first
        place[np.arange(width) >= ptr[:, -1:]] = flat.shape[1]
        inputs = [np.tile(np.arange(i, dtype=np.int32), o) for i, o in pairwise(sizes)]
        return cls(sizes, ptr, np.append(np.concatenate(inputs), np.int32(0))[place], place)

    @property
    def complete(self) -> bool:
        """Whether every weight exists in every network."""
        most = sum(inputs * outputs for inputs, outputs in pairwise(self.sizes))
        return bool((self.ptr[:, -1] == most).all())

    def pack(
        self, weights: Sequence[npt.ArrayLike], *vectors: Sequence[npt.ArrayLike | None]
    ) -> Array:
        """Write stacks of weights [networks, outputs, inputs] and of vectors out as flat rows."""
        stacks = [np.asarray(weight) for weight in weights]
        nothing = np.zeros((len(self.ptr), max(self.sizes)), stacks[0].dtype)
        dense = [stack.reshape(len(stack), -1) for stack in stacks]
        neurons = [
            nothing[:, :outputs] if values is None else np.asarray(values)
            for vector in vectors
            for outputs, values in zip(self.sizes[1:], vector, strict=True)
        ]
        if not self.complete:
            dense = [np.concatenate([*dense, nothing[:, :1]], 1)]
            dense = [np.take_along_axis(dense[0], self.place, 1)]
        return np.concatenate([*neurons, *dense], 1)

    def unpack(self, theta: Array) -> list[list[Array]]:
        """Return the weights, with zeros where none exist, and the vectors, layer by layer."""
        shapes = [(outputs, inputs) for inputs, outputs in pairwise(self.sizes)]
        ends = np.cumsum([0, *[o * i for o, i in shapes]])
        front = theta.shape[1] - self.place.shape[1]
        dense = theta[:, front:]
        if not self.complete:
            dense = np.zeros((len(theta), ends[-1] + 1), theta.dtype)
            np.put_along_axis(dense, self.place, theta[:, front:], 1)
        parts = np.split(dense[:, : ends[-1]], ends[1:-1], 1)
        weights = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        vectors = np.split(theta[:, :front], front // sum(self.sizes[1:]), 1)
        cuts = np.cumsum(self.sizes[1:])[:-1]
        return [weights, *[np.split(vector, cuts, 1) for vector in vectors]]


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
    work: Array  # [2 + outputs, LANES]: what the loss needs, in double precision
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
    architecture: Architecture, theta: Array, samples: int, orthogonal: bool
) -> Scratch:
    """Return working memory for networks of an architecture, of which theta has the flat rows."""
    kind, width, rows = theta.dtype, theta.shape[1], architecture.rows
    layers, normed = len(architecture.norm), rows if architecture.norm.any() else 0
    inputs, outputs = architecture.sizes[architecture.first : architecture.first + 2]
    square = (outputs, inputs) if orthogonal else (0, 0)
    return Scratch(
        tile=_aligned((architecture.sizes[0] + rows, LANES), kind),
        delta=_aligned((rows, LANES), kind),
        grad=_aligned((1, width + GROUP), kind)[0],
        kept=np.empty((3, width), kind),
        order=np.empty(samples, np.uint32),
        outside=np.empty(samples, np.uint32),
        rows=np.zeros(LANES, np.int64),
        y=np.zeros(LANES, np.int64),
        work=_aligned((2 + architecture.sizes[-1], LANES), np.dtype(np.float64)),
        dense=np.zeros(square, kind),
        gram=np.zeros((square[0], square[0]), kind),
        line=np.zeros(square[1], kind),
        hat=_aligned((normed, LANES), kind),
        spread=_aligned((layers + 2 if normed else 2, LANES), kind),
        cut=np.empty((max(map(blocks, architecture.sizes[:-1])) + 1, rows), np.int64),
        outptr=np.empty(rows + 1, np.int64),
        slot=np.empty(width, np.int32),
        target=np.empty(width, np.int32),
    )


class Masks(NamedTuple):
    """Which weights of some networks take part in a step; arrays are empty where all of them do."""

    present: Array  # [networks, weights]: masks that stay as they are
    degree: Array  # [networks, rows]: of how many inputs a neuron draws a mask at every step, or -1
    keys: Array  # [networks, layers, steps]: what masks are drawn from, for the networks at hand
    share: Array  # [networks, layers]: what evaluation multiplies a layer's weights by
    gradient: Array  # as theta: receives the whole gradient at the last step, for growth by it

    @classmethod
    def of(cls, kind: np.dtype[Any], **given: Array) -> Masks:
        """Return masks with empty arrays for what is not given."""
        none = np.empty((0, 0))
        return cls(
            present=given.get("present", none.astype(np.bool_)),
            degree=given.get("degree", none.astype(np.int64)),
            keys=given.get("keys", np.empty((0, 0, 0), np.uint32)),
            share=given.get("share", none),
            gradient=given.get("gradient", none.astype(kind)),
        )


class Part(NamedTuple):
    """The weights of a network that take part in a step, listed as if there were no others."""

    flags: Array  # which of all weights they are
    hashes: Array  # by which a neuron's are chosen
    ptr: Array
    col: Array
    place: Array  # where each is among all weights
    w: Array
    grad: Array
    cut: Array
    outptr: Array
    slot: Array
    target: Array


def make_part(architecture: Architecture, theta: Array, masks: Masks) -> Part:
    """Return room for the weights that take part, none where all do."""
    some = bool(masks.present.size or masks.degree.size)
    width, rows = (theta.shape[1], architecture.rows) if some else (0, 0)
    return Part(
        flags=np.empty(width, np.bool_),
        hashes=np.empty(int(architecture.sizes.max()), np.uint32),
        ptr=np.empty(rows + 1, np.int32),
        col=np.empty(width, np.int32),
        place=np.empty(width + 1, np.uint32),
        w=_aligned((1, width), theta.dtype)[0],
        grad=_aligned((1, width + GROUP), theta.dtype)[0],
        cut=np.empty((max(map(blocks, architecture.sizes[:-1])) + 1, rows), np.int64),
        outptr=np.empty(rows + 1, np.int64),
        slot=np.empty(width, np.int32),
        target=np.empty(width, np.int32),
    )


def _aligned(shape: tuple[int, int], kind: np.dtype[Any]) -> Array:
    """Return an array on a boundary of cache lines, so that no vector straddles two."""
    size = shape[0] * shape[1] * kind.itemsize
    room = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % CACHE_LINE
    return room[begin : begin + size].view(kind).reshape(shape)
