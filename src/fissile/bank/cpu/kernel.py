"""The compiled loop that trains one network: order, forward, loss, backward, penalties, Adam."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from fissile._common.llvm import CACHE_LINE
from fissile._common.random import order_keys, order_shape
from fissile.bank.cpu.instructions import (
    LANES,
    SIDE_BY_SIDE,
    add_dots,
    add_dots_together,
    compiled,
    inner,
    prefetch,
    pull,
    pull_together,
    push,
    push_together,
    turn,
)
from fissile.bank.cpu.layout import (
    BLOCK,
    Architecture,
    Array,
    Masks,
    Part,
    Samples,
    Scratch,
    Wiring,
    blocks,
    make_part,
    make_scratch,
)
from fissile.bank.cpu.masks import (
    count_chosen,
    cut_gradient,
    draw,
    list_chosen,
    spread_gradient,
    take_weights,
)
from fissile.bank.cpu.ops import (
    adam,
    add_normalized,
    fill_order,
    loss_and_gradient,
    normalize,
)


class Hyper(NamedTuple):
    """The recipe's values in double precision: arrays for a stack, numbers for a network."""

    lr: Any
    l1: Any
    l2: Any
    orthogonal: Any


class Trained(NamedTuple):
    """What became of some networks: the epochs each finished, and a curve of each kind."""

    epochs: Array  # [rows]
    accuracy: Array  # [rows, epochs], NaN where an epoch was not finished
    loss: Array


class _Task(NamedTuple):
    """What networks are trained on, how much of it in a step, and what scrambles its order."""

    train: Samples
    test: Samples
    batch: int
    begin: int  # the part of an epoch's order that is trained on
    end: int
    low: int  # the low bits, which number the samples
    shift: int


def train_networks(
    architecture: Architecture, wiring: Wiring, state: tuple[Array, ...], steps: Array, rows: Array,
    seeds: Array, epochs: range, train: Samples, test: Samples, hyper: Hyper, batch: int,
    masks: Masks | None = None, span: tuple[int, int] | None = None,
) -> Trained:  # fmt: skip
    """Train some networks of a stack in place, one after the other, in one compiled call.

    ``state`` holds the flat rows of all networks, then Adam's first and second moments; ``steps``
    counts Adam's steps. Both change in place. ``rows`` says which networks to train. All arrays
    are contiguous, and those of numbers have one dtype. ``masks`` say which weights take part, and
    ``span`` the part of an epoch's samples to train on, by default all.

    A network whose loss or parameters cease to be finite is left as it was after its last finished
    epoch.
    """
    bits, shift = order_shape(len(train.x))
    numbers = torch.arange(epochs.start, epochs.stop)
    keys = order_keys(torch.as_tensor(seeds[rows]).unsqueeze(-1), numbers).numpy()
    scratch = make_scratch(architecture, state[0], len(train.x), bool(hyper.orthogonal.any()))
    masks = Masks.of(state[0].dtype) if masks is None else masks
    part = make_part(architecture, state[0], masks)
    curves = np.full((len(rows), 2, len(epochs)), np.nan)
    finished = _train_rows(
        architecture, wiring.ptr, wiring.col, state, steps, rows, keys.astype(np.uint32),
        _Task(train, test, batch, *(span or (0, len(train.x))), (1 << bits) - 1, shift),
        hyper, scratch, masks, part, curves,
    )  # fmt: skip
    return Trained(finished, curves[:, 0], curves[:, 1])


class _Net(NamedTuple):
    layers: Architecture
    scale: Array  # of the LayerNorms, neuron by neuron; empty without any
    shift: Array
    cut: Array  # [blocks + 1, rows]: a neuron's weights, cut where a block of inputs begins
    col: Array
    # The same weights by the neuron they come from, for the way back: where each neuron's begin,
    # their places in w, and the neurons they lead to.
    outptr: Array
    slot: Array
    target: Array


