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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fissile.errors import FissileError, whole
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
_LOG2_E = 1 / math.log(2)
_LN2 = math.log(2)
#: The series of exp from its smallest term, exact to double precision within half of ln 2.
_TAYLOR = tuple(1 / math.factorial(i) for i in range(13, -1, -1))

Array = npt.NDArray[Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile, hold no lock, and keep NaN and infinity meaningful under fast arithmetic."""
    options: Any = {
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
    _check(architecture, ptr, col, (theta, m, v), (train, test), recipe)
    col = np.ascontiguousarray(col, np.int32)
    bits, shift = order_shape(len(train.x))
    net = _Net(
        np.array(architecture.sizes),
        np.array(architecture.relu),
        np.array(architecture.biased),
        architecture.first,
        _cuts(architecture, ptr, col),
        col,
        *_outgoing(architecture, ptr, col),
    )
    how = _How(recipe.lr, recipe.batch, recipe.l1, recipe.l2, recipe.orthogonal)
    curves = np.zeros((2, len(keys)))
    places = (1 << bits) - 1, shift
    words = np.ascontiguousarray(keys, np.uint32).reshape(-1, ROUNDS, 2)
    scratch = _scratch(architecture, theta, len(train.x), recipe)
    done = _train(net, theta, m, v, step, train, test, words, places, how, scratch, curves)
    return Trained(*done, curves[0, : done[0]], curves[1, : done[0]])


def _check(
    architecture: Architecture,
    ptr: Array,
    col: Array,
    states: tuple[Array, ...],
    samples: tuple[Samples, ...],
    recipe: Recipe,
) -> None:
    """Refuse what does not fit together: compiled code would read beyond an array's end."""
    kinds = {str(array.dtype) for array in (*states, *[one.x for one in samples])}
    if len(kinds) > 1:
        raise FissileError(f"parameters, moments and samples have several dtypes: {sorted(kinds)}")
    rows = architecture.rows
    if len(ptr) != rows + 1 or any(s.shape != (rows + len(col),) for s in states):
        raise FissileError(f"the flat parameters do not belong to layers {architecture.sizes}")
    if not all(state.flags.c_contiguous for state in states):
        raise FissileError("parameters and moments must be contiguous: they change in place")
    for x, y in samples:
        if x.ndim != 2 or x.shape[1] != architecture.sizes[0] or y.shape != x.shape[:1]:
            raise FissileError(
                f"samples {x.shape} with labels {y.shape} do not fit {architecture.sizes[0]} inputs"
            )
        if not len(x):
            raise FissileError("there are no samples to train on or to test with")
    whole("the batch", recipe.batch, least=1)


class _Net(NamedTuple):
    sizes: Array
    relu: Array
    biased: Array
    first: int
    cut: Array  # [blocks + 1, rows]: a neuron's weights, cut where a block of inputs begins
    col: Array
    # The same weights by the neuron they come from, for the way back: where each neuron's begin,
    # their places in w, and the neurons they lead to.
    outptr: Array
    slot: Array
    target: Array


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
    y: Array  # and their labels
    bits: Array  # exponents, to be read as powers of two
    work: Array  # [3 + outputs, LANES]: what the loss needs, in double precision
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
        np.zeros(LANES, np.int64),
        _aligned((3 + architecture.sizes[-1], LANES), np.dtype(np.float64)),
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


def _outgoing(architecture: Architecture, ptr: Array, col: Array) -> tuple[Array, Array, Array]:
    """List the weights of all but the first layer by the neuron they come from."""
    sizes, begin = architecture.sizes, architecture.sizes[1]
    base = np.repeat(np.cumsum([0, *sizes[1:-2]]), sizes[2:]) if len(sizes) > 2 else ptr[:0]
    counts = np.diff(ptr[begin:])
    target = np.repeat(np.arange(begin, architecture.rows), counts)
    source = np.repeat(base, counts) + col[ptr[begin] : ptr[-1]]
    by_source = np.argsort(source, kind="stable")
    outptr = np.searchsorted(source[by_source], np.arange(architecture.rows + 1))
    slot = (by_source + ptr[begin]).astype(np.int32)
    return outptr, slot, target[by_source].astype(np.int32)


# ------------------------------------------------------------------------- vector instructions
#
# Written as instructions because the compiler, left alone, keeps no row of samples in registers.


_tools: Any = cgutils  # it has no types


def _instructions(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what a function emits; to type checkers it may be anything."""
    return intrinsic(function)


class _Emit:
    """Emits instructions on rows of [rows, LANES] arrays, register by register."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.args = [
            context.make_array(kind)(context, builder, value).data
            if isinstance(kind, types.Array)
            else value
            for kind, value in zip(signature.args, args, strict=True)
        ]
        self.element = self.args[0].type.pointee
        #: Numbers in a register of one cache line.
        self.width = _CACHE_LINE // (4 if isinstance(self.element, ir.FloatType) else 8)

    def at(self, data: Any, index: Any, width: int = 0) -> Any:
        """Return a pointer to an entry, or to a vector of so many that begins there."""
        pointer = self.builder.gep(data, [index])
        if not width:
            return pointer
        kind = ir.VectorType(self.element, width).as_pointer()
        return self.builder.bitcast(pointer, kind)

    def row(self, data: Any, row: Any) -> list[Any]:
        """Return pointers to the registers of a row."""
        start = self.builder.mul(row, row.type(LANES))
        steps = range(0, LANES, self.width)
        return [self.at(data, self.builder.add(start, start.type(i)), self.width) for i in steps]

    def load(self, pointer: Any) -> Any:
        return self.builder.load(pointer, align=self._align())

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer, align=self._align())

    def _align(self) -> int:
        return _CACHE_LINE // self.width

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def variables(self, values: list[Any]) -> list[Any]:
        return [_tools.alloca_once_value(self.builder, value) for value in values]

    def add_row(self, sums: list[Any], weight: Any, data: Any, row: Any) -> None:
        """Add a row, times a number, to variables that end up in registers."""
        for total, pointer in zip(sums, self.row(data, row), strict=True):
            old = self.builder.load(total)
            self.builder.store(self.multiply_add(weight, self.load(pointer), old), total)

    def copies(self, value: Any) -> Any:
        """Return a register full of one number."""
        kind = ir.VectorType(self.element, self.width)
        single = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _word(0))
        return self.shuffle(single, single, [0] * self.width)

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), [_word(i) for i in order])
        return self.builder.shuffle_vector(a, b, mask)

    def input_of(self, col: Any, p: Any, base: Any) -> Any:
        """Return the row of the tile that a weight reads."""
        index = self.builder.load(self.builder.gep(col, [p]))
        return self.builder.add(base, self.builder.sext(index, base.type))


