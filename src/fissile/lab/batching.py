"""Batches: how trials are cut into them, and the workers that compute them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf, prod
from multiprocessing.connection import wait
from typing import ParamSpec, TypeVar

from fissile._common.cores import keep_to
from fissile._common.errors import FissileError
from fissile.bank.sparse import Plan
from fissile.lab.compute import TrialResult
from fissile.lab.store import Provenance
from fissile.lab.trial import Boolean, Contender, Images, Sampling, Trial, Work

__all__ = [
    "BATCH",
    "PROCESS",
    "Halt",
    "Here",
    "Lane",
    "Lanes",
    "Least",
    "Lost",
    "Pending",
    "Recalled",
    "Report",
    "Unit",
    "batches",
    "data_bytes",
    "default_jobs",
    "memory_of",
    "network_bytes",
    "pool",
    "process_bytes",
    "side_by_side",
]


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
#: Says how many networks a batch with such a trial has at least.
Least = Callable[[Work], int]

#: How much work goes into a batch, in estimated seconds on two cores: what ``kill -9`` may cost.
#: A GPU wants more networks side by side, and is done with them as soon.
BATCH = {"cpu": 6.0, "cuda": 7.0}

#: Bytes of a process before it trains: Python, PyTorch, compiled kernels.
PROCESS = 600 << 20
_FLOAT = 4
#: Numbers kept for a weight in a bank: itself and two moments, thrice (now, at the end of the last
#: epoch, as an engine lays them out), its gradient, and two for Adam's step.
_KEPT = 12
_SPREAD = 6  # numbers kept for each weight that children could have, most of them zero
_CONTENDER = 6  # numbers kept for a contender's weight; it keeps no last epoch
#: Channels of the backbone's blocks; each has three convolutions and halves the image's side.
_CHANNELS = (3, 64, 128, 256)


class Lost(Exception):
    """The worker that had a batch has died, and the batch may be tried again."""


class Recalled(Lost):
    """A batch that was called back before a worker had it; nobody is to blame."""


class Halt(FissileError):
    """Nothing can be computed any more; the message says why."""


@dataclass(frozen=True)
class Report:
    """What became of a batch, and who computed it."""

    outcomes: list[TrialResult]
    provenance: Provenance
    worker: str = ""
    seconds: float = 0.0
    room: int = 0  # bytes on its device, where there are few


class Here(Executor):
    """Computes what it is given at once, in this thread, where Ctrl-C reaches it."""

    def submit(
        self,
        fn: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Result]:
        """Call the function and return its finished future."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(eq=False)
class Lane:
    """One kind of worker, and the batches that suit it.

    >>> Lane(executor, "cuda", slots=8, size=7.0)

    Args:
        executor: who computes.
        device: where networks are trained.
        slots: batches at once; it may change while a run goes on.
        gone: there are no such workers any more, and batches that wait for one are called back.
        size: estimated seconds on two cores that a batch takes.
        least: how small a batch may be, so that towards the end all workers have one; by default
            a batch is never smaller for that.
        networks: how many a batch has at least, however long they take; it may depend on what it
            consists of.
        memory: bytes that a batch may need, unless it is a single network.
        provenance: of what comes back without any.
    """

    executor: Executor
    device: str = "cpu"
    slots: int = 1
    size: float = BATCH["cpu"]
    least: float = inf
    networks: int | Least = 1
    memory: float = inf
    provenance: Provenance | None = None
    gone: bool = False

    def cut(self, pending: Pending, slots: int) -> list[Work]:
        """Take a batch from what is pending, of which so many slots want their share."""
        share = pending.cost / (2 * slots)
        return pending.take(min(self.size, max(self.least, share)), self.networks, self.memory)


#: Answers with the lanes there are now.
Lanes = Callable[[], Sequence[Lane]]


@dataclass(eq=False)
class Unit:
    """The trials of one network, which stay together: its arms share a warm-up."""

    works: list[Work]
    cost: float = field(init=False)
    memory: int = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.cost = sum(work.cost for work in self.works)
        self.memory = sum(network_bytes(work) for work in self.works)
        self.number = max(work.number for work in self.works)