@inner
def _fill_cuts(cut: Array, ptr: Array, col: Array) -> None:
    for r in range(len(ptr) - 1):
        p = np.int64(ptr[r])
        cut[0, r] = p
        for block in range(1, len(cut)):
            while p < ptr[r + 1] and col[p] < block * BLOCK:
                p += 1
            cut[block, r] = p


@inner
def _fill_outgoing(layers: Architecture, ptr: Array, col: Array, to: Scratch | Part) -> None:
    """List the weights of all but the first layer by the neuron they come from."""
    outptr, slot, target = to.outptr, to.slot, to.target
    outptr[:] = 0
    for count in (True, False):  # first how many come from each neuron, then which
        below, row = 0, layers.sizes[1]
        for layer in range(1, len(layers.relu)):
            for r in range(row, row + layers.sizes[layer + 1]):
                for p in range(ptr[r], ptr[r + 1]):
                    source = below + col[p]
                    if count:
                        outptr[source + 1] += 1
                    else:
                        slot[outptr[source]], target[outptr[source]] = p, r
                        outptr[source] += 1
            below, row = row, row + layers.sizes[layer + 1]
        if count:
            for r in range(len(outptr) - 1):
                outptr[r + 1] += outptr[r]
    # Filling in has moved each beginning to its end, which is where the next one begins.
    for r in range(len(outptr) - 1, 0, -1):
        outptr[r] = outptr[r - 1]
    outptr[0] = 0


@inner
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


@inner
def _are_full(lo: Array, hi: Array, r: int, end: int, rows: int, width: int) -> bool:
    """Return whether some rows from r on are there and have all weights that they can have."""
    if end - r < rows:
        return False
    missing = 0
    for i in range(r, r + rows):
        missing += width - (hi[i] - lo[i])
    return missing == 0


@inner
def _forward(
    net: _Net, b: Array, w: Array, x: Array, tile: Array, rows: Array, scratch: Scratch
) -> None:
    """Compute the activations of the tile's samples, layer upon layer."""
    below, row, inputs = 0, 0, x.shape[1]
    for layer in range(len(net.layers.relu)):
        size = net.layers.sizes[layer]
        end = row + net.layers.sizes[layer + 1]
        last = blocks(size) - 1
        for block in range(last + 1):
            if layer == 0:
                _gather(tile, x, rows, block * BLOCK, min(size, (block + 1) * BLOCK))
            relu = net.layers.relu[layer] and net.layers.norm[layer] == 0
            how = (block > 0) + 2 * (block == last and relu)
            lo, hi, r = net.cut[block], net.cut[block + 1], row
            width = min(BLOCK, size - block * BLOCK)
            while r < end:
                if _are_full(lo, hi, r, end, SIDE_BY_SIDE, width):
                    push_together(tile, inputs, r, below, w, net.col, lo, hi, b, how)
                    r += SIDE_BY_SIDE
                else:
                    push(tile, inputs, r, below, w, net.col, lo, hi, b, how)
                    r += 1
        if net.layers.norm[layer] > 0:
            neurons = tile[inputs + row : inputs + end]
            scale, shift, hat = net.scale[row:end], net.shift[row:end], scratch.hat[row:end]
            spread, eps, relu = scratch.spread, net.layers.norm[layer], net.layers.relu[layer]
            normalize(neurons, scale, shift, eps, relu, hat, spread[layer], spread[-1])
        below += size
        row = end


