"""An experiment of the page comes to the numbers of the bank, to the digit."""

import json
from math import comb

import pytest
import torch

from fissile.bank import Bank, Data, Spec
from fissile.bank.loop import accuracy
from fissile.data import dnf_task
from fissile.lab.stats import interval
from fissile.measure import total_capacity
from fissile.measure.theory import RandomSparse
from fissile.play import Settings, events
from fissile.play.settings import python

SMALL = {"samples": 600, "trials": 3, "warm_up": 2, "fine_tune": 3}
SEVERAL = [
    Settings(**SMALL),
    Settings(**SMALL, seed=7, splits=("gram", "n:m", "overlapping"), moments="fresh", epoch="best"),
    Settings(**SMALL, clauses=3, alpha=4, size=5, negatives="flip", others="arbitrary", l2=1e-3,
             orthogonal=1e-4, look=3),
    Settings("digits", **SMALL, neurons=4, splits=("random",), look=2),
]  # fmt: skip


def by_kind(settings):
    found = [event for event in events(settings) if event is not None]
    json.dumps(found, allow_nan=False)
    return {event["kind"]: event for event in found}, found


@pytest.mark.parametrize("settings", SEVERAL, ids=lambda one: f"{one.task}-{'-'.join(one.splits)}")
def test_the_python_lines_make_the_same_accuracies_to_the_digit(settings, capsys):
    last, found = by_kind(settings)
    space = {}
    exec(python(settings), space)
    for place, (name, values) in enumerate(last["done"]["accuracy"].items()):
        assert name == list(settings.arms())[place]
        assert values == [round(value, 6) for value in space["accuracy"][:, place].tolist()]
    arms, bank = space["arms"], space["bank"]
    assert last["split"]["nonzeros"]["dense"] == bank.nonzeros.tolist()
    assert [sum(v) for v in last["split"]["nonzeros"].values()] == [sum(bank.nonzeros.tolist())] * (
        1 + len(settings.splits)
    )
    curves = {name: [] for name in settings.arms()}
    for event in found:
        if event["kind"] == "epochs":
            for name, rows in event["accuracy"].items():
                curves[name] += list(zip(*rows, strict=True))
    whole = torch.cat([bank.accuracy, arms.accuracy[:: 1 + len(settings.splits)]], 1)
    exact = [[round(value, 6) for value in epoch] for epoch in whole.T.tolist()]
    assert list(map(list, curves["dense"])) == exact
    assert len(curves[f"{settings.splits[0]}-{settings.alpha}"]) == settings.fine_tune
    assert capsys.readouterr().out


def test_the_drop_at_the_split_is_that_of_the_branched_networks():
    settings = SEVERAL[0]
    seen = by_kind(settings)[0]["split"]
    specs = []
    for seed in range(3):
        train, test = dnf_task(8, 4, train=600, test=2000, seed=seed)
        specs.append(Spec([32, 8, 1], Data(train.x, train.y, test.x, test.y), seed=seed))
    bank = Bank(specs)
    bank.train(until=2)
    arms = bank.branch(settings.arms())
    for row in range(9):
        data, name = arms.members[row].spec.data, arms.members[row].name
        exact = accuracy(arms.take(row)[0], data.x_test, data.y_test)
        assert seen["accuracy"][name][row // 3] == pytest.approx(exact, abs=1.5e-3)
    capacity = arms.measure(lambda group: total_capacity(group.w1, torch.arange(32) // 4))
    shown = [seen["measures"]["capacity"][arms.members[row].name][row // 3] for row in range(9)]
    assert shown == pytest.approx(capacity.tolist(), abs=2e-6)


@pytest.mark.parametrize("settings", SEVERAL, ids=lambda one: f"{one.task}-{'-'.join(one.splits)}")
def test_what_was_dealt_holds_what_is_kept(settings):
    seen = by_kind(settings)[0]
    network = seen["split"]["network"]
    for name, part in network["arms"].items():
        kept = [[bit == "1" for bit in row] for row in part["kept"]]
        assert len(kept) == settings.neurons * settings.alpha
        left = sum(map(sum, kept)) + sum(row.count("1") for row in part["kept2"])
        assert left == seen["split"]["nonzeros"][name][settings.look - 1]
        weights = seen["done"]["weights"][name]["w1"]
        assert all(w == 0 for row, bits in zip(weights, kept, strict=True)
                   for w, bit in zip(row, bits, strict=True) if not bit)  # fmt: skip
        assert (part["dealt"] is None) == name.startswith("overlapping")
        for child, row in enumerate(kept):
            if part["dealt"] is not None:
                owners = part["dealt"][child // settings.alpha]
                assert all(owners[j] == child % settings.alpha for j, bit in enumerate(row) if bit)


def test_differences_are_paired_and_measured_beside_theory():
    settings = Settings(**SMALL | {"trials": 5})
    seen = by_kind(settings)[0]
    values = seen["done"]["accuracy"]
    gains = [100 * (a - b) for a, b in zip(values["clause-2"], values["dense"], strict=True)]
    mean, low, high, p = seen["done"]["differences"]["clause-2"]
    assert mean == pytest.approx(sum(gains) / 5, abs=1e-3)
    assert (low, high) == pytest.approx(interval(gains), abs=1e-3)
    assert 0 <= p <= 1
    theory, net = seen["begin"]["theory"], RandomSparse(32, 4, 8, 2)
    assert theory["coverage"] == net.coverage
    assert theory["collisions"] == net.collision_ratio
    clause, chance = (seen["split"]["covered"][name]["dealt"] for name in ("clause-2", "random-2"))
    assert clause["clauses"] == clause["trials"] == 1
    # A child has 4 of 8 clauses, so of its parent's pairs the two children have 2 * C(4, 2).
    assert clause["collisions"] == pytest.approx(2 * comb(4, 2) / comb(8, 2))
    assert chance["clauses"] == pytest.approx(theory["clauses"], abs=0.2)


def test_mistakes_are_mistakes():
    settings = Settings(**SMALL)
    done = by_kind(settings)[0]["done"]
    assert done["mistakes"]["samples"]
    for sample in done["mistakes"]["samples"]:
        for name, net in done["weights"].items():
            w1, b1, w2, b2 = (torch.tensor(net[key]) for key in ("w1", "b1", "w2", "b2"))
            logit = w2 @ (w1 @ torch.tensor(sample["x"]) + b1).relu() + b2
            if abs(float(logit)) > 0.01:
                assert (int(logit > 0) != sample["y"]) == (name in sample["wrong"])


def test_training_comes_in_parts_that_change_nothing(monkeypatch):
    whole = by_kind(SEVERAL[0])[0]["done"]
    monkeypatch.setattr("fissile.play.experiment.TURN", 0.0)
    parts, found = by_kind(SEVERAL[0])
    assert sum(event["kind"] == "epochs" for event in found) == 5
    for name in ("accuracy", "differences", "measures", "weights", "mistakes"):
        assert parts["done"][name] == whole[name]


def test_one_trial_has_no_interval():
    seen = by_kind(Settings(**SMALL | {"trials": 1}))[0]["done"]
    assert seen["differences"]["clause-2"][1:] == [None, None, None]


def test_samples_are_kept_within_bounds(monkeypatch):
    from fissile.play import experiment

    monkeypatch.setattr(experiment, "KEPT", 3 * 600 * 32)
    drawn = experiment._Drawn()
    for seed in range(6):
        drawn.of(SEVERAL[0], seed)
    assert len(drawn._kept) == 3
    assert drawn.of(SEVERAL[0], 5) is drawn.of(SEVERAL[0], 5)
