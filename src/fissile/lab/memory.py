"""How much memory trials need where they are computed, which decides what fits on a worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from fissile.bank.sparse import Plan
from fissile.lab.trial import Boolean, Contender, Images, Sampling, Trial, Work

__all__ = ["PROCESS", "data_bytes", "memory_of", "network_bytes", "process_bytes"]

#: Bytes of a process before it trains: Python, PyTorch, compiled kernels.
PROCESS = 600 << 20
_FLOAT = 4
#: Numbers kept for a weight in a bank: itself and two moments, thrice (now, at the end of the last
#: epoch, as an engine lays them out), its gradient, and two for Adam's step.
_KEPT = 12
_CONTENDER = 6  # numbers kept for a contender's weight; it keeps no last epoch
#: Channels of the backbone's blocks; each has three convolutions and halves the image's side.
_CHANNELS = (3, 64, 128, 256)


def memory_of(works: Sequence[Work]) -> int:
    """Estimate the bytes that a batch needs where it is computed, its data set included.

    >>> memory_of([Trial(Features("cifar100-clip"), neurons=8)])
    """
    return data_bytes(works[0]) + sum(network_bytes(work) for work in works)


def data_bytes(work: Work) -> int:
    """Return the bytes of a trial's data set in single precision, by the catalogue.

    >>> data_bytes(Trial(Features("imagenet1k-clip"))) // 2**20
    2600
    """
    if isinstance(work, Sampling) or isinstance(work.task, Boolean):
        return 0
    entry = work.task.entry
    samples = (entry.train or 1_280 * entry.classes) + (entry.test or 0)
    return _FLOAT * samples * prod(entry.shape) + 8 * samples


def network_bytes(work: Work) -> int:
    """Return the bytes that a trial adds to a device: weights, masks, moments, gradients, values.

    >>> network_bytes(Trial(Features("cifar100-clip"), 128)) > 40 * 128 * (512 + 100)
    True
    """
    if isinstance(work, Sampling):
        places = work.networks * work.neurons * work.alpha * work.literals
        return 16 * min(places, 4_000_000)  # drawn at once: each with its rank and its mark
    if isinstance(work, Contender):
        each = [_plan_bytes(work, plan) for plan in work.plans]
        # Two seeds of every setting are searched, once for all trials of a cell.
        return 2 * sum(each) if work.number == 0 else max(each)
    task, alpha, batch = work.task, work.arm.alpha, work.recipe.batch
    if isinstance(task, Boolean):
        inputs, outputs = task.literals, 1
    else:
        inputs = task.projection if isinstance(task, Images) else prod(task.entry.shape)
        outputs = task.outputs
    sizes = [inputs, *filter(None, [work.embedding]), *[work.neurons] * (work.depth - 1), outputs]
    weights = sum(wide * narrow for narrow, wide in pairwise(sizes))
    values = batch * (inputs + alpha * sum(sizes[1:-1]) + outputs)
    # As much as if every child could have all weights of its parent.
    total = _FLOAT * (_KEPT * alpha * weights + 2 * values)
    if isinstance(task, Images):
        total += _backbone_bytes(task, batch)
    if isinstance(task, Boolean) and work.arm.unsplit:  # arms share the samples of a formula
        total += _FLOAT * (task.train + task.test) * task.literals
    return total


def _backbone_bytes(task: Images, batch: int) -> int:
    weights, values, side = _CHANNELS[-1] * task.projection, 0, task.entry.shape[0]
    for before, after in pairwise(_CHANNELS):
        weights += 9 * (before * after + 2 * after * after)
        values += 3 * 3 * after * side * side  # of each convolution, norm and activation
        side //= 2
    return _FLOAT * (_KEPT * weights + 2 * batch * values)


def _plan_bytes(work: Contender, plan: Plan) -> int:
    outputs = work.task.outputs
    weights = plan.weights(work.inputs, outputs)
    hidden = (weights - plan.direct * work.inputs * outputs) // (work.inputs + outputs)
    rates = work.epochs * -(-work.task.samples // work.batch)  # one for every step
    values = work.batch * (2 * hidden + 3 * outputs)
    return weights + _FLOAT * (_CONTENDER * weights + rates + values)


def process_bytes(works: Iterable[Work]) -> int:
    """Return the bytes that a process takes beside its networks and its data.

    >>> process_bytes([]) // 2**20
    600
    """
    tested, clustered = 0, 0
    for work in works:
        if isinstance(work, Contender):
            tested = 1 << 30
        elif isinstance(work, Trial):
            tested = max(tested, 128 << 20)
            if isinstance(work.task, Boolean) and not work.embedding:
                clustered += 1_800 * work.task.literals**2
    return PROCESS + max(tested, min(clustered, 1_200 << 20))
