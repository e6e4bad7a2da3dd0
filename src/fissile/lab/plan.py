"""How long a run will take: the cost of its trials, times the seconds that a cost took before.

>>> estimate = plan({"codes": STUDIES["codes"].works("paper")}, Store("results").times())
>>> estimate.seconds, estimate.error

A rate is the seconds that one unit of cost (:mod:`fissile.lab.cost`) takes a worker, for a kind of
trial. It comes from trials that a store holds, computed on the same device; where there are none,
from a short calibration run. Otherwise the time is unknown, and that is said.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fissile._common.errors import FissileError, whole
from fissile.lab.compute import compute
from fissile.lab.store import Provenance, Time
from fissile.lab.trial import Boolean, Contender, Features, Images, Sampling, Trial, Work, from_spec

__all__ = ["Error", "Estimate", "Rate", "calibrated", "kind_of", "plan", "rates"]

_BESIDE = 8  # networks that a calibration run trains side by side
_ENOUGH = 0.5  # seconds of a calibration run that are worth counting


class Rate(NamedTuple):
    """The seconds of a worker for a unit of cost, and what they come from."""

    seconds: float
    #: For every stored batch: its time over what the other batches would have said of it.
    ratios: tuple[float, ...] = ()
    batches: int = 0  # stored batches; 0 for a calibration run


class Error(NamedTuple):
    """How many times as long as estimated stored batches took."""

    median: float
    low: float  # 90 % of the batches lie between low and high
    high: float
    batches: int


@dataclass(frozen=True)
class Estimate:
    """What a run will take; seconds are None where the rate of a kind is unknown."""

    trials: int
    workers: int
    seconds: float | None
    studies: Mapping[str, float | None]  # the seconds of each alone
    rates: Mapping[str, Rate]  # by kind of trial
    unknown: Sequence[str]  # kinds without a rate

    @property
    def error(self) -> Error | None:
        """How far off the rates were on stored batches; None where there are too few."""
        ratios = [ratio for rate in self.rates.values() for ratio in rate.ratios]
        if not ratios:
            return None
        low, median, high = np.percentile(ratios, (5, 50, 95)).tolist()
        return Error(median, low, high, len(ratios))


def plan(
    studies: Mapping[str, Sequence[Work]],
    times: Iterable[Time] = (),
    device: str = "cpu",
    workers: int = 1,
    *,
    calibrate: bool = True,
) -> Estimate:
    """Estimate how long trials take.

    >>> plan({"codes": STUDIES["codes"].works("paper")}, workers=4).seconds

    Args:
        studies: the trials of each study; those that several share are computed once.
        times: of finished trials, from :meth:`Store.times`.
        device: where networks are trained, ``cpu`` or ``cuda``.
        workers: cores, or processes that train on a GPU.
        calibrate: run a few small trials for kinds that the times do not cover.
    """
    whole("workers", workers, least=1)
    works = list(dict.fromkeys(work for each in studies.values() for work in each))
    known, examples = rates(times, device), {kind_of(work): work for work in works}
    for kind in examples.keys() - known.keys():
        rate = calibrated(examples[kind], device) if calibrate else None
        if rate is not None:
            known[kind] = rate
    return Estimate(
        trials=len(works),
        workers=workers,
        seconds=_seconds(works, known, workers),
        studies={study: _seconds(each, known, workers) for study, each in studies.items()},
        rates={kind: known[kind] for kind in sorted(examples) if kind in known},
        unknown=sorted(examples.keys() - known.keys()),
    )


def _seconds(works: Sequence[Work], known: Mapping[str, Rate], workers: int) -> float | None:
    """Return the seconds of all trials, or those of the longest network if they are more."""
    networks: dict[Work, float] = defaultdict(float)
    for work in works:
        if kind_of(work) not in known:
            return None
        networks[work.network()] += work.cost * known[kind_of(work)].seconds
    return max(sum(networks.values()) / workers, max(networks.values(), default=0.0))


def kind_of(work: Work) -> str:
    """Return the kind of trial, as far as its time goes.

    >>> kind_of(Trial(Features("cifar100-clip"), depth=5))
    'deep'
    """
    if not isinstance(work, Trial):
        return work.kind
    if isinstance(work.task, Boolean):
        return "embedded" if work.embedding else "boolean"
    if isinstance(work.task, Images):
        return "images"
    if work.arm.split in ("dropconnect", "dynamic"):  # which no fast engine trains
        return work.arm.split
    return "deep" if work.depth > 2 else "classifier"


def rates(times: Iterable[Time], device: str = "cpu") -> dict[str, Rate]:
    """Return the rate of every kind of trial that was computed on a device.

    The device is the one here; where no GPU is, any GPU's times are taken.
    """
    here = _machine(Provenance.here(device).device)[0]
    batches: dict[str, dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0])
    )
    for one in times:
        machine, cores = _machine(one.device)
        if machine != here and not (here == device != "cpu" and not cores):
            continue
        with suppress(FissileError):  # a trial that is not made any more
            work = from_spec(one.kind, one.spec)
            batch = batches[kind_of(work)][one.finished]
            batch[0] += one.seconds * (cores or 1)
            batch[1] += work.cost
    return {kind: _rate(list(each.values())) for kind, each in batches.items()}


def _rate(batches: Sequence[Sequence[float]]) -> Rate:
    """Return the rate of batches of seconds and costs, each also estimated from the others."""
    seconds, cost = (sum(column) for column in zip(*batches, strict=True))
    if len(batches) == 1:
        return Rate(seconds / cost, batches=1)
    ratios = tuple(s / c * (cost - c) / (seconds - s) for s, c in batches)
    return Rate(seconds / cost, ratios, len(batches))


def _machine(device: str) -> tuple[str, int]:
    """Return the machine's name and the cores that a process had; 0 for a GPU.

    >>> _machine("AMD EPYC, 2 cores"), _machine("NVIDIA H200")
    (('AMD EPYC', 2), ('NVIDIA H200', 0))
    """
    name, _, cores = device.rpartition(", ")
    count = cores.removesuffix(" cores")
    return (name, int(count)) if name and count.isdecimal() else (device, 0)


def calibrated(work: Work, device: str = "cpu") -> Rate | None:
    """Return the rate of small trials of this kind, run now; None if they cannot be.

    >>> calibrated(Trial())

    Features are those of a generated set, so that no data set has to be here. Convolutional
    networks take too long to try.
    """
    name, cores = _machine(Provenance.here(device).device)
    if name == device != "cpu" or isinstance(getattr(work, "task", None), Images):
        return None  # there is no GPU here
    size, seconds, costs = 1, 0.0, 1.0
    while seconds < _ENOUGH:  # the first run compiles, and later ones dwarf what is set up once
        batch = [_small(work, size, number) for number in range(_BESIDE)]
        begin = time.perf_counter()
        compute(batch, device)
        seconds = time.perf_counter() - begin if size > 1 else 0.0
        costs = sum(one.cost for one in batch)
        size *= 4
    return Rate(seconds * (cores or 1) / costs)


def _small(work: Work, size: int, number: int) -> Work:
    if isinstance(work, Sampling):
        return replace(work, networks=100 * size, number=number)
    if isinstance(work, Contender):
        return replace(work, task=Features("generated"), epochs=2 * size, number=number)
    task = work.task if isinstance(work.task, Boolean) else Features("generated")
    return replace(work, task=task, warm_up=1, fine_tune=size, number=number)