@inner
def _backward(net: _Net, w: Array, tile: Array, grad: Array, scratch: Scratch) -> None:
    """Add the gradients of the tile's samples, from the delta of the outputs downwards."""
    delta, front = scratch.delta, len(net.scale) + len(net.shift)
    row, inputs = len(delta), net.layers.sizes[0]
    grad_b, grad_w = grad[front : front + row], grad[front + row :]
    _add_sums(grad_b, delta, row - net.layers.sizes[-1], row, net.layers.biased[-1])
    for layer in range(len(net.layers.relu) - 1, -1, -1):
        size = net.layers.sizes[layer]
        end, row = row, row - net.layers.sizes[layer + 1]
        begin = row - size  # among neurons; the inputs come before them in the tile
        for block in range(blocks(size)):
            lo, hi, r = net.cut[block], net.cut[block + 1], row
            width = min(BLOCK, size - block * BLOCK)
            while r < end:
                if _are_full(lo, hi, r, end, SIDE_BY_SIDE // 2, width):
                    add_dots_together(grad_w, tile, inputs + begin, net.col, lo, hi, delta, r)
                    r += SIDE_BY_SIDE // 2
                else:
                    add_dots(grad_w, tile, inputs + begin, net.col, lo, hi, delta, r)
                    r += 1
        if layer > 0:
            biased, relu = net.layers.biased[layer - 1], net.layers.relu[layer - 1]
            normed = net.layers.norm[layer - 1] > 0
            lo, hi, r, counts = net.outptr, net.outptr[1:], begin, biased and not normed
            while r < row:
                if _are_full(lo, hi, r, row, SIDE_BY_SIDE, end - row):
                    pull_together(
                        delta, r, w, net.slot, net.target, lo, tile, inputs, relu, grad_b, counts
                    )
                    r += SIDE_BY_SIDE
                else:
                    pull(delta, r, w, net.slot, net.target, lo, tile, inputs, relu, grad_b, counts)
                    r += 1
            if normed:
                spread, shifts = scratch.spread, len(net.scale)
                add_normalized(
                    delta[begin:row], net.scale[begin:row], scratch.hat[begin:row],
                    spread[layer - 1], grad[begin:row], grad[shifts + begin : shifts + row],
                    spread[len(spread) - 1], spread[len(spread) - 2],
                )  # fmt: skip
                _add_sums(grad_b, delta, begin, row, biased)


@inner
def _add_sums(grad: Array, delta: Array, begin: int, end: int, biased: bool) -> None:
    for r in range(begin, end):
        total = delta.dtype.type(0)
        for k in range(LANES):
            total += delta[r, k]
        grad[r] += total if biased else delta.dtype.type(0)


@inner
def _add_orthogonal(
    net: _Net, w: Array, grad_w: Array, strength: float, dense: Array, gram: Array, line: Array
) -> None:
    """Add the gradient of ||W1 W1^T - I||^2, which is 4 (W1 W1^T - I) W1, where weights exist."""
    row, last = net.layers.sizes[1 : net.layers.first + 1].sum(), len(net.cut) - 1
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


@inner
def _add_absolute(net: _Net, w: Array, grad_w: Array, l1: float) -> None:
    """Add the gradient of L1 on W1; a weight of zero has none."""
    row = net.layers.sizes[1 : net.layers.first + 1].sum()
    end = row + net.layers.sizes[net.layers.first + 1] - 1
    real = w.dtype.type
    lo, hi = net.cut[0, row], net.cut[len(net.cut) - 1, end]
    weight, grad = w[lo:hi], grad_w[lo:hi]
    for p in range(len(weight)):  # from zero, or else it is not vectorised
        grad[p] += real(l1) * (real(weight[p] > 0) - real(weight[p] < 0))


@inner
def _take(order: Array, begin: int, count: int, y: Array, rows: Array, labels: Array) -> None:
    """Note the tile's samples and labels; a tile that is not full repeats its last sample."""
    for k in range(LANES):
        rows[k] = order[begin + min(k, count - 1)]
        labels[k] = y[rows[k]]


@inner
def _fetch_ahead(order: Array, begin: int, x: Array) -> None:
    """Ask for samples that come next, so that they are in the cache when they do."""
    line = CACHE_LINE // x.itemsize
    for i in range(begin, min(begin + LANES, len(order))):
        for feature in range(0, x.shape[1], line):
            prefetch(x, np.int64(order[i]) * x.shape[1] + feature)


@inner
def _step(
    net: _Net, b: Array, w: Array, train: Samples, begin: int, size: int, scratch: Scratch,
    grad: Array,
) -> float:  # fmt: skip
    """Write the gradient of one batch, without penalties, and return its summed loss."""
    tile, delta, rows = scratch.tile, scratch.delta, scratch.rows
    for i in range(len(grad)):
        grad[i] = 0
    total = 0.0
    for done in range(0, size, LANES):
        count = min(LANES, size - done)
        _take(scratch.order, begin + done, count, train.y, rows, scratch.y)
        _fetch_ahead(scratch.order, begin + done + LANES, train.x)
        _forward(net, b, w, train.x, tile, rows, scratch)
        total += loss_and_gradient(tile, scratch.y, count, size, delta, scratch.work)
        _backward(net, w, tile, grad, scratch)
    return total


# A loop, because assignments to slices may fail in ways that take two seconds to compile.
@inner
def _copy(source: Array, target: Array) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@inner
def _all_finite(values: Array) -> bool:
    odd = 0
    for i in range(len(values)):
        odd += not abs(values[i]) < np.inf
    return odd == 0


@inner
def _accuracy(net: _Net, b: Array, w: Array, test: Samples, scratch: Scratch) -> float:
    """Return the share of test samples that are classified rightly; the first maximum counts."""
    tile, rows = scratch.tile, scratch.rows
    classes, samples, right = net.layers.sizes[-1], len(test.x), 0
    top = len(tile) - classes
    for begin in range(0, samples, LANES):
        for k in range(LANES):
            rows[k] = min(begin + k, samples - 1)
        _forward(net, b, w, test.x, tile, rows, scratch)
        for k in range(min(LANES, samples - begin)):
            best = 0 if classes > 1 else int(tile[top, k] > 0)
            for c in range(1, classes):
                best = c if tile[top + c, k] > tile[top + best, k] else best
            right += best == test.y[begin + k]
    return right / samples


@inner
def _begin_part(net: _Net, masks: Masks, n: int, ptr: Array, part: Part) -> None:
    """List the weights that take part; where masks are drawn, the first so many of a neuron."""
    for i in range(ptr[len(ptr) - 1]):
        part.flags[i] = len(masks.present) == 0 or masks.present[n, i]
    for r in range(len(ptr) - 1):
        if len(masks.degree) and masks.degree[n, r] >= 0:
            for i in range(ptr[r], ptr[r + 1]):
                part.flags[i] = i - ptr[r] < masks.degree[n, r]
    count_chosen(part, ptr)
    list_chosen(part, net.cut, net.col, 0, len(ptr) - 1)
    _fill_outgoing(net.layers, part.ptr, part.col, part)


@inner
def _draw_masks(net: _Net, degree: Array, keys: Array, step: int, ptr: Array, part: Part) -> None:
    """Draw the masks of a step and list the weights that take part in it."""
    row, behind = 0, False
    for layer in range(len(net.layers.relu)):
        end = row + net.layers.sizes[layer + 1]
        if degree[row] >= 0:
            for r in range(row, end):
                flags = part.flags[ptr[r] : ptr[r + 1]]
                draw(keys[layer, step], (r - row) * len(flags), degree[r], part.hashes, flags)
            list_chosen(part, net.cut, net.col, row, end)
            behind = behind or layer > 0
        row = end
    if behind:  # of the first layer, nobody asks what comes from where
        _fill_outgoing(net.layers, part.ptr, part.col, part)


@inner
def _scale(layers: Architecture, share: Array, ptr: Array, w: Array, scaled: Array) -> None:
    """Write the weights of evaluation: those of a layer times its share."""
    row = 0
    for layer in range(len(layers.relu)):
        end = row + layers.sizes[layer + 1]
        for p in range(ptr[row], ptr[end]):
            scaled[p] = w[p] * w.dtype.type(share[layer])
        row = end


@inner
def _train(
    net: _Net, some: _Net, n: int, i: int, ptr: Array, state: tuple[Array, ...], step: int,
    keys: Array, task: _Task, hyper: Hyper, scratch: Scratch, masks: Masks, part: Part,
    curves: Array,
) -> tuple[int, int]:  # fmt: skip
    """Train for as many epochs as there are keys; stop at the last one that is finite.

    ``some`` is the network of the weights in ``part``, where not all of them take part.
    """
    theta, m, v = state
    samples, kept, done, neurons = len(task.train.x), scratch.kept, step, len(scratch.delta)
    begun, grad, start = step, scratch.grad, len(net.scale) + len(net.shift) + neurons
    b, w, grad_w = theta[start - neurons : start], theta[start:], grad[start:]
    dense, gram, line = scratch.dense, scratch.gram, scratch.line
    drawn, masked = len(masks.degree) > 0, len(masks.present) > 0
    for epoch in range(len(keys)):
        for k in range(3):
            _copy(state[k], kept[k])
        fill_order(scratch.order, scratch.outside, keys[epoch], task.low, task.shift)
        total = 0.0
        for begin in range(task.begin, task.end, task.batch):
            size = min(task.batch, task.end - begin)
            asked = len(masks.gradient) > 0 and begin + size == task.end
            in_part = (drawn or masked) and not asked
            if drawn:
                _draw_masks(net, masks.degree[n], masks.keys[i], step - begun, ptr, part)
            if in_part:
                take_weights(part, w)
            now, values, to = (some, part.w, part.grad) if in_part else (net, w, grad)
            total += _step(now, b, values, task.train, begin, size, scratch, to)
            if not abs(total) < np.inf:
                break
            step += 1
            if in_part:
                spread_gradient(part, grad, start)
            _add_absolute(net, w, grad_w, hyper.l1)
            if hyper.orthogonal > 0:
                _add_orthogonal(net, w, grad_w, hyper.orthogonal, dense, gram, line)
            if asked:
                _copy(grad[: len(theta)], masks.gradient[n])
            if masked and (asked or hyper.orthogonal > 0):
                cut_gradient(part, grad, start)
            adam(theta, m, v, grad, step, hyper.lr, hyper.l2)
        if not abs(total) < np.inf or not _all_finite(theta):
            for k in range(3):
                _copy(kept[k], state[k])
            return epoch, done
        done = step
        if task.end == samples:
            if drawn:
                _scale(net.layers, masks.share[n], ptr, w, part.w)
            now, values = (net, part.w) if drawn else (net, w)
            curves[0, epoch] = _accuracy(now, b, values, task.test, scratch)
        curves[1, epoch] = total / samples
    return len(keys), done


@compiled
def _train_rows(
    layers: Architecture, ptr: Array, col: Array, state: tuple[Array, ...], steps: Array,
    rows: Array, keys: Array, task: _Task, hyper: Hyper, scratch: Scratch, masks: Masks,
    part: Part, curves: Array,
) -> Array:  # fmt: skip
    """Train networks one after the other; return how many epochs each has finished."""
    finished = np.empty(len(rows), np.int64)
    theta, m, v = state
    for i, n in enumerate(rows):
        _fill_cuts(scratch.cut, ptr[n], col[n])
        _fill_outgoing(layers, ptr[n], col[n], scratch)
        normed = len(scratch.hat)  # neurons, or none without a LayerNorm
        net = _Net(
            layers, theta[n, :normed], theta[n, normed : 2 * normed],
            scratch.cut, col[n], scratch.outptr, scratch.slot, scratch.target,
        )  # fmt: skip
        some = _Net(
            layers, net.scale, net.shift, part.cut, part.col, part.outptr, part.slot, part.target
        )
        if len(part.flags):
            _begin_part(net, masks, n, ptr[n], part)
        scratch.dense[:] = 0  # no trace of the network before
        mine = Hyper(hyper.lr[n], hyper.l1[n], hyper.l2[n], hyper.orthogonal[n])
        finished[i], steps[n] = _train(
            net, some, n, i, ptr[n], (theta[n], m[n], v[n]), steps[n], keys[i], task, mine,
            scratch, masks, part, curves[i],
        )  # fmt: skip
    return finished