def _word(number: int) -> Any:
    return ir.Constant(ir.IntType(32), number)


@_instructions
def _push(
    typing: Any, tile: Any, r: Any, base: Any, w: Any, col: Any, lo: Any, hi: Any, b: Any, cut: Any
) -> Any:
    """Set tile[r] to the sum of w[p] * tile[base + col[p]] over lo <= p < hi, in registers.

    The sum begins with b, or with tile[r] itself if cut & 1; a ReLU follows if cut & 2.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        tile, r, base, w, col, lo, hi, b, cut = on.args
        row, zero = on.row(tile, r), on.copies(ir.Constant(on.element, 0.0))
        goes_on = builder.trunc(cut, ir.IntType(1))
        rectified = builder.trunc(builder.lshr(cut, cut.type(1)), ir.IntType(1))
        sums = on.variables([builder.select(goes_on, on.load(q), on.copies(b)) for q in row])
        with _tools.for_range_slice(builder, lo, hi, lo.type(1), lo.type) as (p, _):
            weight = on.copies(builder.load(builder.gep(w, [p])))
            on.add_row(sums, weight, tile, on.input_of(col, p, base))
        for total, pointer in zip(sums, row, strict=True):
            value = builder.load(total)
            negative = builder.fcmp_ordered("<", value, zero)  # NaN is not, and stays
            kept = builder.select(negative, zero, value)
            on.store(builder.select(rectified, kept, value), pointer)
        return context.get_dummy_value()

    return types.void(tile, r, base, w, col, lo, hi, b, cut), emit


@_instructions
def _pull(
    typing: Any, delta: Any, r: Any, w: Any, slot: Any, source: Any, lo: Any, hi: Any,
    tile: Any, t: Any, rectified: Any,
) -> Any:  # fmt: skip
    """Set delta[r] to the sum of w[slot[q]] * delta[source[q]] over lo <= q < hi; return its sum.

    No gradient passes where a ReLU is off, that is where tile[t] is zero.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        delta, r, w, slot, source, lo, hi, tile, t, rectified = on.args
        zero = on.copies(ir.Constant(on.element, 0.0))
        sums = on.variables([zero] * (LANES // on.width))
        with _tools.for_range_slice(builder, lo, hi, lo.type(1), lo.type) as (q, _):
            weight = on.copies(builder.load(builder.gep(w, [on.input_of(slot, q, lo.type(0))])))
            on.add_row(sums, weight, delta, on.input_of(source, q, lo.type(0)))
        whole = zero
        for total, to, act in zip(sums, on.row(delta, r), on.row(tile, t), strict=True):
            value = builder.load(total)
            closed = builder.select(builder.fcmp_unordered(">", on.load(act), zero), value, zero)
            value = builder.select(builder.trunc(rectified, ir.IntType(1)), closed, value)
            on.store(value, to)
            whole = builder.fadd(whole, value)
        while whole.type.count > 1:
            half = whole.type.count // 2
            low, high = on.shuffle(whole, whole, range(half)), range(half, 2 * half)
            whole = builder.fadd(low, on.shuffle(whole, whole, high))
        return builder.extract_element(whole, _word(0))

    sig = delta.dtype(delta, r, w, slot, source, lo, hi, tile, t, rectified)
    return sig, emit


@_instructions
def _add_dots(
    typing: Any, grad: Any, tile: Any, base: Any, col: Any, lo: Any, hi: Any, delta: Any, r: Any
) -> Any:
    """grad[p] += dot of delta[r] and tile[base + col[p]] for lo <= p < hi, a group at a time."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        grad, tile, base, col, lo, hi, delta, r = on.args
        held = [on.load(pointer) for pointer in on.row(delta, r)]

        def dot(p: Any) -> Any:
            pointers = on.row(tile, on.input_of(col, p, base))
            total = builder.fmul(held[0], on.load(pointers[0]))
            for d, pointer in zip(held[1:], pointers[1:], strict=True):
                total = on.multiply_add(d, on.load(pointer), total)
            return total

        last = builder.sub(hi, hi.type(1))
        size = hi.type(_GROUP)
        with _tools.for_range_slice(builder, lo, hi, size, lo.type) as (p, _):
            # Beyond the end the last dot is repeated, and not added.
            places = [builder.add(p, p.type(i)) for i in range(_GROUP)]
            clamped = [builder.select(builder.icmp_signed("<", q, hi), q, last) for q in places]
            sums = _sums(on, [dot(q) for q in clamped])
            to = on.at(grad, p, _GROUP)
            counted = _below(on, builder.sub(hi, p))
            zero = ir.Constant(sums.type, [ir.Constant(on.element, 0.0)] * _GROUP)
            on.store(builder.fadd(on.load(to), builder.select(counted, sums, zero)), to)
        return context.get_dummy_value()

    return types.void(grad, tile, base, col, lo, hi, delta, r), emit


def _sums(on: _Emit, vectors: list[Any]) -> Any:
    """Sum every vector up: neighbours are added while two vectors shrink into one."""
    while len(vectors) > 1 or vectors[0].type.count > _GROUP:
        width = vectors[0].type.count
        pairs = pairwise(vectors) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        count = 2 * width if len(vectors) > 1 else width
        pairs = list(pairs)[::2]
        even, odd = range(0, count, 2), range(1, count, 2)
        vectors = [on.builder.fadd(on.shuffle(a, b, even), on.shuffle(a, b, odd)) for a, b in pairs]
    return vectors[0]


def _below(on: _Emit, count: Any) -> Any:
    """Mark the members of a group whose number is below a count."""
    kind = ir.VectorType(count.type, _GROUP)
    numbers = ir.Constant(kind, [count.type(i) for i in range(_GROUP)])
    single = on.builder.insert_element(ir.Constant(kind, ir.Undefined), count, _word(0))
    return on.builder.icmp_signed("<", numbers, on.shuffle(single, single, [0] * _GROUP))


@_instructions
def _prefetch(typing: Any, x: Any, index: Any) -> Any:
    """Ask for the cache line of an entry of x, counted through all rows."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        x, index = on.args
        pointer = builder.bitcast(on.at(x, index), _tools.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        function = _tools.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, _word(0), _word(3), _word(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.void(x, index), emit


@_instructions
def _turn(typing: Any, tile: Any, x: Any, width: Any, rows: Any, lane: Any, feature: Any) -> Any:
    """tile[feature + i, lane + k] = x[rows[lane + k], feature + i] for a square of i and k."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        on = _Emit(context, builder, signature, args)
        tile, x, width, rows, lane, feature = on.args
        size, whole = on.width, lane.type
        square = []
        for k in range(size):
            sample = builder.load(builder.gep(rows, [builder.add(lane, whole(k))]))
            begin = builder.add(builder.mul(sample, width), feature)
            square.append(on.load(on.at(x, begin, size)))
        low = [i // 2 + size * (i % 2) for i in range(size)]
        high = [i + size // 2 for i in low]
        for _ in range(size.bit_length() - 1):
            # A perfect shuffle of rows and entries; after log2(size) of them the square is turned.
            pairs = zip(square[: size // 2], square[size // 2 :], strict=True)
            square = [on.shuffle(a, b, how) for a, b in pairs for how in (low, high)]
        for i, values in enumerate(square):
            row = builder.mul(builder.add(feature, whole(i)), whole(LANES))
            on.store(values, on.at(tile, builder.add(row, lane), size))
        return context.get_dummy_value()

    return types.void(tile, x, width, rows, lane, feature), emit


# ------------------------------------------------------------------------- the kernel


@_compiled
def _blocks(inputs: int) -> int:
    return (inputs + _BLOCK - 1) // _BLOCK


@_compiled
def _fill_cuts(cut: Array, ptr: Array, col: Array) -> None:
    for r in range(len(ptr) - 1):
        p = np.int64(ptr[r])
        cut[0, r] = p
        for block in range(1, len(cut)):
            while p < ptr[r + 1] and col[p] < block * _BLOCK:
                p += 1
            cut[block, r] = p


@_compiled
def _fill_order(order: Array, outside: Array, keys: Array, places: tuple[int, int]) -> None:
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


@_compiled
def _place(position: Any, keys: Array, places: tuple[int, int]) -> Any:
    mask, shift = np.uint32(places[0]), np.uint32(places[1])
    for k in range(ROUNDS):
        position = np.uint32(np.uint32(position * keys[k, 0]) + keys[k, 1]) & mask
        position = np.uint32(position ^ (position >> shift))
    return position


@_compiled
def _gather(tile: Array, x: Array, rows: Array, begin: int, end: int) -> None:
    """Turn some features of the tile's samples on their side."""
    side = _CACHE_LINE // x.itemsize
    for lane in range(0, LANES, side):
        feature = begin
        while feature + side <= end:
            _turn(tile, x, x.shape[1], rows, lane, feature)
            feature += side
        for i in range(feature, end):
            for k in range(lane, lane + side):
                tile[i, k] = x[rows[k], i]


@_compiled
def _forward(net: _Net, b: Array, w: Array, x: Array, tile: Array, rows: Array) -> None:
    """Compute the activations of the tile's samples, layer upon layer."""
    below, row, inputs = 0, 0, x.shape[1]
    for layer in range(len(net.relu)):
        size = net.sizes[layer]
        end = row + net.sizes[layer + 1]
        last = _blocks(size) - 1
        for block in range(last + 1):
            if layer == 0:
                _gather(tile, x, rows, block * _BLOCK, min(size, (block + 1) * _BLOCK))
            cut = (block > 0) + 2 * (block == last and net.relu[layer])
            for r in range(row, end):
                lo, hi = net.cut[block, r], net.cut[block + 1, r]
                _push(tile, inputs + r, below, w, net.col, lo, hi, b[r], cut)
        below += size
        row = end


@_compiled
def _backward(net: _Net, w: Array, tile: Array, delta: Array, grad_b: Array, grad_w: Array) -> None:
    """Add the gradients of the tile's samples, from the delta of the outputs downwards."""
    row, inputs = len(delta), net.sizes[0]
    _add_sums(grad_b, delta, row - net.sizes[-1], row, net.biased[-1])
    for layer in range(len(net.relu) - 1, -1, -1):
        size = net.sizes[layer]
        end, row = row, row - net.sizes[layer + 1]
        begin = row - size  # among neurons; the inputs come before them in the tile
        for block in range(_blocks(size)):
            for r in range(row, end):
                lo, hi = net.cut[block, r], net.cut[block + 1, r]
                _add_dots(grad_w, tile, inputs + begin, net.col, lo, hi, delta, r)
        if layer > 0:
            biased, relu = net.biased[layer - 1], net.relu[layer - 1]
            for r in range(begin, row):
                lo, hi = net.outptr[r], net.outptr[r + 1]
                total = _pull(delta, r, w, net.slot, net.target, lo, hi, tile, inputs + r, relu)
                grad_b[r] += total if biased else delta.dtype.type(0)


@_compiled
def _add_sums(grad: Array, delta: Array, begin: int, end: int, biased: bool) -> None:
    for r in range(begin, end):
        total = delta.dtype.type(0)
        for k in range(LANES):
            total += delta[r, k]
        grad[r] += total if biased else delta.dtype.type(0)


@_compiled
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


@_compiled
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


@_compiled
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


@_compiled
def _loss(
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


@_compiled
def _add_orthogonal(
    net: _Net, w: Array, grad_w: Array, strength: float, dense: Array, gram: Array, line: Array
) -> None:
    """Add the gradient of ||W1 W1^T - I||^2, which is 4 (W1 W1^T - I) W1, where weights exist."""
    row, last = net.sizes[1 : net.first + 1].sum(), len(net.cut) - 1
    for i in range(len(dense)):
        for p in range(net.cut[0, row + i], net.cut[last, row + i]):
            dense[i, net.col[p]] = w[p]
    for i in range(len(dense)):
        for k in range(i + 1):
            total = w.dtype.type(0)
            for j in range(len(line)):
                total += dense[i, j] * dense[k, j]
            gram[i, k] = gram[k, i] = total
        gram[i, i] -= w.dtype.type(1)
    factor = w.dtype.type(4 * strength)
    for i in range(len(dense)):
        line[:] = 0
        for k in range(len(dense)):
            for j in range(len(line)):
                line[j] += gram[i, k] * dense[k, j]
        for p in range(net.cut[0, row + i], net.cut[last, row + i]):
            grad_w[p] += factor * line[net.col[p]]


@_compiled
def _add_absolute(net: _Net, w: Array, grad_w: Array, l1: float) -> None:
    """Add the gradient of L1 on W1; a weight of zero has none."""
    row = net.sizes[1 : net.first + 1].sum()
    end = row + net.sizes[net.first + 1] - 1
    real = w.dtype.type
    lo, hi = net.cut[0, row], net.cut[len(net.cut) - 1, end]
    weight, grad = w[lo:hi], grad_w[lo:hi]
    for p in range(len(weight)):  # from zero, or else it is not vectorised
        grad[p] += real(l1) * (real(weight[p] > 0) - real(weight[p] < 0))


@_compiled
def _adam(theta: Array, m: Array, v: Array, grad: Array, step: int, lr: float, l2: float) -> None:
    """Take one step of torch.optim.Adam, with the gradient of L2 added on the way."""
    real = theta.dtype.type
    beta1, beta2, eps, twice = real(1 - 0.9), real(0.999), real(1e-8), real(2 * l2)
    rest, rate = real(1 - 0.999), real(lr / (1 - 0.9**step))
    root = real(np.sqrt(1 - 0.999**step))
    for i in range(len(theta)):
        g = grad[i] + twice * theta[i]
        m[i] += (g - m[i]) * beta1
        v[i] = v[i] * beta2 + rest * g * g
        theta[i] -= rate * (m[i] / (np.sqrt(v[i]) / root + eps))


@_compiled
def _take(order: Array, begin: int, count: int, y: Array, rows: Array, labels: Array) -> None:
    """Note the tile's samples and labels; a tile that is not full repeats its last sample."""
    for k in range(LANES):
        rows[k] = order[begin + min(k, count - 1)]
        labels[k] = y[rows[k]]


@_compiled
def _fetch_ahead(order: Array, begin: int, x: Array) -> None:
    """Ask for samples that come next, so that they are in the cache when they do."""
    line = _CACHE_LINE // x.itemsize
    for i in range(begin, min(begin + LANES, len(order))):
        for feature in range(0, min(x.shape[1], _BLOCK), line):
            _prefetch(x, np.int64(order[i]) * x.shape[1] + feature)


@_compiled
def _step(
    net: _Net, b: Array, w: Array, train: Samples, begin: int, size: int, scratch: _Scratch
) -> float:
    """Write the gradient of one batch, without penalties, and return its summed loss."""
    tile, delta, rows = scratch.tile, scratch.delta, scratch.rows
    grad = scratch.grad
    for i in range(len(grad)):
        grad[i] = 0
    total = 0.0
    for done in range(0, size, LANES):
        count = min(LANES, size - done)
        _take(scratch.order, begin + done, count, train.y, rows, scratch.y)
        _fetch_ahead(scratch.order, begin + done + LANES, train.x)
        _forward(net, b, w, train.x, tile, rows)
        total += _loss(tile, scratch.y, count, size, delta, scratch.work, scratch.bits)
        _backward(net, w, tile, delta, grad[: len(b)], grad[len(b) :])
    return total


@_compiled
def _all_finite(values: Array) -> bool:
    odd = 0
    for i in range(len(values)):
        odd += not abs(values[i]) < np.inf
    return odd == 0


@_compiled
def _accuracy(net: _Net, b: Array, w: Array, test: Samples, tile: Array, rows: Array) -> float:
    """Return the share of test samples that are classified rightly; the first maximum counts."""
    classes, samples, right = net.sizes[-1], len(test.x), 0
    top = len(tile) - classes
    for begin in range(0, samples, LANES):
        for k in range(LANES):
            rows[k] = min(begin + k, samples - 1)
        _forward(net, b, w, test.x, tile, rows)
        for k in range(min(LANES, samples - begin)):
            best = 0 if classes > 1 else int(tile[top, k] > 0)
            for c in range(1, classes):
                best = c if tile[top + c, k] > tile[top + best, k] else best
            right += best == test.y[begin + k]
    return right / samples


@_compiled
def _train(
    net: _Net,
    theta: Array,
    m: Array,
    v: Array,
    step: int,
    train: Samples,
    test: Samples,
    keys: Array,
    places: tuple[int, int],
    how: _How,
    scratch: _Scratch,
    curves: Array,
) -> tuple[int, int]:
    """Train for as many epochs as there are keys; stop at the last one that is finite."""
    samples, kept, done, neurons = len(train.x), scratch.kept, step, len(scratch.delta)
    b, w, grad_w = theta[:neurons], theta[neurons:], scratch.grad[neurons:]
    dense, gram, line = scratch.dense, scratch.gram, scratch.line
    for epoch in range(len(keys)):
        kept[0], kept[1], kept[2] = theta, m, v
        _fill_order(scratch.order, scratch.outside, keys[epoch], places)
        total = 0.0
        for begin in range(0, samples, how.batch):
            size = min(how.batch, samples - begin)
            total += _step(net, b, w, train, begin, size, scratch)
            if not abs(total) < np.inf:
                break
            step += 1
            _add_absolute(net, w, grad_w, how.l1)
            if how.orthogonal > 0:
                _add_orthogonal(net, w, grad_w, how.orthogonal, dense, gram, line)
            _adam(theta, m, v, scratch.grad, step, how.lr, how.l2)
        if not abs(total) < np.inf or not _all_finite(theta):
            theta[:], m[:], v[:] = kept[0], kept[1], kept[2]
            return epoch, done
        done = step
        curves[0, epoch] = _accuracy(net, b, w, test, scratch.tile, scratch.rows)
        curves[1, epoch] = total / samples
    return len(keys), done
