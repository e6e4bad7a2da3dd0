"""From trials to numbers: train them side by side, then measure everything the studies ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile.bank import Arm as BankArm
from fissile.bank import Bank, Dense, DropConnect, Dynamic, Expand
from fissile.bank.bank import Quiet
from fissile.expansion.split import Gram, Split, resolve_split
from fissile.lab.boolean import Clauses, Formulas
from fissile.lab.classifier import Arrays, Classifiers, contest, load
from fissile.lab.directions import Directions, Guided
from fissile.lab.function import call
from fissile.lab.task import (
    Boolean,
    Images,
    Plateau,
    Text,
    length,
    limit,
    patience_of,
    plateau,
    stopped,
)
from fissile.lab.trial import GUIDES, Arm, Contender, FunctionTrial, Sampling, Trial, Work
from fissile.measure.theory import required_width

if TYPE_CHECKING:
    from fissile.bank.vision import Trained

OnSteps = Callable[[float], None]
OnOutcomes = Callable[[list["TrialResult"]], None]


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to."""

    work: Work
    measures: dict[str, float]
    seconds: float = 0.0
    arrays: dict[str, Tensor] = field(default_factory=dict)


def compute(
    works: Sequence[Work],
    device: str = "cpu",
    on_steps: OnSteps | None = None,
    on_outcomes: OnOutcomes | None = None,
    arrays: Arrays | None = None,
) -> list[TrialResult]:
    """Run trials that can go side by side (see ``batch_key``) and return what each came to.

    >>> compute([Trial(warm_up=1, fine_tune=1)])[0].measures["accuracy"]

    The numbers depend on the arguments and the data sets they name alone. ``on_steps`` is told the
    share of the training that is done, ``on_outcomes`` what is finished before the rest.
    ``arrays`` is the data set of the trials, where it should not be read from files.
    """
    begin = time.perf_counter()
    trials = [work for work in works if isinstance(work, Trial)]
    contenders = [work for work in works if isinstance(work, Contender)]
    samplings = [work for work in works if isinstance(work, Sampling)]
    functions = [work for work in works if isinstance(work, FunctionTrial)]
    if functions:
        return _called(functions, on_steps, on_outcomes)
    if contenders:
        measures = contest(contenders, device, on_steps, arrays)
        outcomes = [TrialResult(work, measures[work]) for work in contenders]
    elif samplings:
        outcomes = [TrialResult(work, sampled(work)) for work in samplings]
    elif isinstance(trials[0].task, Text):
        outcomes = _on_text(trials, device, on_steps, arrays)
    elif isinstance(trials[0].task, Images):
        outcomes = _behind_backbones(trials, device, on_steps, on_outcomes, arrays)
    elif trials[0].arm.split == "converged":
        outcomes = _until_converged(trials, device, on_steps, arrays)
    else:
        outcomes = _on_bank(trials, device, on_steps, arrays)
    # Trials that are trained side by side share the time out by their estimated cost.
    per_cost = (time.perf_counter() - begin) / sum(outcome.work.cost for outcome in outcomes)
    return [replace(outcome, seconds=per_cost * outcome.work.cost) for outcome in outcomes]


def _called(
    works: Sequence[FunctionTrial], on_steps: OnSteps | None, on_outcomes: OnOutcomes | None
) -> list[TrialResult]:
    """Call users' functions, and keep each result as it is there."""
    found = list[TrialResult]()
    for work in works:
        begin = time.perf_counter()
        measures = call(work)
        found.append(TrialResult(work, measures, time.perf_counter() - begin))
        if on_outcomes is not None:
            on_outcomes(found[-1:])
        if on_steps is not None:
            on_steps(len(found) / len(works))
    return found


def _grid(trials: Sequence[Trial]) -> tuple[list[Trial], list[Arm]]:
    """Return the networks and the arms that trials consist of."""
    networks = list(dict.fromkeys(trial.network() for trial in trials))
    arms = list(dict.fromkeys(trial.arm for trial in trials))
    if len(networks) * len(arms) != len(trials):
        raise FissileError("trials that are computed together must have the same arms")
    return networks, arms


def _bank(
    networks: Sequence[Trial], device: str, arrays: Arrays | None
) -> tuple[Formulas | Classifiers, Bank]:
    boolean = isinstance(networks[0].task, Boolean)
    kind = Formulas() if boolean else Classifiers(device, arrays)
    return kind, Bank([kind.spec(network) for network in networks], device=device)


