"""How long a batch takes a worker: a model whose numbers come from measured runs.

>>> worker = worker_for("cuda").worker
>>> worker.seconds(loads(batch))

A worker is a process with one core to itself, or with one GPU. What it takes for a batch is a sum
over kinds of networks: every shape is set up, its steps follow each other, and every network adds
its own work, which is ``cost``. ``benchmarks/cost.py`` fits the three numbers to rows of stores and
writes them, with their error on studies that were left out of the fit, to ``measured.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from math import exp, log
from typing import Any, NamedTuple

from fissile._common.errors import FissileError
from fissile.lab.budget_methods import SETTINGS
from fissile.lab.budget_trial import Contender
from fissile.lab.store.provenance import Provenance
from fissile.lab.task import HELD_OUT, Boolean, Images
from fissile.lab.trial import Sampling, Trial, Work

__all__ = [
    "GUESSES",
    "Chosen",
    "Load",
    "Speed",
    "Worker",
    "kind_of",
    "loads",
    "machine_of",
    "worker_for",
]

#: Splits whose networks no fast engine trains.
_SLOW = ("dropconnect", "dynamic")


class Load(NamedTuple):
    """What a batch asks of a worker, for one kind of network."""

    shapes: int = 0  # networks of one shape are set up at once
    steps: int = 0  # that follow each other, shape after shape
    cost: float = 0.0  # of all networks


@dataclass(frozen=True)
class Speed:
    """The seconds that a kind of network takes a worker, and how sure that is.

    >>> Speed(shapes=0.5, steps=1e-4, cost=0.01).seconds(Load(shapes=2, steps=1_000, cost=100.0))
    2.1
    """

    shapes: float = 0.0  # these three for one of each in a load
    steps: float = 0.0
    cost: float = 0.0
    error: float = (
        0.0  # studies that were left out took so many times as long, or as short; 0: none
    )
    batches: int = 0  # that were measured
    studies: int = 0

    def seconds(self, load: Load) -> float:
        """Return the seconds of a batch, or of its part of this kind."""
        return self.set_up(load) + self.steps * load.steps + self.cost * load.cost

    def set_up(self, load: Load) -> float:
        """Return the seconds of them in which nothing is trained yet."""
        return self.shapes * load.shapes


#: What a worker is taken to need where nobody has measured it: see ``Worker``.
GUESSES = {"start": 10.0, "reads": 10.0}


@dataclass(frozen=True)
class Worker:
    """What was measured of one kind of worker."""

    name: str
    device: str  # cpu or cuda
    start: float = GUESSES["start"]  # seconds until a process has imported everything
    reads: float = GUESSES["reads"]  # seconds for a GiB of data, once
    kinds: dict[str, Speed] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()  # which of start and reads nobody has measured

    def seconds(self, asked: Mapping[str, Load]) -> dict[str, float]:
        """Return the seconds that a batch takes, by kind of network; see :func:`loads`."""
        return {kind: self.speed(kind).seconds(load) for kind, load in asked.items()}

    def set_up(self, asked: Mapping[str, Load]) -> float:
        """Return the seconds of them in which nothing is trained yet."""
        return sum(self.speed(kind).set_up(load) for kind, load in asked.items())

    def speed(self, kind: str) -> Speed:
        """Return what was measured of a kind of network, or a guess: the cost on two cores."""
        return self.kinds.get(kind, Speed(cost=2.0 if self.device == "cpu" else 1.0))

    def error(self, seconds: Mapping[str, float]) -> float | None:
        """Return the factor that an estimate may be off, given its seconds by kind.

        None where a kind was not measured. Errors of kinds are taken to go the same way.
        """
        found = [(self.speed(kind).error, part) for kind, part in seconds.items() if part > 0]
        if not found or any(not error for error, _ in found):
            return None
        whole = sum(part for _, part in found)
        return exp(sum(part * log(error) for error, part in found) / whole)


# --- what is asked of a worker


def kind_of(work: Work) -> str:
    """Return the kind of network, as far as the time it takes goes.

    >>> kind_of(Trial(Features("cifar100-clip"), depth=5))
    'deep'
    """
    if not isinstance(work, Trial):
        return work.kind
    if isinstance(work.task, Boolean):
        return "embedded" if work.embedding else "boolean"
    if isinstance(work.task, Images):
        return "images"
    if work.arm.split in _SLOW:
        return work.arm.split
    return "deep" if work.depth > 2 else "classifier"


def loads(batch: Sequence[Work]) -> dict[str, Load]:
    """Return what a batch asks of a worker, by kind of network.

    >>> loads([Trial(number=number) for number in range(100)])["boolean"].shapes
    1
    """
    costs: dict[str, float] = {}
    for work in batch:
        if not isinstance(work, Contender):
            costs[kind_of(work)] = costs.get(kind_of(work), 0.0) + work.cost
    cells = Counter(work.network() for work in batch if isinstance(work, Contender))
    for cell, trials in cells.items():  # the search is once for all trials
        costs["contender"] = costs.get("contender", 0.0) + (2 * SETTINGS + trials) * _cost(cell)
    return {
        kind: Load(len(shapes), sum(shapes.values()), costs[kind])
        for kind, shapes in _shapes(batch).items()
    }


@lru_cache(maxsize=4096)
def _cost(cell: Contender) -> float:
    """Return the cost of one network of a cell; that of a trial has a share of the search in it."""
    return cell.cost / (1 + SETTINGS // 3)


def _shapes(batch: Sequence[Work]) -> dict[str, dict[object, int]]:
    """Return the steps of every shape, by kind."""
    found: dict[str, dict[object, int]] = {}
    for work in batch:
        if isinstance(work, Trial):
            mine = found.setdefault(kind_of(work), {})
            mine[_shape(work)] = max(mine.get(_shape(work), 0), _steps(work))
    contenders = dict.fromkeys(w.network() for w in batch if isinstance(w, Contender))
    if contenders:
        found["contender"] = _contended(list(contenders))
    if any(isinstance(work, Sampling) for work in batch):
        found["sampling"] = {"drawn": 0}
    return found


def _shape(trial: Trial) -> object:
    task, arm = trial.task, trial.arm
    size = task.literals if isinstance(task, Boolean) else task
    how = arm if arm.split in _SLOW else arm.alpha  # splits differ in which weights they keep
    return size, trial.neurons, trial.embedding, trial.depth, arm.unsplit, how


def _steps(trial: Trial) -> int:
    """Count the steps of a network; the warm-up, which all arms share, counts for the dense one."""
    epochs = trial.tuned + (trial.warm_up if trial.arm.unsplit else 0)
    return epochs * -(-trial.task.samples // trial.recipe.batch)


def _contended(cells: Sequence[Contender]) -> dict[object, int]:
    """Return the shapes of contenders, which go side by side: the steps are those of one."""
    shapes: dict[object, int] = {}
    for cell in cells:
        shapes |= dict.fromkeys(_plan_shapes(cell), 0)
    first = cells[0]
    searched = int((1 - HELD_OUT) * first.task.samples) // first.batch
    tested = first.task.samples // first.batch
    return {**shapes, next(iter(shapes)): first.epochs * (searched + tested)}


@lru_cache(maxsize=4096)
def _plan_shapes(cell: Contender) -> tuple[object, ...]:
    return tuple(plan.shape() for plan in cell.plans)


# --- who was measured


class Chosen(NamedTuple):
    """A worker, and what one should know before one believes what it says."""

    worker: Worker
    notes: list[str]


@cache
def _workers() -> list[Worker]:
    file = resources.files("fissile.lab") / "measured.json"
    told = json.loads(file.read_text(encoding="utf-8"))["workers"]
    return [_worker(one) for one in told]


def _worker(told: Mapping[str, Any]) -> Worker:
    """Read what was measured of a worker; what the file leaves out is a guess."""
    known = {name: told[name] for name in GUESSES if told.get(name) is not None}
    return Worker(
        told["name"],
        told["device"],
        kinds={kind: Speed(**speed) for kind, speed in told["kinds"].items()},
        guessed=frozenset(GUESSES.keys() - known.keys()),
        **(GUESSES | known),
    )


def worker_for(device: str) -> Chosen:
    """Return the measured worker that is nearest to a device, with a word if it is another.

    >>> worker_for("cpu").worker.device
    'cpu'
    """
    family = device.partition(":")[0]
    measured = [worker for worker in _workers() if worker.device == family]
    if not measured:
        known = " or ".join(sorted({worker.device for worker in _workers()}))
        raise FissileError(f"no run was measured on {device!r}; plan for {known}")
    here = machine_of(Provenance.here(device).device)[0]
    same = [worker for worker in measured if worker.name == here]
    if same:
        return Chosen(same[0], [])
    most = max(measured, key=lambda one: sum(speed.batches for speed in one.kinds.values()))
    what = f"{here} was not measured" if here != family else "there is none here to compare with"
    return Chosen(most, [f"The times are those of {most.name}: {what}."])


def machine_of(device: str) -> tuple[str, int]:
    """Return the name in a result's provenance and how many cores its process had; 0 is a GPU.

    >>> machine_of("AMD EPYC, 2 cores"), machine_of("NVIDIA H200")
    (('AMD EPYC', 2), ('NVIDIA H200', 0))
    """
    name, comma, cores = device.rpartition(", ")
    if comma and cores.endswith(" cores") and cores.removesuffix(" cores").isdecimal():
        return name, int(cores.removesuffix(" cores"))
    return device, 0