class Pending:
    """Trials that wait to be computed: in units, and units that go side by side in groups.

    >>> pending = Pending(STUDIES["codes"].works("smoke"))
    >>> pending.take(cost=8.0)

    ``rank`` says which units come first: those of the lowest.
    """

    def __init__(
        self, works: Iterable[Work] = (), rank: Callable[[Unit], float] = lambda unit: 0.0
    ) -> None:
        self._rank = rank
        self._groups: list[deque[Unit]] = []
        self._last: deque[Unit] = deque()  # those that are computed by themselves
        self.cost, self._count = 0.0, 0
        self.add(works)

    def __len__(self) -> int:
        return self._count

    def add(self, works: Iterable[Work]) -> None:
        """Add trials, to be cut as the lanes want them."""
        for units in _alike(works):
            self._groups.append(deque(sorted(units, key=self._rank)))
            self._counted(units)

    def alone(self, works: Iterable[Work]) -> None:
        """Put trials back, to be computed last and network by network."""
        units = [unit for group in _alike(works) for unit in group]
        self._last.extend(units)
        self._counted(units)

    def clear(self) -> int:
        """Drop everything; return how many trials that is."""
        count, self._count, self.cost = self._count, 0, 0.0
        for units in (self._groups, self._last):
            units.clear()
        return count

    def take(self, cost: float, networks: int | Least = 1, memory: float = inf) -> list[Work]:
        """Take out a batch of about so many estimated seconds.

        It has at least so many networks, however long they take, and never more than fit into
        the memory, unless one alone does not.
        """
        if not self._groups:
            units = [self._last.popleft()]
        else:
            group = min(self._groups, key=lambda units: self._rank(units[0]))
            units = _cut(group, cost, networks, memory)
            if not group:
                self._groups.remove(group)
        self._counted(units, -1)
        return [work for unit in units for work in unit.works]

    def _counted(self, units: Iterable[Unit], sign: int = 1) -> None:
        for unit in units:
            self._count += sign * len(unit.works)
            self.cost += sign * unit.cost


def _alike(works: Iterable[Work]) -> list[list[Unit]]:
    """Group trials by network, and networks by what lets them be trained side by side."""
    found: dict[Work, list[Work]] = {}
    for work in works:
        found.setdefault(work.network(), []).append(work)
    alike: dict[object, list[Unit]] = {}
    for network, arms in found.items():
        key = network.batch_key(), frozenset(getattr(work, "arm", None) for work in arms)
        alike.setdefault(key, []).append(Unit(arms))
    return list(alike.values())


def _cut(group: deque[Unit], cost: float, networks: int | Least, memory: float) -> list[Unit]:
    found = [group.popleft()]
    least = networks(found[0].works[0]) if callable(networks) else networks
    spent, held = found[0].cost, memory_of(found[0].works)
    while group and (spent < cost or len(found) < least):
        if held + group[0].memory > memory:
            break
        found.append(group.popleft())
        spent += found[-1].cost
        held += found[-1].memory
    return found


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
    spread = alpha * weights if alpha > 1 else 0  # the weights that all children could have
    held = spread if work.arm.split in ("dropconnect", "dynamic") and spread else weights
    values = batch * (inputs + alpha * sum(sizes[1:-1]) + outputs)
    owners = weights if alpha > 1 else 0  # a byte each
    total = _FLOAT * (_KEPT * held + _SPREAD * spread + 2 * values) + owners
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


def batches(works: Sequence[Work], cost: float, networks: int = 1) -> list[list[Work]]:
    """Cut trials into batches of about so many estimated seconds, to be computed side by side.

    >>> batches(STUDIES["codes"].works("smoke"), cost=8.0)

    The arms of a network stay together: they share its warm-up. A batch has at least so many
    networks, however long they take: on a processor, each keeps one core busy.
    """
    pending, found = Pending(works), list[list[Work]]()
    while pending:
        found.append(pending.take(cost, networks))
    return found


def side_by_side(works: Sequence[Work], device: str, *, cores: int = 1, workers: int = 1) -> Least:
    """Return the least number of networks in a batch that keeps a device busy, for each trial."""
    on_chip = device.startswith("cuda")
    cells = len({work.network() for work in works if isinstance(work, Contender)})

    def least(work: Work) -> int:
        if on_chip and isinstance(work, Contender):
            return ceil(cells / workers)  # whatever sees the same data is one graph
        if isinstance(work, Trial) and isinstance(work.task, Images):
            from fissile.bank.vision.train import SIDE_BY_SIDE

            return SIDE_BY_SIDE if on_chip else 1
        return 1 if on_chip else cores

    return least


def default_jobs(device: str, works: Sequence[Work] = (), cores: int | None = None) -> int:
    """Return how many processes suit a device, beside so many cores; by default this machine's.

    On a GPU small networks wait for launches, compilations and measures, and one process leaves
    the chip idle; on a processor a bank takes all cores by itself, and convolutional networks fill
    a GPU from one process, several at once.
    """
    if any(isinstance(getattr(work, "task", None), Images) for work in works):
        return 1
    cores = os.cpu_count() or 1 if cores is None else cores
    return max(1, min(8, cores // 2)) if device.startswith("cuda") else 1


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Keep processes for batches; whatever ends this process ends them too.

    >>> with pool(4) as executor:
    ...     run(works, store, executor=executor, in_flight=4)
    """
    executor = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would not survive CUDA
        initializer=_begin,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()  # nobody waits for a batch whose run has ended
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """Prepare a process: its share of the cores, and an end with its parent's."""
    keep_to(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # it was killed and could not say goodbye
