"""From trials to numbers: train them side by side, then measure everything the studies ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile.bank import Arm as BankArm
from fissile.bank import Bank, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.bank.bank import Quiet
from fissile.expansion.split import Gram, Split, resolve_split
from fissile.lab.boolean import Clauses, Formulas
from fissile.lab.budget_search import contest
from fissile.lab.classifier import Arrays, Classifiers, load
from fissile.lab.task import Boolean, Images, Plateau, length, limit, plateau, stopped
from fissile.lab.trial import Arm, Contender, Sampling, Trial, Work
from fissile.measure.theory import required_width

if TYPE_CHECKING:
    from fissile.bank.vision import Trained

__all__ = ["TrialResult", "bank_arm", "compute", "sampled"]


OnSteps = Callable[[float], None]
OnOutcomes = Callable[[list["TrialResult"]], None]


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to."""

    work: Work
    measures: dict[str, float]
    seconds: float
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

    It depends on nothing but its arguments and the data sets they name, so any executor may run it
    anywhere. ``on_steps`` is told the share of the training that is done, ``on_outcomes`` what is
    finished before the rest: a convolutional network takes long enough to be kept at once.
    ``arrays`` is the data set of the trials, where it should not be read from files.
    """
    begin = time.perf_counter()
    trials = [work for work in works if isinstance(work, Trial)]
    contenders = [work for work in works if isinstance(work, Contender)]
    if contenders:
        came_to = contest(contenders, device, on_steps, arrays)
        found = [TrialResult(work, came_to[work], 0.0) for work in contenders]
    elif not trials:
        found = [
            TrialResult(work, sampled(work), 0.0) for work in works if isinstance(work, Sampling)
        ]
    elif trials[0].arm.split == "converged":
        if isinstance(trials[0].task, Images):
            found = _images_trained_on(trials, device, on_steps, on_outcomes, arrays)
        else:
            found = _trained_on(trials, device, on_steps, arrays)
    elif isinstance(trials[0].task, Images):
        found = _convolutional(trials, device, on_steps, on_outcomes, arrays)
    else:
        found = _on_bank(trials, device, on_steps, arrays)
    # Side by side, nobody has seconds of their own: the time is shared out by estimated cost.
    per_cost = (time.perf_counter() - begin) / sum(one.work.cost for one in found)
    return [replace(one, seconds=per_cost * one.work.cost) for one in found]


def _grid(trials: Sequence[Trial]) -> tuple[list[Trial], list[Arm]]:
    """Return the networks and the arms that trials consist of."""
    networks = list(dict.fromkeys(trial.network() for trial in trials))
    arms = list(dict.fromkeys(trial.arm for trial in trials))
    if len(networks) * len(arms) != len(trials):
        raise FissileError("trials that are computed together must have the same arms")
    return networks, arms


# --- on the bank


class _Bench(Protocol):
    """What the bank does not know of a task."""

    def spec(self, trial: Trial) -> Spec: ...

    def measures(self, bank: Bank) -> dict[str, Tensor]: ...

    def arrays(self, bank: Bank, row: int, before: Tensor) -> dict[str, Tensor]: ...


def _bank(networks: Sequence[Trial], device: str, arrays: Arrays | None) -> tuple[_Bench, Bank]:
    boolean = isinstance(networks[0].task, Boolean)
    bench: _Bench = Formulas() if boolean else Classifiers(device, arrays)
    return bench, Bank([bench.spec(network) for network in networks], device=device)


def _on_bank(
    trials: Sequence[Trial], device: str, on_steps: OnSteps | None, arrays: Arrays | None
) -> list[TrialResult]:
    networks, arms = _grid(trials)
    first = networks[0]
    bench, bank = _bank(networks, device, arrays)
    warm_up, fine_tune = first.warm_up, first.fine_tune
    share = _Share(on_steps, len(networks) * warm_up + len(trials) * fine_tune)
    bank.train(until=warm_up, progress=share)
    warm = bank.last if warm_up else torch.full((len(networks),), torch.nan)
    branched = bank.branch({repr(arm): bank_arm(arm, first) for arm in arms})
    branched.train(until=warm_up + fine_tune, progress=share)
    table = {"accuracy": branched.last, "best": branched.best, "nonzeros": branched.nonzeros}
    table |= bench.measures(branched)
    table["warm"] = warm.repeat_interleave(len(arms))
    place = {
        (network, arm): i * len(arms) + a
        for i, network in enumerate(networks)
        for a, arm in enumerate(arms)
    }
    lost, before = set(branched.diverged), bank.accuracy
    outcomes = []
    for trial in trials:
        row = place[trial.network(), trial.arm]
        measures = {name: float(column[row]) for name, column in table.items()}
        measures["diverged"] = float(row in lost)
        pictures = bench.arrays(branched, row, before[row // len(arms)]) if trial.pictures else {}
        outcomes.append(TrialResult(trial, measures, 0.0, pictures))
    return outcomes


def _trained_on(
    trials: Sequence[Trial], device: str, on_steps: OnSteps | None, arrays: Arrays | None
) -> list[TrialResult]:
    """Train dense networks until each has converged; how long others take changes nothing."""
    warm_up, size = trials[0].warm_up, length(trials[0].warm_up)
    bank = _bank(trials, device, arrays)[1]
    weights = bank.nonzeros.tolist()
    curves, found = [list[float]() for _ in trials], dict[int, Plateau]()
    left, epoch = list(range(len(trials))), warm_up
    while left:
        bank.train(until=epoch)
        for number, curve in zip(left, bank.accuracy.tolist(), strict=True):
            curves[number] += curve
            flat = plateau(curves[number], warm_up)
            diverged = bool(curve) and not isfinite(curve[-1])
            if flat is not None or diverged:
                found[number] = flat or stopped(curves[number], warm_up)
        rest = [place for place, number in enumerate(left) if number not in found]
        left = [left[place] for place in rest]
        if left:
            bank, epoch = bank.select(rest), epoch + size
        if on_steps is not None:
            on_steps(len(found) / len(trials))
    return [
        TrialResult(trial, _criterion(curves[number], found[number], warm_up, int(counted)), 0.0)
        for number, (trial, counted) in enumerate(zip(trials, weights, strict=True))
    ]


def _images_trained_on(
    trials: Sequence[Trial],
    device: str,
    on_steps: OnSteps | None,
    on_outcomes: OnOutcomes | None,
    arrays: Arrays | None,
) -> list[TrialResult]:
    """Train dense networks behind a backbone until each has converged."""
    warm_up = trials[0].warm_up
    outcomes: dict[int, TrialResult] = {}
    begin = time.perf_counter()

    def finished(number: int, _: str, one: Trained) -> None:
        """Take a network that has converged; it is worth keeping at once."""
        flat = plateau(one.accuracy, warm_up) or stopped(one.accuracy, warm_up)
        measures = _criterion(one.accuracy, flat, warm_up, one.nonzeros)
        outcomes[number] = TrialResult(trials[number], measures, 0.0)
        if on_outcomes is not None:
            taken = (time.perf_counter() - begin) / len(outcomes)
            on_outcomes([replace(outcomes[number], seconds=taken)])

    _behind_backbones(
        trials,
        {"converged": Dense()},
        device,
        arrays,
        fine_tune=limit(warm_up) - warm_up,
        enough=lambda curve: plateau(curve, warm_up) is not None,
        progress=on_steps,
        on_trained=finished,
    )
    return [outcomes[number] for number in range(len(trials))]


def _criterion(
    curve: Sequence[float], flat: Plateau, warm_up: int, weights: int
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
        """Count the epochs, of all networks together."""
        self._done += epochs
        if self._tell is not None:
            self._tell(self._done / self._epochs)


def bank_arm(arm: Arm, network: Trial) -> BankArm:
    """Return what a bank calls an arm of a trial."""
    match arm.split:
        case "dense":
            return Dense()
        case "dropconnect":
            return DropConnect(arm.alpha)
        case "dynamic":
            return Dynamic(arm.alpha, every=arm.every, fraction=arm.fraction, grow=arm.grow)
        case _:
            return Expand(arm.alpha, _split(arm, network), moments=arm.moments)


def _split(arm: Arm, network: Trial) -> Split:
    if arm.split == "clause":
        assert isinstance(network.task, Boolean)
        return Clauses(network.task.size)
    return Gram(arm.clusters) if arm.split == "gram" else resolve_split(arm.split)


# --- behind a convolutional backbone


def _convolutional(
    trials: Sequence[Trial],
    device: str,
    on_steps: OnSteps | None,
    on_outcomes: OnOutcomes | None,
    arrays: Arrays | None,
) -> list[TrialResult]:
    networks, arms = _grid(trials)
    wanted = {(trial.network(), repr(trial.arm)): trial for trial in trials}
    outcomes: list[TrialResult] = []
    begin = time.perf_counter()

    def finished(number: int, arm: str, one: Trained) -> None:
        """Take a network of one arm; once it has all its arms, it is worth keeping.

        On a GPU a warm-up that is done again is not the same to the last bit: arms that are
        compared must come from one.
        """
        network = networks[number]
        outcomes.append(_behind_backbone(wanted[network, arm], one))
        own = [found for found in outcomes if _network_of(found) == network]
        if len(own) == len(arms) and on_outcomes is not None:
            taken = time.perf_counter() - begin
            on_outcomes([replace(found, seconds=taken / len(outcomes)) for found in own])

    _behind_backbones(
        networks,
        {repr(arm): bank_arm(arm, networks[0]) for arm in arms},
        device,
        arrays,
        fine_tune=networks[0].fine_tune,
        progress=on_steps,
        on_trained=finished,
    )
    return sorted(outcomes, key=lambda one: trials.index(one.work))


def _behind_backbones(
    networks: Sequence[Trial],
    arms: dict[str, BankArm],
    device: str,
    arrays: Arrays | None,
    **how: Any,
) -> list[dict[str, Trained]]:
    """Train networks of one task and recipe behind their backbones."""
    from fissile.bank import vision

    first, held = networks[0], load(_images(networks[0]), arrays)
    return vision.train(
        [vision.Network(_images(one).projection, one.neurons, one.number) for one in networks],
        vision.Images(*map(torch.tensor, (held.x, held.y, held.x_test, held.y_test))),
        arms,
        recipe=first.recipe,
        warm_up=first.warm_up,
        mirror=_images(first).mirror,
        device=device,
        **how,
    )


def _network_of(outcome: TrialResult) -> Work:
    return outcome.work.network()


def _images(trial: Trial) -> Images:
    assert isinstance(trial.task, Images)
    return trial.task


def _behind_backbone(trial: Trial, one: Trained) -> TrialResult:
    measures = {
        "accuracy": _last(one.accuracy),
        "best": max(filter(isfinite, one.accuracy), default=nan),
        "warm": one.accuracy[trial.warm_up - 1] if trial.warm_up else nan,
        "nonzeros": float(one.nonzeros),
        "diverged": float(one.diverged),
    }
    arrays = {"curve": torch.tensor(one.accuracy)} if trial.pictures else {}
    return TrialResult(trial, measures, 0.0, arrays)


def _last(curve: Sequence[float]) -> float:
    """Return the accuracy after the last epoch that a network finished."""
    return next((value for value in reversed(curve) if isfinite(value)), nan)


def sampled(work: Sampling) -> dict[str, float]:
    """Return the closed forms, and what sampled networks come to."""
    net = work.formula
    seen = net.simulate(work.networks, seed=work.number)
    measures = {
        "coverage": net.coverage,
        "coverage_bound": net.coverage_bound,
        "coverage_approx": net.coverage_approx,
        "coverage_simulated": seen.coverage,
        "coverage_error": seen.coverage_error,
        "collision_ratio": net.collision_ratio,
        "collision_ratio_approx": net.collision_ratio_approx,
        "collision_ratio_simulated": seen.collisions / net.collisions_dense,
        "collision_ratio_error": seen.collisions_error / net.collisions_dense,
    }
    width = required_width(work.eps, work.literals, work.size, work.alpha)
    return measures | {
        "width": width.exact,
        "width_bound": width.bound,
        "width_approx": width.approx,
    }