def _on_bank(
    trials: Sequence[Trial], device: str, on_steps: OnSteps | None, arrays: Arrays | None
) -> list[TrialResult]:
    networks, arms = _grid(trials)
    first = networks[0]
    kind, bank = _bank(networks, device, arrays)
    warm_up, fine_tune = first.warm_up, first.fine_tune
    share = _Share(on_steps, len(networks) * warm_up + len(trials) * fine_tune)
    bank.train(until=warm_up, progress=share)
    warm = bank.last if warm_up else torch.full((len(networks),), torch.nan)
    features = kind.directions(first) if isinstance(kind, Classifiers) and guided(trials) else None
    branched = bank.branch({repr(arm): bank_arm(arm, first, features) for arm in arms})
    branched.train(until=warm_up + fine_tune, progress=share)
    table = {"accuracy": branched.last, "best": branched.best, "nonzeros": branched.nonzeros}
    table |= kind.measures(branched)
    if features is not None and first.diagnosed:
        known = features.before(bank).items()
        table |= {name: column.repeat_interleave(len(arms)) for name, column in known}
        table |= features.after(branched)
    table["warm"] = warm.repeat_interleave(len(arms))
    rows = {pair: row for row, pair in enumerate(product(networks, arms))}
    diverged, before = set(branched.diverged), bank.accuracy
    outcomes = []
    for trial in trials:
        row = rows[trial.network(), trial.arm]
        measures = {name: float(column[row]) for name, column in table.items()}
        measures["diverged"] = float(row in diverged)
        pictures = kind.arrays(branched, row, before[row // len(arms)]) if trial.pictures else {}
        outcomes.append(TrialResult(trial, measures, arrays=pictures))
    return outcomes


def _until_converged(
    trials: Sequence[Trial], device: str, on_steps: OnSteps | None, arrays: Arrays | None
) -> list[TrialResult]:
    """Train dense networks until each has converged; how long others take changes nothing."""
    warm_up, size = trials[0].warm_up, length(trials[0].warm_up)
    bank = _bank(trials, device, arrays)[1]
    weights = bank.nonzeros.tolist()
    curves, plateaus = [list[float]() for _ in trials], dict[int, Plateau]()
    left, epoch = list(range(len(trials))), warm_up
    while left:
        bank.train(until=epoch)
        for number, curve in zip(left, bank.accuracy.tolist(), strict=True):
            curves[number] += curve
            flat = plateau(curves[number], warm_up)
            diverged = bool(curve) and not isfinite(curve[-1])
            if flat is not None or diverged:
                plateaus[number] = flat or stopped(curves[number], warm_up)
        rest = [place for place, number in enumerate(left) if number not in plateaus]
        left = [left[place] for place in rest]
        if left:
            bank, epoch = bank.select(rest), epoch + size
        if on_steps is not None:
            on_steps(len(plateaus) / len(trials))
    return [
        TrialResult(trial, _criterion(curves[number], plateaus[number], warm_up, weights[number]))
        for number, trial in enumerate(trials)
    ]


def _criterion(
    curve: Sequence[float], flat: Plateau, warm_up: int, weights: float
) -> dict[str, float]:
    """Return the accuracy at the split and when converged, and the epochs that took."""
    return {
        "nonzeros": float(weights),
        "accuracy": flat.accuracy,
        "warm": curve[warm_up - 1] if 0 < warm_up <= len(curve) else nan,
        "epochs": float(flat.epochs),
        "rising": float(flat.rising),
        "diverged": float(not all(map(isfinite, curve))),
    }


class _Share(Quiet):
    """Turns a bank's progress into the share of a batch that is done."""

    def __init__(self, on_steps: OnSteps | None, epochs: int) -> None:
        self._tell, self._epochs, self._done = on_steps, epochs, 0

    def advance(self, epochs: int, steps: int) -> None:
        self._done += epochs
        if self._tell is not None:
            self._tell(self._done / self._epochs)


def guided(trials: Sequence[Trial]) -> bool:
    """Return whether trials need the features of their data."""
    return trials[0].diagnosed or any(trial.arm.split in GUIDES for trial in trials)


def bank_arm(arm: Arm, network: Trial, features: Directions | None = None) -> BankArm:
    """Return what a bank calls an arm of a trial; some splits need the features of its data."""
    match arm.split:
        case "dense" | "converged":
            return Dense()
        case "dropconnect":
            return DropConnect(arm.alpha)
        case "dynamic":
            return Dynamic(arm.alpha, every=arm.every, fraction=arm.fraction, grow=arm.grow)
        case "clause":
            assert isinstance(network.task, Boolean)
            split: Split = Clauses(network.task.size)
        case "gram":
            split = Gram(arm.clusters)
        case "means" | "atoms":
            split = Guided(lambda: features.rows[arm.split])  # type: ignore[union-attr]
        case _:
            split = resolve_split(arm.split)
    return Expand(arm.alpha, split, moments=arm.moments)


def _behind_backbones(
    trials: Sequence[Trial],
    device: str,
    on_steps: OnSteps | None,
    on_outcomes: OnOutcomes | None,
    arrays: Arrays | None,
) -> list[TrialResult]:
    """Train networks of one task and recipe behind their backbones; keep each as it is finished."""
    from fissile.bank import vision

    networks, arms = _grid(trials)
    first, task = networks[0], networks[0].task
    assert isinstance(task, Images)
    by_network = {(trial.network(), repr(trial.arm)): trial for trial in trials}
    outcomes: dict[Trial, TrialResult] = {}
    begin = time.perf_counter()

    def finished(number: int, arm: str, trained: Trained) -> None:
        network = networks[number]
        outcomes[by_network[network, arm]] = _behind_backbone(by_network[network, arm], trained)
        # All arms together: on a GPU a warm-up that is done again differs in the last bits.
        own = [by_network[network, repr(arm)] for arm in arms]
        if on_outcomes is not None and all(trial in outcomes for trial in own):
            taken = (time.perf_counter() - begin) / len(outcomes)
            on_outcomes([replace(outcomes[trial], seconds=taken) for trial in own])

    converging = first.arm.split == "converged"
    warm_up, held = first.warm_up, load(task, arrays)
    flat = partial(plateau, warm_up=warm_up, patience=patience_of(task))
    longest = limit(warm_up, patience_of(task)) if converging else warm_up + first.fine_tune
    vision.train(
        [vision.Network(task.projection, net.neurons, net.number) for net in networks],
        vision.Images(*map(torch.tensor, (held.x, held.y, held.x_test, held.y_test))),
        {repr(arm): bank_arm(arm, first) for arm in arms},
        recipe=first.recipe,
        warm_up=warm_up,
        fine_tune=longest - warm_up,
        mirror=task.mirror,
        enough=(lambda curve: flat(curve) is not None) if converging else None,
        device=device,
        progress=on_steps,
        on_trained=finished,
    )
    return [outcomes[trial] for trial in trials]


def _behind_backbone(trial: Trial, trained: Trained) -> TrialResult:
    curve, warm_up = trained.accuracy, trial.warm_up
    if trial.arm.split == "converged":
        flat = plateau(curve, warm_up, patience_of(trial.task)) or stopped(curve, warm_up)
        return TrialResult(trial, _criterion(curve, flat, warm_up, trained.nonzeros))
    reached = [value for value in curve if isfinite(value)]
    measures = {
        "accuracy": reached[-1] if reached else nan,
        "best": max(reached, default=nan),
        "warm": curve[warm_up - 1] if warm_up else nan,
        "nonzeros": float(trained.nonzeros),
        "diverged": float(trained.diverged),
    }
    return TrialResult(
        trial, measures, arrays={"curve": torch.tensor(curve)} if trial.pictures else {}
    )


def _on_text(
    trials: Sequence[Trial], device: str, on_steps: OnSteps | None, arrays: Arrays | None
) -> list[TrialResult]:
    """Train GPTs of one shape side by side."""
    from fissile.bank import language

    networks, arms = _grid(trials)
    first, task = networks[0], networks[0].task
    assert isinstance(task, Text)
    held = load(task, arrays)
    train, test = (
        torch.tensor(np.append(x[:, 0], y[-1]), dtype=torch.long)
        for x, y in ((held.x, held.y), (held.x_test, held.y_test))
    )
    found = language.train(
        language.Shape(
            held.classes, first.neurons, task.place, task.layers, task.width, task.heads,
            task.context, task.beside,
        ),
        [network.number for network in networks],
        language.Text(train, test, held.classes),
        {repr(arm): (bank_arm(arm, first), arm.allocation) for arm in arms},
        lr=first.recipe.lr, batch=first.recipe.batch, steps=task.steps,
        warm_up=first.warm_up, fine_tune=first.fine_tune, device=device, progress=on_steps,
    )  # fmt: skip
    outcomes = []
    for trial in trials:
        one, at = found[trial.number, repr(trial.arm)], trial.warm_up - 1
        measures = {
            "accuracy": one.accuracy[-1],
            "best": max(one.accuracy),
            "warm": one.accuracy[at] if trial.warm_up else nan,
            "nats": one.nats[-1],
            "warm_nats": one.nats[at] if trial.warm_up else nan,
            "nonzeros": float(one.nonzeros),
            "diverged": float(not isfinite(one.nats[-1])),
        }
        outcomes.append(TrialResult(trial, measures))
    return outcomes


def sampled(work: Sampling) -> dict[str, float]:
    """Return the closed forms, and what sampled networks come to."""
    net = work.formula
    seen = net.simulate(work.networks, seed=work.number)
    width = required_width(work.eps, work.literals, work.size, work.alpha)
    return {
        "coverage": net.coverage,
        "coverage_bound": net.coverage_bound,
        "coverage_approx": net.coverage_approx,
        "coverage_simulated": seen.coverage,
        "coverage_error": seen.coverage_error,
        "collision_ratio": net.collision_ratio,
        "collision_ratio_approx": net.collision_ratio_approx,
        "collision_ratio_simulated": seen.collisions / net.collisions_dense,
        "collision_ratio_error": seen.collisions_error / net.collisions_dense,
        "width": width.exact,
        "width_bound": width.bound,
        "width_approx": width.approx,
    }
