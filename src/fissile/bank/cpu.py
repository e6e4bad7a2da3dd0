"""The bank on a processor: one compiled call trains one small MLP for many epochs.

A call holds no lock, so a pool of threads trains thousands of networks side by side, and none
depends on the others. It agrees with :func:`fissile.train.fit`: the same order of samples, loss,
penalties and Adam.

* A removed weight does not exist: a :class:`Wiring` lists the inputs each neuron has, so that an
  expanded network costs no more than the dense one.
* A batch is turned on its side, features by samples: each weight then meets a whole row of samples,
  in registers. Batches of any size go through in tiles of ``LANES`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fissile.order import ROUNDS, order_shape
from fissile.train import Recipe

__all__ = ["Architecture", "Samples", "Trained", "Wiring", "train_network"]

#: Samples per tile: one neuron's activations then fill a few vector registers.
LANES = 64
#: Inputs per block: a tile of them stays in the first-level cache while all neurons read it.
_BLOCK = 64
#: Dots over the samples that are summed up together.
_GROUP = 8
_CACHE_LINE = 64

Array = npt.NDArray[Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile, hold no lock, and keep NaN and infinity meaningful under fast arithmetic."""
    options = {
        "nogil": True,
        "cache": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    }
    return cast(Callable[_P, _R], njit(**options)(function))


# ------------------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Architecture:
    """The linear layers of a network: their widths, where ReLUs and biases are, and which is W1.

    >>> Architecture.mlp([32, 8, 1])
    Architecture(sizes=(32, 8, 1), relu=(True, False), biased=(True, True), first=0)
    """

    sizes: tuple[int, ...]
    relu: tuple[bool, ...]
    biased: tuple[bool, ...]
    first: int = 0

    @classmethod
    def mlp(cls, sizes: Sequence[int], embedding: int | None = None) -> Architecture:
        """Return the layers of ``fissile.MLP(sizes, embedding=embedding)``."""
        hidden = len(sizes) - 2
        front = () if embedding is None else (False,)
        widths = (sizes[0], *(() if embedding is None else (embedding,)), *sizes[1:])
        biased = (*front, *[True] * (hidden + 1))
        return cls(widths, (*front, *[True] * hidden, False), biased, len(front))

    @property
    def rows(self) -> int:
        """Count the neurons of all layers, outputs included."""
        return sum(self.sizes[1:])


class Samples(NamedTuple):
    """Samples and their labels, as the kernel reads them; nothing is copied if it need not be.

    >>> train = Samples.of(x, y)  # x may be a read-only memory map
    """

    x: Array
    y: Array

    @classmethod
    def of(cls, x: npt.ArrayLike, y: npt.ArrayLike, dtype: npt.DTypeLike = None) -> Samples:
        """Take anything that numpy understands, CPU tensors included."""
        kept = np.asarray(x) if dtype is None else np.asarray(x, dtype)
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


class Trained(NamedTuple):
    """What became of a network: epochs finished, Adam's step count, and a curve of each kind."""

    epochs: int
    step: int
    accuracy: Array
    loss: Array


def train_network(
    architecture: Architecture,
    ptr: Array,
    col: Array,
    theta: Array,
    m: Array,
    v: Array,
    step: int,
    train: Samples,
    test: Samples,
    keys: Array,
    recipe: Recipe,
) -> Trained:
    """Train one network in place, and measure it on the test samples after every epoch.

    >>> keys = np.stack([order_keys(seed, epoch).numpy() for epoch in range(25)])
    >>> done = train_network(layers, wiring.ptr[n], wiring.col[n], theta[n], m[n], v[n], 0,
    ...                      train, test, keys, Recipe())

    Args:
        architecture: the layers.
        ptr: where each neuron's weights begin, from :class:`Wiring`.
        col: which input each weight reads.
        theta: biases and weights; these and Adam's moments are changed in place.
        m: Adam's first moments.
        v: Adam's second moments.
        step: steps that Adam has taken so far.
        train: the samples to learn, in the dtype of theta.
        test: the samples to measure accuracy on.
        keys: [epochs, rounds, 2], from :func:`fissile.order.order_keys`.
        recipe: learning rate, batch and penalties.

    Returns:
        The epochs finished: fewer than asked for if the loss or a parameter ceased to be finite,
        and then parameters, moments and step are those of the last finished epoch.
    """
    if not theta.dtype == m.dtype == v.dtype == train.x.dtype == test.x.dtype:
        raise TypeError("parameters, moments and samples must have one dtype")
    bits, shift = order_shape(len(train.x))
    net = _Net(
        np.array(architecture.sizes),
        np.array(architecture.relu),
        np.array(architecture.biased),
        architecture.first,
        _cuts(architecture, ptr, col),
        col,
    )
    how = _How(recipe.lr, recipe.batch, recipe.l1, recipe.l2, recipe.orthogonal)
    curves = np.zeros((2, len(keys)))
    places = (1 << bits) - 1, shift
    words = np.ascontiguousarray(keys, np.uint32).reshape(-1, ROUNDS, 2)
    scratch = _scratch(architecture, theta, len(train.x), recipe)
    done = _train(net, theta, m, v, step, train, test, words, places, how, scratch, curves)
    return Trained(*done, curves[0, : done[0]], curves[1, : done[0]])


