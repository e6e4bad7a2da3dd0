"""How long a run will take: the costs of its trials, times the seconds that a cost has taken.

Every trial has a cost, about its seconds on two cores (:attr:`fissile.lab.trial.Trial.cost`). Each
kind of trial has a rate, the time of one worker for a unit of cost. It comes from stored trials of
the same device; a kind that has none stored is tried for some seconds.
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
from fissile.lab.trial import (
    Arm,
    Boolean,
    Contender,
    Features,
    FunctionTrial,
    Images,
    Sampling,
    Text,
    Trial,
    Work,
    from_spec,
)

_BESIDE = 8  # networks that a calibration run trains side by side
_ENOUGH = 0.5  # seconds of a calibration run that are worth counting


class Rate(NamedTuple):
    """The seconds of a worker for a unit of cost."""

    seconds: float
    ratios: tuple[float, ...] = ()  # each stored batch's time, over what the others predict for it


@dataclass(frozen=True)
class Estimate:
    """The time of a run; seconds are None where a kind of trial has no rate."""

    trials: int
    workers: int
    seconds: float | None
    studies: Mapping[str, float | None]  # the seconds of each study alone
    rates: Mapping[str, Rate]  # by kind of trial
    unknown: Sequence[str]  # kinds without a rate

    @property
    def error(self) -> dict[str, float] | None:
        """How many times as long as predicted stored batches took; None where there are too few."""
        ratios = [ratio for rate in self.rates.values() for ratio in rate.ratios]
        if not ratios:
            return None
        low, median, high = np.percentile(ratios, (5, 50, 95)).tolist()  # 90 % lie in between
        return {"low": low, "median": median, "high": high, "batches": len(ratios)}


def estimate(
    studies: Mapping[str, Sequence[Work]],
    times: Iterable[Time] = (),
    device: str = "cpu",
    workers: int = 1,
) -> Estimate:
    """Estimate how long trials take; those that several studies share are computed once.

    >>> estimate({"codes": STUDIES["codes"].works("paper")}, store.times(), workers=4).seconds

    Workers are cores, or processes that train on a GPU.
    """
    whole("workers", workers, least=1)
    works = list(dict.fromkeys(work for each in studies.values() for work in each))
    examples, known = {kind_of(work): work for work in works}, rates(times, device)
    for kind in examples.keys() - known.keys():
        if (rate := calibrated(examples[kind], device)) is not None:
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
    """Return the time of all trials, or that of the longest network if it is more."""
    networks: dict[Work, float] = defaultdict(float)
    for work in works:
        if kind_of(work) not in known:
            return None
        networks[work.network()] += work.cost * known[kind_of(work)].seconds
    return max(sum(networks.values()) / workers, max(networks.values(), default=0.0))


def kind_of(work: Work) -> str:
    """Return the kind of a trial, such as ``deep``; trials of a kind share a rate."""
    if isinstance(work, FunctionTrial):
        return f"{work.function} {work.code}"
    if not isinstance(work, Trial):
        return work.kind
    if isinstance(work.task, Boolean):
        return "embedded" if work.embedding else "boolean"
    if isinstance(work.task, Images | Text):
        return "images" if isinstance(work.task, Images) else "text"
    if work.arm.split in ("dropconnect", "dynamic"):  # whose masks change
        return work.arm.split
    return "deep" if work.depth > 2 else "classifier"


def rates(times: Iterable[Time], device: str = "cpu") -> dict[str, Rate]:
    """Return the rate of each kind of trial on this machine's device, or any GPU if it has none."""
    here = _machine(Provenance.here(device).device)[0]
    batches: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stored in times:
        machine, cores = _machine(stored.device)
        if machine == here or (here == device != "cpu" and not cores):
            with suppress(FissileError):  # a trial that is not made any more
                work = from_spec(stored.kind, stored.spec)
                batch = batches[kind_of(work), stored.finished]
                batch[0] += stored.seconds * (cores or 1)
                batch[1] += work.cost
    by_kind: dict[str, Rate] = {}
    for kind in {kind for kind, _ in batches}:
        seconds, cost = np.array([batch for key, batch in batches.items() if key[0] == kind]).T
        rest = seconds.sum() - seconds, cost.sum() - cost
        ratios = (seconds / cost * rest[1] / rest[0]).tolist() if len(cost) > 1 else ()
        by_kind[kind] = Rate(float(seconds.sum() / cost.sum()), tuple(ratios))
    return by_kind


def _machine(device: str) -> tuple[str, int]:
    """Return the name and the cores of a device such as "AMD EPYC, 2 cores"; a GPU has 0."""
    name, _, cores = device.rpartition(", ")
    count = cores.removesuffix(" cores")
    return (name, int(count)) if name and count.isdecimal() else (device, 0)


def calibrated(work: Work, device: str = "cpu") -> Rate | None:
    """Return the rate of small trials of this kind, run now on generated data, if they can be."""
    name, cores = _machine(Provenance.here(device).device)
    if (
        name == device != "cpu"
        or kind_of(work) in ("images", "text")
        or isinstance(work, FunctionTrial)
    ):
        return None  # no GPU is here, it takes too long, or nobody knows how long it takes
    size, seconds, cost = 1, 0.0, 1.0
    while seconds < _ENOUGH:  # the first run compiles, and later ones dwarf what is set up once
        if isinstance(work, Sampling):
            small: Work = replace(work, networks=100 * size)
        elif isinstance(work, Contender):
            small = replace(work, task=Features("generated"), epochs=2 * size)
        else:
            task = work.task if isinstance(work.task, Boolean) else Features("generated")
            arm = Arm() if work.arm.split == "converged" else work.arm  # which has no set length
            small = replace(work, task=task, arm=arm, warm_up=1, fine_tune=size)
        batch = [replace(small, number=number) for number in range(_BESIDE)]
        begin = time.perf_counter()
        compute(batch, device)
        seconds = time.perf_counter() - begin if size > 1 else 0.0
        cost = sum(trial.cost for trial in batch)
        size *= 4
    return Rate(seconds * (cores or 1) / cost)
