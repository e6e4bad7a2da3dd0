"""The compiled loop that trains one network: order, forward, loss, backward, penalties, Adam."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fissile.bank.cpu.instructions import (
    CACHE_LINE,
    GROUP,
    LANES,
    add_dots,
    compiled,
    prefetch,
    pull,
    push,
    turn,
)
from fissile.bank.cpu.layout import Architecture, Array, Samples
from fissile.bank.cpu.loss import loss_and_gradient
from fissile.errors import FissileError, whole
from fissile.order import ROUNDS, order_shape
from fissile.train import Recipe

__all__ = ["Trained", "train_network"]

#: Inputs per block: a tile of them stays in the first-level cache while all neurons read it.
_BLOCK = 64


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
        _aligned((1, len(theta) + GROUP), kind)[0],
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
    room = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -room.ctypes.data % CACHE_LINE
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


@compiled
def _blocks(inputs: int) -> int:
    return (inputs + _BLOCK - 1) // _BLOCK


@compiled
def _fill_cuts(cut: Array, ptr: Array, col: Array) -> None:
    for r in range(len(ptr) - 1):
        p = np.int64(ptr[r])
        cut[0, r] = p
        for block in range(1, len(cut)):
            while p < ptr[r + 1] and col[p] < block * _BLOCK:
                p += 1
            cut[block, r] = p


@compiled
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


@compiled
def _place(position: Any, keys: Array, places: tuple[int, int]) -> Any:
    mask, shift = np.uint32(places[0]), np.uint32(places[1])
    for k in range(ROUNDS):
        position = np.uint32(np.uint32(position * keys[k, 0]) + keys[k, 1]) & mask
        position = np.uint32(position ^ (position >> shift))
    return position


@compiled
def _gather(tile: Array, x: Array, rows: Array, begin: int, end: int) -> None:
    """Turn some features of the tile's samples on their side."""
    side = CACHE_LINE // x.itemsize
    for lane in range(0, LANES, side):
        feature = begin
        while feature + side <= end:
            turn(tile, x, x.shape[1], rows, lane, feature)
            feature += side
        for i in range(feature, end):
            for k in range(lane, lane + side):
                tile[i, k] = x[rows[k], i]


@compiled
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
                push(tile, inputs + r, below, w, net.col, lo, hi, b[r], cut)
        below += size
        row = end


@compiled
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
                add_dots(grad_w, tile, inputs + begin, net.col, lo, hi, delta, r)
        if layer > 0:
            biased, relu = net.biased[layer - 1], net.relu[layer - 1]
            for r in range(begin, row):
                lo, hi = net.outptr[r], net.outptr[r + 1]
                total = pull(delta, r, w, net.slot, net.target, lo, hi, tile, inputs + r, relu)
                grad_b[r] += total if biased else delta.dtype.type(0)


@compiled
def _add_sums(grad: Array, delta: Array, begin: int, end: int, biased: bool) -> None:
    for r in range(begin, end):
        total = delta.dtype.type(0)
        for k in range(LANES):
            total += delta[r, k]
        grad[r] += total if biased else delta.dtype.type(0)


@compiled
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


@compiled
def _add_absolute(net: _Net, w: Array, grad_w: Array, l1: float) -> None:
    """Add the gradient of L1 on W1; a weight of zero has none."""
    row = net.sizes[1 : net.first + 1].sum()
    end = row + net.sizes[net.first + 1] - 1
    real = w.dtype.type
    lo, hi = net.cut[0, row], net.cut[len(net.cut) - 1, end]
    weight, grad = w[lo:hi], grad_w[lo:hi]
    for p in range(len(weight)):  # from zero, or else it is not vectorised
        grad[p] += real(l1) * (real(weight[p] > 0) - real(weight[p] < 0))


@compiled
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


@compiled
def _take(order: Array, begin: int, count: int, y: Array, rows: Array, labels: Array) -> None:
    """Note the tile's samples and labels; a tile that is not full repeats its last sample."""
    for k in range(LANES):
        rows[k] = order[begin + min(k, count - 1)]
        labels[k] = y[rows[k]]


@compiled
def _fetch_ahead(order: Array, begin: int, x: Array) -> None:
    """Ask for samples that come next, so that they are in the cache when they do."""
    line = CACHE_LINE // x.itemsize
    for i in range(begin, min(begin + LANES, len(order))):
        for feature in range(0, min(x.shape[1], _BLOCK), line):
            prefetch(x, np.int64(order[i]) * x.shape[1] + feature)


@compiled
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
        total += loss_and_gradient(tile, scratch.y, count, size, delta, scratch.work, scratch.bits)
        _backward(net, w, tile, delta, grad[: len(b)], grad[len(b) :])
    return total


@compiled
def _all_finite(values: Array) -> bool:
    odd = 0
    for i in range(len(values)):
        odd += not abs(values[i]) < np.inf
    return odd == 0


@compiled
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


@compiled
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