class _Net(NamedTuple):
    sizes: Array
    relu: Array
    biased: Array
    first: int
    cut: Array  # [blocks + 1, rows]: a neuron's weights, cut where a block of inputs begins
    col: Array


class _How(NamedTuple):
    lr: float
    batch: int
    l1: float
    l2: float
    orthogonal: float


class _Scratch(NamedTuple):
    tile: Array  # [inputs + rows, LANES]: the samples, then every neuron's activation
    delta: Array  # [rows, LANES]: the loss's gradient for every neuron
    grad: Array  # biases, then weights, then room for a group of dots
    kept: Array  # theta, m and v of the last finished epoch
    order: Array
    outside: Array
    rows: Array  # the samples in the tile
    bits: Array  # exponents, to be read as powers of two
    dense: Array  # W1 written out, its Gram matrix and a row, for orthogonality only
    gram: Array
    line: Array


def _scratch(architecture: Architecture, theta: Array, samples: int, recipe: Recipe) -> _Scratch:
    kind = theta.dtype
    inputs, outputs = architecture.sizes[architecture.first : architecture.first + 2]
    square = (outputs, inputs) if recipe.orthogonal else (0, 0)
    return _Scratch(
        _aligned((architecture.sizes[0] + architecture.rows, LANES), kind),
        _aligned((architecture.rows, LANES), kind),
        _aligned((1, len(theta) + _GROUP), kind)[0],
        np.empty((3, len(theta)), kind),
        np.empty(samples, np.uint32),
        np.empty(samples, np.uint32),
        np.zeros(LANES, np.int64),
        np.zeros(LANES, np.int64),
        np.zeros(square, kind),
        np.zeros((square[0], square[0]), kind),
        np.zeros(square[1], kind),
    )


def _aligned(shape: tuple[int, int], kind: np.dtype[Any]) -> Array:
    """Return an array on a boundary of cache lines, so that no vector straddles two."""
    size = shape[0] * shape[1] * kind.itemsize
    room = np.zeros(size + _CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % _CACHE_LINE
    return room[begin : begin + size].view(kind).reshape(shape)


def _cuts(architecture: Architecture, ptr: Array, col: Array) -> Array:
    """Return where each neuron's weights pass from one block of inputs to the next."""
    blocks = max(_blocks(inputs) for inputs in architecture.sizes[:-1])
    cut = np.empty((blocks + 1, architecture.rows), np.int64)
    _fill_cuts(cut, ptr, col)
    return cut


# ------------------------------------------------------------------------- vector instructions


def _chunks(builder: Any, array: Any, row: Any, kind: Any) -> list[Any]:
    """Return pointers to the register-wide pieces of one row of a [rows, LANES] array."""
    element = array.data.type.pointee if hasattr(array.data.type, "pointee") else None
    assert element is not None
    width = _CACHE_LINE // (kind.bitwidth // 8)
    start = builder.mul(row, row.type(LANES))
    vector = ir.VectorType(element, width).as_pointer()
    return [
        builder.bitcast(builder.gep(array.data, [builder.add(start, row.type(i))]), vector)
        for i in range(0, LANES, width)
    ]
