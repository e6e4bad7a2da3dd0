"""One experiment as a stream of events: curves as they grow, the split, measures, networks.

>>> [event["kind"] for event in events(Settings(samples=500, warm_up=1, fine_tune=1))]
['begin', 'epochs', 'split', 'epochs', 'done']
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import comb, isfinite
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from fissile import measure
from fissile._common.cores import cores
from fissile._common.errors import FissileError
from fissile._common.random import seeded
from fissile._common.shapes import Bool
from fissile.bank import Bank, Data, Expand, Group, Spec
from fissile.bank.stack import linear_layers
from fissile.bank.step import guess
from fissile.data import Formula, Samples, dnf_task
from fissile.lab.stats import compare, interval
from fissile.layers import owner_mask, weight_of
from fissile.measure.interference import collided
from fissile.measure.theory import RandomSparse, required_width
from fissile.play.pictures import classes, pictures
from fissile.play.settings import NUMBERS, TEST, Settings, python

#: What an experiment tells: plain values, ready to be written as JSON.
Event = dict[str, Any]
#: Seconds of training between two events, about: so long may another experiment have to wait.
TURN = 0.05
#: Training numbers kept for the next experiment.
KEPT = NUMBERS // 2
#: Samples shown of each kind: the dense network wrong, a split one, or both.
SHOWN = 6


def events(settings: Settings) -> Generator[Event | None]:
    """Yield what becomes of an experiment as it is computed; None is a pause without news.

    >>> last = list(events(Settings(samples=500, warm_up=1, fine_tune=1)))[-1]
    >>> len(last["accuracy"]["clause-2"])
    10

    Whoever stops asking has cancelled it. The accuracies are those of ``fissile.bank`` called
    directly: training in parts changes no digit.
    """
    begin = time.perf_counter()
    yield {
        "kind": "begin", "settings": settings.changed(), "arms": list(settings.arms()),
        "trials": settings.trials, "warm_up": settings.warm_up,
        "epochs": settings.warm_up + settings.fine_tune, "theory": _theory(settings),
    }  # fmt: skip
    run = _Run(settings)
    yield from run.prepare()
    bank = run.bank
    yield from run.train(bank, settings.warm_up, ["dense"])
    arms = bank.branch(settings.arms())
    yield run.split(bank, arms)
    yield from run.train(arms, settings.warm_up + settings.fine_tune, list(settings.arms()))
    yield run.done(arms) | {"seconds": time.perf_counter() - begin}


class _Run:
    """The data and networks of one experiment."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.names = settings, list(settings.arms())
        self.tests: list[Samples] = []
        self.sets: list[Data] = []

    @property
    def seeds(self) -> range:
        return range(self.settings.seed, self.settings.seed + self.settings.trials)

    def prepare(self) -> Iterator[None]:
        """Draw every trial's samples, and the networks."""
        settings = self.settings
        if settings.boolean:
            with ThreadPoolExecutor(cores()) as pool:
                for start in range(0, len(self.seeds), cores()):
                    part = self.seeds[start : start + cores()]
                    for data, test in pool.map(partial(_drawn.of, settings), part):
                        self.sets.append(data)
                        self.tests.append(test)
                    yield None
        else:
            self.sets = [pictures(settings.task, settings.samples)] * settings.trials
        shape = [settings.inputs, settings.neurons, settings.outputs]
        self.bank = Bank(
            [
                Spec(shape, data, seed=seed, recipe=settings.recipe())
                for data, seed in zip(self.sets, self.seeds, strict=True)
            ]
        )

    # --- training

    def train(self, bank: Bank, until: int, names: list[str]) -> Iterator[Event]:
        """Train some epochs at a time, and tell their accuracies."""
        first = epoch = self.settings.warm_up if bank is not self.bank else 0
        step = 1  # the first curve comes soon
        while epoch < until:
            since = time.perf_counter()
            bank.train(until=epoch + step)
            each = (time.perf_counter() - since) / step
            curves = bank.accuracy[:, epoch - first : epoch - first + step]
            yield {
                "kind": "epochs", "from": epoch,
                "accuracy": self._by_arm(curves.tolist(), names),
                "measures": self._measures(bank, names, full=False),
                "differences": self._differences(bank.last.tolist(), names),
            }  # fmt: skip
            epoch += step
            # On a busy machine turns are longer: shorter ones would only cost more.
            each = min(each, self.settings.epoch_seconds * len(names))
            step = min(max(1, int(TURN / each)), until - epoch)

    def split(self, bank: Bank, arms: Bank) -> Event:
        """Tell what the split has done: the drop, the weights that are left, the networks."""
        dropped = arms.measure(self._tested)
        return {
            "kind": "split",
            "accuracy": self._by_arm(dropped.tolist(), self.names),
            "nonzeros": self._by_arm(arms.nonzeros.tolist(), self.names),
            "measures": self._measures(arms, self.names),
            "covered": self._covered(bank, arms),
            "network": self._network(bank, arms),
        }

    def done(self, arms: Bank) -> Event:
        """Tell the accuracies, measures, networks and mistakes at the end."""
        final = (arms.best if self.settings.epoch == "best" else arms.last).tolist()
        row = (self.settings.look - 1) * len(self.names)
        taken = [arms.take(row + place)[0] for place in range(len(self.names))]
        return {
            "kind": "done",
            "accuracy": self._by_arm(final, self.names),
            "differences": self._differences(final, self.names),
            "measures": self._measures(arms, self.names),
            "diverged": len(arms.diverged),
            "weights": dict(zip(self.names, map(_weights, taken), strict=True)),
            "mistakes": self._mistakes(taken),
            "python": python(self.settings),
        }

    # --- numbers

    def _by_arm(self, rows: Sequence[Any], names: list[str]) -> dict[str, list[Any]]:
        """Return rows of a bank by arm, trial by trial; NaN is None."""
        count = len(names)
        return {name: _plain(list(rows[place::count])) for place, name in enumerate(names)}

    def _differences(self, values: list[float], names: list[str]) -> dict[str, Any]:
        """Return each arm's paired gain over the dense one, in points, and its interval."""
        count, found = len(names), {}
        for place, name in enumerate(names[1:], start=1):
            pairs = list(zip(values[place::count], values[::count], strict=True))
            gains = [100 * (one - other) for one, other in pairs]
            low, high = interval(gains)
            test = compare(gains, [0.0] * len(gains))
            found[name] = _plain([test.difference, low, high, test.p])
        return found

    def _measures(self, bank: Bank, names: list[str], full: bool = True) -> dict[str, Any]:
        """Return each measure's values by arm; collisions take longest, and come at the end."""
        found = {"cosine": bank.measure(lambda group: measure.cosine(group.w1, absolute=True))}
        if self.settings.boolean:
            groups = self._formula.groups
            found["capacity"] = bank.measure(lambda g: measure.total_capacity(g.w1, groups))
            if full:
                found["collisions"] = bank.measure(self._collisions)
                found["codes"] = bank.measure(self._coded).double()
        return {key: self._by_arm(value.tolist(), names) for key, value in found.items()}

    @property
    def _formula(self) -> Formula:
        return Formula(self.settings.clauses, self.settings.size)

    def _collisions(self, group: Group) -> Tensor:
        rates = []
        for row, spec in enumerate(group.specs):
            test, bias = self.tests[spec.seed - self.settings.seed], group.biases[0]
            assert bias is not None
            on = self._formula.satisfied(test.bits)
            usage = measure.edge_usage(group.w1[row], bias[row], test.x, test.bits, on)
            rates.append(collided(usage, 0.5))
        return torch.stack(rates)

    def _coded(self, group: Group) -> Tensor:
        out, bias = group.weights[1][..., 0, :], group.biases[0]
        assert bias is not None
        return measure.coded_clauses(group.w1, bias, out, self._formula.groups)

    def _tested(self, group: Group) -> Tensor:
        """Return the share of test samples that each network gets right."""
        rates = []
        for row, spec in enumerate(group.specs):
            x = torch.as_tensor(spec.data.x_test)
            for place, (weight, bias) in enumerate(zip(group.weights, group.biases, strict=True)):
                assert bias is not None
                x = (x.relu() if place else x) @ weight[row].T + bias[row]
            rates.append((guess(x) == spec.data.y_test).double().mean())
        return torch.stack(rates)

    # --- what was dealt, and one trial's networks

    def _covered(self, bank: Bank, arms: Bank) -> dict[str, Any]:
        """Return how often children see whole clauses, as dealt and after pruning back."""
        if not self.settings.boolean:
            return {}
        found = {}
        for place, (name, arm) in enumerate(self.settings.arms().items()):
            if isinstance(arm, Expand):
                own = arms.select(range(place, len(arms), len(self.names)))
                kept = own.measure(lambda group: group.w1 != 0)
                dealt = self._dealt(bank, arm)
                masks = {"dealt": kept if dealt is None else owner_mask(dealt, arm.alpha)}
                masks["kept"] = kept
                found[name] = {key: self._seen(mask) for key, mask in masks.items()}
        return found

    def _dealt(self, bank: Bank, arm: Expand) -> Tensor | None:
        """Return every trial's owners before pruning; None where children share inputs."""
        if not arm.split.disjoint:
            return None
        w1 = bank.measure(lambda group: group.w1)
        return arm.split.deal(w1, arm.alpha, seeded(torch.tensor(self.seeds)))

    def _seen(self, mask: Bool[Tensor, "trials children inputs"]) -> dict[str, float]:
        """Return the shares of clauses and of trials covered, and collisions over dense ones."""
        formula = self._formula
        whole = mask.unflatten(-1, (formula.clauses, formula.size)).all(-1)
        clauses, each = whole.any(1), whole.sum(-1).double()
        pairs = (each * (each - 1) / 2).sum(-1).mean()
        return {
            "clauses": float(clauses.double().mean()),
            "trials": float(clauses.all(-1).double().mean()),
            "collisions": float(pairs) / (self.settings.neurons * comb(formula.clauses, 2)),
        }

    def _network(self, bank: Bank, arms: Bank) -> Event:
        """Return the networks of the trial that is looked at: who owns what, and what is left."""
        look, made = self.settings.look - 1, {}
        for place, (name, arm) in enumerate(self.settings.arms().items()):
            if isinstance(arm, Expand):
                first, second = linear_layers(arms.take(look * len(self.names) + place)[0])
                dealt = self._dealt(bank, arm)
                made[name] = {
                    "alpha": arm.alpha,
                    "dealt": None if dealt is None else dealt[look].tolist(),
                    "kept": _bits(weight_of(first) != 0),
                    "kept2": _bits(weight_of(second) != 0),
                }
        return {"dense": _weights(bank.take(look)[0]), "arms": made}

    def _mistakes(self, taken: list[nn.Module]) -> Event:
        """Return how many test samples each network gets wrong, and some where they differ."""
        data = self.sets[self.settings.look - 1]
        x = torch.as_tensor(data.x_test)
        with torch.no_grad():
            wrong = torch.stack([guess(net.eval()(x)) != data.y_test for net in taken])
        counts = {name: int(row.sum()) for name, row in zip(self.names, wrong, strict=True)}
        shown = dict.fromkeys(
            number
            for other in wrong[1:]
            for kind in (wrong[0] & ~other, wrong[0] & other, ~wrong[0] & other)
            for number in kind.nonzero().flatten()[:SHOWN].tolist()
        )
        samples = [
            {
                "x": _plain(x[number].tolist(), 3), "y": int(data.y_test[number]),
                "wrong": [name for name, row in zip(self.names, wrong, strict=True) if row[number]],
            }
            for number in shown
        ]  # fmt: skip
        names = classes(self.settings.task)
        return {"of": len(x), "counts": counts, "samples": samples, "classes": names}


