"""What a trial costs: its seconds on two cores, and the bytes its network adds to a device.

The seconds are formulas fitted to measured runs; :mod:`fissile.lab.measured` turns them into those
of a worker. The bytes are counted: weights, masks, moments, gradients, and what a batch leaves in
every layer. A data set that networks share is counted apart, by :func:`data_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, cast

from fissile.lab.task import Boolean, Features, Images

if TYPE_CHECKING:
    from fissile.bank.sparse import Plan
    from fissile.lab.budget_trial import Contender
    from fissile.lab.trial import Sampling, Trial

__all__ = [
    "contender_bytes",
    "data_bytes",
    "measures",
    "network_bytes",
    "process_bytes",
    "sampling_bytes",
    "step",
]

_FLOAT = 4
#: Numbers kept for a weight in a bank: itself and two moments, thrice (now, at the end of the last
#: epoch, as an engine lays them out), its gradient, and two that Adam's step needs for a moment.
_KEPT = 12
#: The same for what children could have, of which most is zero: as laid out, and as given back.
_SPREAD = 6
#: The same for a contender, which keeps no last epoch; its mask is a byte more.
_CONTENDER = 6
#: Channels of the backbone's blocks; each has three convolutions and halves the image's side.
_CHANNELS = (3, 64, 128, 256)
#: Numbers drawn at once when networks are sampled, and the bytes of each with its rank and mark.
_SAMPLED, _PER_SAMPLE = 4_000_000, 16
#: What a process takes before it trains anything: Python, PyTorch, compiled kernels.
_PROCESS = 600 << 20
#: What testing takes at most, a part of the samples at a time: networks of a bank, contenders.
_TESTED, _CONTENDERS_TESTED = 128 << 20, 1 << 30
#: What clustering a network's inputs takes for each of them and each dimension, and at most.
_CLUSTERED, _CLUSTERED_MOST = 1_800, 1_200 << 20


def step(trial: Trial) -> float:
    """Return the seconds of one training step of one network among many."""
    task = trial.task
    if isinstance(task, Boolean):
        first = trial.embedding or task.literals
        weights, behind = trial.neurons * first, first * task.literals
        seconds = 0.74e-6 + (3.9e-9 + 0.19e-9 * trial.arm.alpha) * weights
        return seconds + (2.6e-9 * behind if trial.embedding else 0.0)
    if isinstance(task, Features):
        return _classifier(trial, task)
    return 0.9  # the backbone, whatever sits on it


def _classifier(trial: Trial, task: Features) -> float:
    inputs = prod(task.entry.shape)
    hidden, alpha = trial.neurons, trial.arm.alpha
    weights = inputs * hidden + (trial.depth - 2) * hidden**2 + hidden * task.outputs
    if trial.arm.split == "dropconnect":
        return 1.4e-7 * alpha * inputs * hidden
    if trial.depth > 2 or trial.arm.split == "dynamic":
        return 1e-4 + 2e-9 * weights * (1 + alpha)
    return 2e-5 + 2.0e-9 * weights + 0.7e-9 * hidden * alpha * task.outputs


def measures(trial: Trial) -> float:
    """Return the seconds that measuring one network takes."""
    if not isinstance(trial.task, Boolean) or trial.embedding:
        return 0.0
    return 7e-4 + 8.8e-6 * trial.task.literals * trial.task.clauses


# --- bytes


def network_bytes(trial: Trial) -> int:
    """Return the bytes that a trial's network adds to a device while it trains.

    >>> network_bytes(Trial(Features("cifar100-clip"), 128)) > 40 * 128 * (512 + 100)
    True

    A formula's samples are a network's own; its arms share them, and they count for the dense one.
    """
    sizes, alpha = _sizes(trial), trial.arm.alpha
    weights = sum(wide * narrow for narrow, wide in pairwise(sizes))
    children = [sizes[0], *(alpha * size for size in sizes[1:-1]), sizes[-1]]
    spread = alpha * weights  # what all children could have
    held = spread if trial.arm.split in ("dropconnect", "dynamic") else weights
    seen = 2 * trial.recipe.batch * sum(children)  # values and their gradients
    found = _FLOAT * (_KEPT * held + (_SPREAD * spread if alpha > 1 else 0) + seen)
    found += weights if alpha > 1 else 0  # a byte for each weight: its owner
    if isinstance(trial.task, Images):
        return found + _backbone_bytes(trial.task, trial.recipe.batch)
    if isinstance(trial.task, Boolean) and trial.arm.unsplit:
        found += _FLOAT * (trial.task.train + trial.task.test) * trial.task.literals
    return found


def _sizes(trial: Trial) -> list[int]:
    """Return how many numbers go into each layer, and come out of the last."""
    task, outputs = trial.task, 1
    if isinstance(task, Boolean):
        inputs = task.literals
    else:
        inputs = task.projection if isinstance(task, Images) else prod(task.entry.shape)
        outputs = task.outputs
    embedded = [trial.embedding] if trial.embedding else []
    return [inputs, *embedded, *[trial.neurons] * (trial.depth - 1), outputs]


def _backbone_bytes(task: Images, batch: int) -> int:
    weights, seen, side = 0, 0, task.entry.shape[0]
    for before, after in pairwise(_CHANNELS):
        weights += 9 * (before * after + 2 * after * after)
        seen += 3 * 3 * after * side * side  # behind each convolution, its norm and its activation
        side //= 2
    weights += _CHANNELS[-1] * task.projection
    return _FLOAT * (_KEPT * weights + 2 * batch * seen)


def contender_bytes(work: Contender) -> int:
    """Return the bytes that a contender's networks add to a device while they train.

    Two seeds of every setting are searched, once for all trials of a cell: they count for the
    first, and for each other trial one network, the largest it could be.
    """
    each = _plans_bytes(work.network())
    return 2 * sum(each) if work.number == 0 else max(each)


@lru_cache(maxsize=1024)
def _plans_bytes(cell: Contender) -> tuple[int, ...]:
    return tuple(_plan_bytes(cell, plan) for plan in cell.plans)


def _plan_bytes(work: Contender, plan: Plan) -> int:
    outputs = work.task.outputs
    weights = plan.weights(work.inputs, outputs)
    hidden = (weights - plan.direct * work.inputs * outputs) // (work.inputs + outputs)
    rates = work.epochs * -(-work.task.samples // work.batch)  # of every step
    seen = work.batch * (2 * hidden + 3 * outputs)
    return weights + _FLOAT * (_CONTENDER * weights + rates + seen)


def sampling_bytes(work: Sampling) -> int:
    """Return the bytes that drawing sparse networks takes, a part of them at a time."""
    places = work.networks * work.neurons * work.alpha * work.literals
    return _PER_SAMPLE * min(places, _SAMPLED)


def process_bytes(works: Iterable[Trial | Sampling | Contender]) -> int:
    """Return the bytes that a process takes beside its networks and its data.

    >>> process_bytes([]) // 2**20
    600

    That is itself, and the most of what testing and measuring take, a part at a time.
    """
    tested, clustered = 0, 0
    for work in works:
        if work.kind == "contender":
            tested = _CONTENDERS_TESTED
        elif work.kind == "network":
            tested = max(tested, _TESTED)
            clustered += _clustered(cast("Trial", work))
    return _PROCESS + max(tested, min(clustered, _CLUSTERED_MOST))


def _clustered(trial: Trial) -> int:
    task = trial.task
    if not isinstance(task, Boolean) or trial.embedding:
        return 0  # there is nothing to compare clusters with
    return _CLUSTERED * task.literals * task.literals  # a row of cosines has a number for each


def data_bytes(task: Features | Images) -> int:
    """Return the bytes of a data set as networks see it: in single precision, with its test set.

    >>> data_bytes(Features("imagenet1k-clip")) // 2**20
    2600

    It is the catalogue's word: the files need not be here.
    """
    entry = task.entry
    samples = (entry.train or 1_280 * entry.classes) + (entry.test or 0)
    return _FLOAT * samples * prod(entry.shape) + 8 * samples
