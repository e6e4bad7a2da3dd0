"""How long a run will take, and what it needs: its batches, dealt to workers that were measured.

>>> estimate = plan({"imagenet1k": STUDIES["imagenet1k"].works("paper")}, 8, "cuda")
>>> estimate.wall, estimate.low, estimate.high

Nothing is computed, and no data set has to be here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from fissile._common.errors import FissileError, whole
from fissile.lab import cost
from fissile.lab.classifier import STREAMED
from fissile.lab.measured import Worker, worker_for
from fissile.lab.schedule import Batch, Schedule
from fissile.lab.trial import Features, Work

__all__ = ["Estimate", "Parts", "duration", "plan"]

#: The share of the time that may be a guess before an estimate is one.
_LITTLE = 0.05
#: How many times as long networks take whose features are read from a file as they train: two of
#: them on two cores, benchmarks/results/2026-11-15-stream-2-cores.txt.
_SLOWER = 3.3


@dataclass(frozen=True)
class Parts:
    """Where the time of a worker that has something to do goes, on average: seconds."""

    start: float = 0.0  # processes begin, and import
    data: float = 0.0  # data sets are read, and come to their machines
    set_up: float = 0.0  # networks are laid out, kernels compiled
    training: float = 0.0
    waiting: float = 0.0  # for the last batch of another worker


@dataclass(frozen=True)
class Estimate:
    """What a run will take."""

    device: str
    measured_on: str
    workers: int
    busy: int  # workers that get something to do
    as_fast: int  # the fewest workers that take hardly longer, by 5 %
    trials: int
    batches: int
    work: float  # seconds of all workers, start-up and waiting left out
    wall: float  # seconds until all is done
    error: float | None  # the factor that it may be off; None: a part was never measured
    longest: float  # seconds of the longest batch
    longest_is: str
    device_bytes: int  # that a worker needs where networks are trained, with its data set
    process_bytes: int  # that its process takes beside them
    data_bytes: int  # that go to every machine once
    parts: Parts
    studies: Mapping[str, float]  # the share of the work
    unmeasured: Sequence[str] = ()  # kinds of networks
    notes: Sequence[str] = ()
    advice: Sequence[str] = ()

    @property
    def low(self) -> float | None:
        """The seconds it takes if the model is off one way."""
        return None if self.error is None else self.wall / self.error

    @property
    def high(self) -> float | None:
        """The seconds it takes if the model is off the other way."""
        return None if self.error is None else self.wall * self.error

    def plain(self) -> dict[str, object]:
        """Return everything as JSON can have it."""
        return asdict(self) | {"low": self.low, "high": self.high}


def plan(
    studies: Mapping[str, Sequence[Work]],
    workers: int = 1,
    device: str = "cpu",
    *,
    every: float | None = None,
) -> Estimate:
    """Estimate what trials take on so many workers, each of one core or of one GPU.

    >>> plan({"codes": STUDIES["codes"].works("paper")}, workers=4).wall

    Args:
        studies: the trials of each study; those that several share are computed once.
        workers: how many there are.
        device: what they are, ``cpu`` or ``cuda``.
        every: estimated seconds of work on two cores in a batch, as for ``fissile run``.
    """
    whole("workers", workers, least=1)
    if every is not None and every < 0:
        raise FissileError(f"every={every!r} is less than nothing; give seconds")
    worker, notes = worker_for(device)
    owner: dict[Work, str] = {}
    for study, works in studies.items():
        for work in works:
            owner.setdefault(work, study)
    if not owner:
        raise FissileError("there is nothing to plan: give at least one trial")
    schedule = Schedule(list(owner), worker, every)
    batches = schedule.batches(workers)
    kinds, longest = _by_kind(batches), max(batches, key=lambda batch: batch.seconds)
    unmeasured = sorted(kind for kind in kinds if kind not in worker.kinds)
    parts, wall = _parts(schedule, workers), schedule.wall(workers)
    return Estimate(
        device=worker.device,
        measured_on=worker.name,
        workers=workers,
        busy=schedule.busy(workers),
        as_fast=schedule.as_fast(workers),
        trials=len(owner),
        batches=len(batches),
        work=schedule.work(workers),
        wall=wall,
        error=None if _guessed(worker, parts) > _LITTLE * wall else worker.error(kinds),
        longest=longest.seconds,
        longest_is=str(longest),
        device_bytes=max(batch.memory for batch in batches),
        process_bytes=max(cost.process_bytes(batch.works) for batch in batches),
        data_bytes=schedule.data,
        parts=parts,
        studies=_shares(batches, owner),
        unmeasured=unmeasured,
        notes=[*notes, *_trust(worker, kinds), *_doubts(schedule, workers, unmeasured)],
        advice=_advice(schedule, workers, longest),
    )


def _parts(schedule: Schedule, workers: int) -> Parts:
    busy, work = schedule.busy(workers), schedule.work(workers)
    set_up = sum(batch.set_up for batch in schedule.batches(workers))
    start, sent = schedule.started(workers), schedule.sent(workers)
    waiting = max(0.0, schedule.wall(workers) - start - sent - work / busy)
    return Parts(start, sent, set_up / busy, (work - set_up) / busy, waiting)


def _guessed(worker: Worker, parts: Parts) -> float:
    """Return the seconds beside those of networks that nobody has measured."""
    taken = {"start": parts.start, "reads": parts.data}
    return sum(taken[name] for name in worker.guessed)


def _by_kind(batches: Sequence[Batch]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for batch in batches:
        for kind, seconds in batch.kinds.items():
            found[kind] += seconds
    return found


def _shares(batches: Sequence[Batch], owner: Mapping[Work, str]) -> dict[str, float]:
    """Return the share of the work that each study has, the largest first."""
    found: dict[str, float] = defaultdict(float)
    for batch in batches:
        whose = {owner[work] for work in batch.works}
        if len(whose) == 1:
            found[whose.pop()] += batch.seconds
            continue
        per_cost = batch.seconds / sum(work.cost for work in batch.works)
        for work in batch.works:
            found[owner[work]] += per_cost * work.cost
    whole = sum(found.values())
    ranked = sorted(found.items(), key=lambda pair: -pair[1])
    return {study: seconds / whole for study, seconds in ranked}


# --- what one should know, and what would help


def _trust(worker: Worker, kinds: Iterable[str]) -> list[str]:
    """Say what the times were fitted to, and how far off they were elsewhere."""
    known = {kind: worker.kinds[kind] for kind in kinds if kind in worker.kinds}
    if not known:
        return []
    batches = sum(speed.batches for speed in known.values())
    said = f"Fitted to {batches:,} measured batch{'' if batches == 1 else 'es'}"
    errors = [f"{kind} {speed.error:.2f}" for kind, speed in sorted(known.items()) if speed.error]
    if errors:
        said += (
            "; studies that were left out of the fit took so many times as long or as short as it "
            f"said (root mean square): {', '.join(errors)}"
        )
    unsure = sorted(kind for kind, speed in known.items() if not speed.error)
    if unsure:
        said += f"; too few to say how far off it is: {', '.join(unsure)}"
    return [f"{said}."]


def _doubts(schedule: Schedule, workers: int, unmeasured: Sequence[str]) -> list[str]:
    said, worker = [], schedule.worker
    if unmeasured:
        said.append(
            f"Networks of this kind were never measured on {worker.name}, and their time is a "
            f"guess: {', '.join(unmeasured)}."
        )
    guesses = _guesses(worker, data=schedule.data > 0)
    if guesses:
        said.append(f"Never measured on {worker.name}, and a guess: {', and '.join(guesses)}.")
    if worker.device == "cpu" and any(map(_streams, schedule.works)):
        said.append(
            f"Features of more than {STREAMED >> 30} GiB are taken to be in memory, as they are "
            "on a cluster; a run on this machine alone reads them from their file as it trains, "
            f"which took {_SLOWER} times as long where it was measured, and is not in the time."
        )
    if worker.device == "cuda":
        said.append(
            "A worker is one process on one GPU; where networks are small, a run keeps several "
            "on each, and is faster."
        )
    if schedule.sent(workers) > schedule.sent(1):
        said.append("Data sets are taken to travel at 10 Gbit/s, from machine to machine.")
    return said


def _guesses(worker: Worker, *, data: bool) -> list[str]:
    """Name what a worker takes time for beside networks that nobody has measured."""
    found = {"start": f"that a process takes {duration(worker.start)} to start"}
    if data:
        found["reads"] = f"that a GiB of data is read in {duration(worker.reads)}"
    return [text for name, text in found.items() if name in worker.guessed]


def _streams(work: Work) -> bool:
    """Tell whether a trial's features are so large that they may stay in their file."""
    task = getattr(work, "task", None)
    if not isinstance(task, Features) or task.scaling != "raw":  # scaled ones are in memory
        return False
    return cost.data_bytes(task) > STREAMED


