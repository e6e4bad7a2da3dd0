"""What a trial costs: relative seconds, and the bytes that its network adds to a device.

A cost is about a second of two cores. Batches are cut by it, the time of a batch is shared out by
it, and :mod:`fissile.lab.plan` turns it into seconds of a machine. The bytes are counted: weights,
masks, moments, gradients, and the values of a batch in every layer. A data set that networks share
is counted apart, by :func:`data_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from fissile.lab.task import Boolean, Features, Images

if TYPE_CHECKING:
    from fissile.bank.sparse import Plan
    from fissile.lab.trial import Contender, Trial, Work

__all__ = ["data_bytes", "measures", "network_bytes", "plan_bytes", "process_bytes", "step"]

_FLOAT = 4
#: Numbers kept for a weight in a bank: itself and two moments, thrice (now, at the end of the last
#: epoch, as an engine lays them out), its gradient, and two for Adam's step.
_KEPT = 12
#: Numbers kept for each weight that children could have, most of them zero.
_SPREAD = 6
#: Numbers kept for a contender's weight; it keeps no last epoch.
_CONTENDER = 6
#: Channels of the backbone's blocks; each has three convolutions and halves the image's side.
_CHANNELS = (3, 64, 128, 256)
#: Bytes of a process before it trains: Python, PyTorch, compiled kernels.
_PROCESS = 600 << 20
#: Bytes that testing takes at most, for the networks of a bank and for contenders.
_TESTED, _CONTENDERS_TESTED = 128 << 20, 1 << 30
#: Bytes that clustering a network's inputs takes for each pair of them, and at most.
_CLUSTERED, _CLUSTERED_MOST = 1_800, 1_200 << 20


def step(trial: Trial) -> float:
    """Return the cost of one training step of one network among many."""
    task, hidden, alpha = trial.task, trial.neurons, trial.arm.alpha
    if isinstance(task, Boolean):
        first = trial.embedding or task.literals
        behind = 2.6e-9 * first * task.literals if trial.embedding else 0.0
        return 0.74e-6 + (3.9e-9 + 0.19e-9 * alpha) * hidden * first + behind
    if isinstance(task, Images):
        return 0.9  # the backbone; its head hardly matters
    inputs = prod(task.entry.shape)
    weights = inputs * hidden + (trial.depth - 2) * hidden**2 + hidden * task.outputs
    if trial.arm.split == "dropconnect":
        return 1.4e-7 * alpha * inputs * hidden
    if trial.depth > 2 or trial.arm.split == "dynamic":
        return 1e-4 + 2e-9 * weights * (1 + alpha)
    return 2e-5 + 2.0e-9 * weights + 0.7e-9 * hidden * alpha * task.outputs


def measures(trial: Trial) -> float:
    """Return the cost of measuring one network."""
    if not isinstance(trial.task, Boolean) or trial.embedding:
        return 0.0
    return 7e-4 + 8.8e-6 * trial.task.literals * trial.task.clauses


def network_bytes(trial: Trial) -> int:
    """Return the bytes that a trial's network adds to a device while it trains.

    >>> network_bytes(Trial(Features("cifar100-clip"), 128)) > 40 * 128 * (512 + 100)
    True

    Arms share the samples of a formula, which count for the dense one.
    """
    sizes, alpha, task = _sizes(trial), trial.arm.alpha, trial.task
    weights = sum(wide * narrow for narrow, wide in pairwise(sizes))
    children = [sizes[0], *(alpha * size for size in sizes[1:-1]), sizes[-1]]
    spread = alpha * weights if alpha > 1 else 0  # the weights that all children could have
    held = alpha * weights if trial.arm.split in ("dropconnect", "dynamic") else weights
    values = 2 * trial.recipe.batch * sum(children)  # with their gradients
    owners = weights if alpha > 1 else 0  # a byte each
    found = _FLOAT * (_KEPT * held + _SPREAD * spread + values) + owners
    if isinstance(task, Images):
        return found + _backbone_bytes(task, trial.recipe.batch)
    if isinstance(task, Boolean) and trial.arm.unsplit:
        found += _FLOAT * (task.train + task.test) * task.literals
    return found


def _sizes(trial: Trial) -> list[int]:
    """Return the width of each layer, from the inputs to the outputs."""
    task = trial.task
    if isinstance(task, Boolean):
        inputs, outputs = task.literals, 1
    else:
        inputs = task.projection if isinstance(task, Images) else prod(task.entry.shape)
        outputs = task.outputs
    embedded = [trial.embedding] if trial.embedding else []
    return [inputs, *embedded, *[trial.neurons] * (trial.depth - 1), outputs]


def _backbone_bytes(task: Images, batch: int) -> int:
    weights, values, side = _CHANNELS[-1] * task.projection, 0, task.entry.shape[0]
    for before, after in pairwise(_CHANNELS):
        weights += 9 * (before * after + 2 * after * after)
        values += 3 * 3 * after * side * side  # of each convolution, norm and activation
        side //= 2
    return _FLOAT * (_KEPT * weights + 2 * batch * values)


def plan_bytes(work: Contender, plan: Plan) -> int:
    """Return the bytes of one network that a contender trains by a plan."""
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
        if work.kind == "contender":
            tested = _CONTENDERS_TESTED
        elif work.kind == "network":
            tested = max(tested, _TESTED)
            task = getattr(work, "task", None)
            if isinstance(task, Boolean) and not getattr(work, "embedding", None):
                clustered += _CLUSTERED * task.literals**2
    return _PROCESS + max(tested, min(clustered, _CLUSTERED_MOST))


def data_bytes(task: Features | Images) -> int:
    """Return the bytes of a data set in single precision, test set included, by the catalogue.

    >>> data_bytes(Features("imagenet1k-clip")) // 2**20
    2600
    """
    entry = task.entry
    samples = (entry.train or 1_280 * entry.classes) + (entry.test or 0)
    return _FLOAT * samples * prod(entry.shape) + 8 * samples
