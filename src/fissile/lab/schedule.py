"""Dealing batches to workers before there are any: how long they would take, by the model.

Batches are cut on demand and the longest first, by the same code as on a cluster.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, log2

from fissile.bank.vision.train import SIDE_BY_SIDE
from fissile.lab import cost
from fissile.lab.batching import BATCH, Here, Lane, Pending, memory_of
from fissile.lab.measured import Worker, loads
from fissile.lab.run import side_by_side
from fissile.lab.task import Features, Images
from fissile.lab.trial import Trial, Work

__all__ = ["Batch", "Schedule", "dealt"]

#: Workers that share a machine, and with it a copy of the data.
_PER_MACHINE = {"cpu": 64, "cuda": 8}
#: Bytes a second from one machine to another; assumed, not measured: 10 Gbit/s.
_NETWORK = 1.25e9
#: How small a batch may be cut so that all workers have one, as a share of the usual one.
_LEAST = 1 / 8
#: Workers beyond which it is as fast: what a larger number may still gain.
_AS_FAST = 1.05


@dataclass(frozen=True)
class Batch:
    """What a worker is given at once."""

    works: Sequence[Work]
    kinds: Mapping[str, float]  # seconds by kind of network
    set_up: float  # the part of them in which nothing is trained yet

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return sum(self.kinds.values())

    @property
    def memory(self) -> int:
        """The bytes that it needs where networks are trained, with its data set."""
        if isinstance(getattr(self.works[0], "task", None), Images):  # only so many at once
            return memory_of(heapq.nlargest(SIDE_BY_SIDE, self.works, lambda work: work.memory))
        return memory_of(self.works)

    def __str__(self) -> str:
        networks = len({work.network() for work in self.works})
        widths = sorted({work.neurons for work in self.works})
        wide = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
        cells = "network" if isinstance(self.works[0], Trial) else "cell"
        plural = "" if networks == 1 else "s"
        return f"{networks:,} {cells}{plural} of {wide} neurons, {len(self.works):,} trials"


def dealt(seconds: Iterable[float], workers: int) -> list[float]:
    """Deal batches in this order, each to who is free first; return when each worker is done.

    >>> dealt([3.0, 2.0, 2.0], workers=2)
    [3.0, 4.0]
    """
    ends = [(0.0, worker) for worker in range(workers)]
    for one in seconds:
        end, worker = ends[0]
        heapq.heapreplace(ends, (end + one, worker))
    return [end for end, _ in sorted(ends, key=lambda pair: pair[1])]


class Schedule:
    """Trials, and the workers they are meant for, however many of these there will be.

    >>> schedule = Schedule(STUDIES["imagenet1k"].works("paper"), worker_for("cuda").worker)
    >>> schedule.wall(8), schedule.wall(1_000)

    Args:
        works: the trials.
        worker: what was measured of one.
        every: estimated seconds of work on two cores in a batch; by default what suits the worker.
    """

    def __init__(self, works: Sequence[Work], worker: Worker, every: float | None = None) -> None:
        self.works, self.worker = works, worker
        # A worker has one of the two cores that cost is counted in.
        usual = BATCH[worker.device] / (2 if worker.device == "cpu" else 1)
        self.every = usual if every is None else every
        tasks = (getattr(work, "task", None) for work in works)
        known = {task.data: task for task in tasks if isinstance(task, Features | Images)}
        self.data = sum(map(cost.data_bytes, known.values()))
        self._waiting = _Waiting(works, lambda unit: -unit.cost)
        self._cut: dict[int, list[Batch]] = {}

    def coarser(self, factor: float) -> Schedule:
        """Return the same with larger batches."""
        other = copy(self)
        other.every, other._cut = factor * self.every, {}
        return other

    def batches(self, workers: int) -> list[Batch]:
        """Cut batches as so many workers would ask for them."""
        if workers not in self._cut:
            kind, least = self.worker.device, _LEAST * self.every
            networks = side_by_side(self.works, kind, workers=workers)
            lane = Lane(Here(), kind, workers, self.every, least, networks)
            waiting, found = self._waiting.copy(), list[Batch]()
            while waiting:
                works = lane.cut(waiting, workers)
                asked = loads(works)
                found.append(Batch(works, self.worker.seconds(asked), self.worker.set_up(asked)))
            self._cut[workers] = found
        return self._cut[workers]

    def busy(self, workers: int) -> int:
        """Count the workers that get something to do."""
        return min(workers, len(self.batches(workers)))

    def work(self, workers: int) -> float:
        """Return the seconds of all workers together, without start-up and waiting."""
        return sum(batch.seconds for batch in self.batches(workers))

    def started(self, workers: int) -> float:
        """Return the seconds until processes have begun: the first, and then those it starts."""
        return self.worker.start * (1 if workers == 1 else 2)

    def sent(self, workers: int) -> float:
        """Return the seconds until every machine has the data: whoever has it passes it on."""
        machines = ceil(self.busy(workers) / _PER_MACHINE[self.worker.device])
        passed = ceil(log2(machines + 1)) if machines > 1 else 0
        return self.worker.reads * self.data / 2**30 + passed * self.data / _NETWORK

    def wall(self, workers: int) -> float:
        """Return the seconds until all is done."""
        ends = dealt([batch.seconds for batch in self.batches(workers)], workers)
        return self.started(workers) + self.sent(workers) + max(ends)

    def as_fast(self, workers: int) -> int:
        """Return the fewest workers that take hardly longer, by halving the interval."""
        few, many = 1, self.busy(workers)
        enough = _AS_FAST * self.wall(workers)
        while few < many:
            middle = (few + many) // 2
            if self.wall(middle) <= enough:
                many = middle
            else:
                few = middle + 1
        return many


class _Waiting(Pending):
    """Trials that can be cut into batches again and again."""

    def copy(self) -> _Waiting:
        """Return the same trials, to be cut another way."""
        other = copy(self)
        other._groups = [deque(units) for units in self._groups]
        return other