class _Drawn:
    """The samples of formulas, kept for the next experiment as far as memory allows."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], tuple[Data, Samples]] = OrderedDict()
        self._lock = Lock()

    def of(self, settings: Settings, seed: int) -> tuple[Data, Samples]:
        """Return a trial's data and its test samples."""
        how = settings.clauses, settings.size, settings.samples, settings.negatives, settings.others
        with self._lock:
            if (*how, seed) in self._kept:
                self._kept.move_to_end((*how, seed))
                return self._kept[*how, seed]
        train, test = dnf_task(
            settings.clauses, settings.size, train=settings.samples, test=TEST, seed=seed,
            negatives=settings.negatives, others=settings.others,  # type: ignore[arg-type]
        )  # fmt: skip
        made = Data(train.x, train.y, test.x, test.y), test
        with self._lock:
            self._kept[*how, seed] = made
            while sum(len(data.y) * data.inputs for data, _ in self._kept.values()) > KEPT:
                self._kept.popitem(last=False)
        return made


_drawn = _Drawn()


def _theory(settings: Settings) -> dict[str, float | None]:
    """Return the closed forms for a random split with these settings."""
    if not settings.boolean:
        return {}
    net = RandomSparse(settings.inputs, settings.size, settings.neurons, settings.alpha)
    try:
        needed: float | None = required_width(
            0.05, settings.inputs, settings.size, settings.alpha
        ).exact
    except FissileError:  # a child sees fewer literals than a clause has
        needed = None
    return {
        "coverage": net.coverage,
        "coverage_approx": max(0.0, net.coverage_approx),
        "clauses": 1 - (1 - net.covers()) ** net.children,
        "collisions": net.collision_ratio,
        "collisions_approx": net.collision_ratio_approx,
        "needed": needed,
    }


def _weights(network: nn.Module) -> Event:
    """Return a network's weights and biases, with zeros where no weight is."""
    first, second = linear_layers(network)
    found = {"w1": weight_of(first), "w2": weight_of(second)}
    found |= {"b1": first.get_parameter("bias"), "b2": second.get_parameter("bias")}
    digits = 6 if weight_of(first).numel() < 5_000 else 4  # so many that nobody sees more
    return {name: _plain(tensor.tolist(), digits) for name, tensor in found.items()}


def _bits(mask: Tensor) -> list[str]:
    return ["".join(map(str, row)) for row in mask.int().tolist()]


def _plain(value: Any, digits: int = 6) -> Any:
    """Return plain values for JSON: rounded, and None for what is no number."""
    if isinstance(value, list):
        return [_plain(one, digits) for one in value]
    return round(value, digits) if isfinite(value) else None