def _advice(schedule: Schedule, workers: int, longest: Batch) -> list[str]:
    said, busy = [], schedule.busy(workers)
    if busy < workers:
        said.append(
            f"Only {busy:,} batches can be cut: {workers - busy:,} of {workers:,} workers have "
            "nothing to do."
        )
    if schedule.as_fast(workers) < busy:
        said.append(f"{schedule.as_fast(workers):,} workers are as fast, within 5 %.")
    if workers > 1 and longest.seconds > 0.9 * (schedule.wall(workers) - schedule.started(workers)):
        said.append(
            f"The longest batch ({longest}) takes {duration(longest.seconds)}: no number of "
            "workers is faster than that."
        )
    return said + _coarser(schedule, workers)


def _coarser(schedule: Schedule, workers: int) -> list[str]:
    """Say if larger batches would save work: steps that networks share are made once."""
    others = [schedule.coarser(factor) for factor in (8, 64, 512)]
    best = min(others, key=lambda one: one.work(workers))
    if best.work(workers) > 0.8 * schedule.work(workers):
        return []
    work, wall = duration(best.work(workers)), duration(best.wall(workers))
    return [
        f"--every {best.every:.0f} puts more networks side by side: {work} of work instead of "
        f"{duration(schedule.work(workers))}, and done in {wall} instead of "
        f"{duration(schedule.wall(workers))}."
    ]


def duration(seconds: float) -> str:
    """Say how long something takes.

    >>> duration(5_400)
    '90 min'
    """
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"
