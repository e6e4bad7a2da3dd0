"""The frontier in the lab: contenders, their keys, and the contest that chooses and tests them."""

from dataclasses import asdict, replace

import numpy as np
import pandas
import pytest
import torch
from data_files import features

import fissile
from fissile._common.errors import FissileError
from fissile.bank.sparse import train
from fissile.data.sets import Labelled
from fissile.lab import classifier
from fissile.lab.batching import batches
from fissile.lab.budget_methods import ABLATED, CONTENDERS, METHODS, OURS, SETTINGS
from fissile.lab.claims import Leads
from fissile.lab.classifier import contest
from fissile.lab.compute import TrialResult, compute
from fissile.lab.report import _settings
from fissile.lab.results import load
from fissile.lab.run import run
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import STUDIES, find
from fissile.lab.studies.frontier import ABLATIONS, FRONTIERS
from fissile.lab.task import HELD_OUT, Features, source
from fissile.lab.trial import SEARCHED, Contender, from_spec

TASK = Features("generated")  # 64 inputs, 20 classes


def contender(method="dense", neurons=4, **changes):
    return Contender(TASK, neurons, method, epochs=2, batch=16, **changes)


@pytest.fixture
def few(monkeypatch):
    """Two hundred samples instead of the two thousand that the set has."""
    return seen(monkeypatch, features(200, 100, 64, 20, np.float32))


def seen(monkeypatch, data: Labelled):
    monkeypatch.setattr(classifier, "load", lambda task, arrays=None: data)
    return data


# --- contenders


@pytest.mark.parametrize("data", ["generated", "fashionmnist", "clinc150-minilm"])
@pytest.mark.parametrize("neurons", [1, 8])
def test_a_budget_is_what_the_dense_network_has(data, neurons):
    one = Contender(Features(data), neurons)
    dense = fissile.MLP([one.inputs, neurons, one.task.outputs])
    assert one.budget == fissile.nonzeros(dense).all


DIFFERENT = [
    contender(),
    contender("fpe-4"),
    contender("fpe-4-again"),
    contender(neurons=5),
    contender(number=1),
    replace(contender(), epochs=3),
    replace(contender(), batch=8),
    replace(contender(), task=Features("generated", classes=5)),
    replace(contender(), task=Features("generated", fingerprint="0123456789abcdef")),
    replace(contender(), task=Features("fashionmnist")),
]


def test_a_key_hangs_on_everything_that_decides_the_result():
    assert len({one.key for one in DIFFERENT}) == len(DIFFERENT)
    named = replace(TASK, encoder="timm:resnet18")
    assert replace(contender(), task=named).key == contender().key  # the arrays decide


def test_keys_are_for_ever():
    # Until a method's plans change: those are part of them.
    assert contender().key == "467e26fd6c74a97fd8c83cfd7187bb21"
    assert contender(OURS).key == "33b52f1a1592e49772e303d8c54ab9dc"


def test_other_plans_of_a_method_are_other_results(monkeypatch):
    before = contender("l1").key, contender("dense").key
    plans = METHODS["l1"]
    monkeypatch.setitem(
        METHODS, "l1", lambda *sizes: [replace(one, lr=one.lr / 2) for one in plans(*sizes)]
    )
    assert contender("l1").key != before[0]
    assert contender("dense").key == before[1]


@pytest.mark.parametrize("one", DIFFERENT, ids=lambda one: one.key[:6])
def test_a_contender_comes_back_from_its_stored_form(one):
    assert from_spec(one.kind, asdict(one)) == one


def test_a_contender_is_a_row_of_a_table():
    assert contender("rigl", number=3).columns() == {
        "data": "generated", "encoder": "none", "classes": 20, "validation": False,
        "scaling": "raw", "neurons": 4, "budget": 360, "epochs": 2, "arm": "rigl", "trial": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "there is no method 'magic'; there are dense, fpe-2"),
        ({"neurons": 0}, "neurons=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"number": -1}, "number=-1"),
        ({"number": SEARCHED[0]}, "number=1000000 is kept for searching"),
    ],
)
def test_what_cannot_be_a_contender(changes, message):
    with pytest.raises(FissileError, match=message):
        replace(contender(), **changes)


def test_every_method_has_six_settings_to_choose_from():
    for study in FRONTIERS:
        for cell in study.scales["paper"].settings[:: len(CONTENDERS)]:
            for method in METHODS:
                plans = replace(cell, method=method).plans
                assert len(plans) == SETTINGS == 6, method
                assert {plan.budget for plan in plans} == {cell.budget}
                if method in CONTENDERS:  # without a choice of the recipe's, two may be the same
                    assert len(set(plans)) == SETTINGS, method


# --- the contest


def by_hand(one, data):
    """Search six plans on held-out samples, and test the best: without the contest."""

    def accuracies(plans, seeds, part):
        part = part.flat()
        scale = float(torch.tensor(part.x).std())
        x, x_test = (torch.tensor(array) / scale for array in (part.x, part.x_test))
        y, y_test = (torch.tensor(array).long() for array in (part.y, part.y_test))
        found = []
        for plan in plans:  # each alone
            [(stack, _)] = train([plan], seeds, x, y, outputs=20, epochs=2, batch=16)
            found.append(stack.accuracy(x_test, y_test).mean().item())
        return found

    held_out = accuracies(one.plans, SEARCHED, data.held_out(HELD_OUT))
    best = int(np.argmax(held_out))
    return held_out, accuracies([one.plans[best]], [one.number], data)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "rigl", OURS])
def test_the_best_setting_on_held_out_samples_is_tested_once(method, few):
    one = contender(method, number=7)
    held_out, accuracy = by_hand(one, few)
    found = contest([one])[one]
    assert held_out[int(found["setting"])] == pytest.approx(max(held_out))
    assert found["held_out"] == pytest.approx(max(held_out))
    assert found["accuracy"] == pytest.approx(accuracy)
    assert len(set(held_out)) > 1  # there was something to choose


def test_the_search_never_sees_a_test_sample(few, monkeypatch):
    works = [contender(method) for method in ("dense", "l1", OURS)]
    usual = contest(works)
    trained = []

    def watched(plans, seeds, x, y, **ways):
        trained.append((tuple(seeds), len(x)))
        return train(plans, seeds, x, y, **ways)

    monkeypatch.setattr(classifier, "train", watched)
    seen(monkeypatch, replace(few, x_test=-1e6 * few.x_test, y_test=few.y_test[::-1].copy()))
    found = contest(works)
    assert trained == [(SEARCHED, 180), ((0,), 200)]
    for one in works:
        assert all(found[one][name] == usual[one][name] for name in ("setting", "held_out"))
    assert [found[one]["accuracy"] for one in works] != [usual[one]["accuracy"] for one in works]


@pytest.mark.slow
def test_trials_computed_together_or_apart_come_to_the_same(few):
    works = [contender(method, number=n) for method in ("fpe-4", "set", OURS) for n in (0, 1, 5)]
    together = contest(works)
    assert len({one["accuracy"] for one in together.values()}) > 3
    for one in works[::2]:
        assert contest([one])[one] == together[one]


@pytest.mark.slow
def test_no_method_exceeds_its_budget(few):
    works = [contender(method) for method in METHODS]
    found = contest(works)
    assert len(found) == 33
    for one in works:
        assert 20 < found[one]["nonzeros"] <= one.budget, one.method
        assert 0 <= found[one]["accuracy"] <= 1
    exact = [one.method for one in works if found[one]["nonzeros"] == one.budget]
    assert {"dense", "fpe-2", "fpe-16", "set", "rigl"} <= set(exact)


def test_some_classes_are_fewer_outputs(few):
    one = replace(contender("l1"), task=Features("generated", classes=5))
    assert one.budget == 4 * (64 + 1 + 5) + 5
    assert contest([one])[one]["nonzeros"] <= one.budget


def test_computing_says_how_far_it_is_and_shares_out_the_time(few):
    works, shares = [contender(), contender("gradual")], []
    outcomes = compute(works, on_steps=shares.append)
    assert [one.work for one in outcomes] == works
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0])
    costs = [one.seconds / one.work.cost for one in outcomes]
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.slow
def test_contenders_of_one_data_set_are_trained_side_by_side():
    works = STUDIES["frontier-coarse"].works("paper")
    assert len(batches(works, cost=float("inf"))) == 1
    parts = batches(works, cost=0.0)
    assert {len(part) for part in parts} == {10}  # the trials of a cell share its search
    assert len(batches([*works, *STUDIES["frontier-clinc150"].works("paper")], 1e12)) == 2


def test_contenders_are_stored_and_found_again(few, tmp_path):
    works = [contender(number=number) for number in range(2)]
    with Store(tmp_path) as store:
        assert run(works[:1], store).computed == 1
        assert run(works, store).computed == 1
        rows = store.rows([one.key for one in works])
    assert all(row.measures["nonzeros"] == 360 for row in rows)
    assert rows[0].measures["setting"] == rows[1].measures["setting"]
    assert rows[0].measures["held_out"] == rows[1].measures["held_out"]


# --- studies and claims


def test_the_frontier_is_found_by_one_name():
    assert find(["frontier"]) == list(FRONTIERS)
    assert find(["ablation", "codes"]) == [*ABLATIONS, STUDIES["codes"]]
    assert len(FRONTIERS) == len(ABLATIONS) == 5
    for study in FRONTIERS:
        works = study.works("paper")
        assert len(works) == 6 * 15 * 10
        assert {one.method for one in works} == set(CONTENDERS)
        budgets = sorted({one.budget for one in works})
        assert budgets == pytest.approx([1e3, 2.5e3, 6.3e3, 16e3, 40e3, 100e3], rel=0.3)
    for study in ABLATIONS:
        assert {one.method for one in study.works("paper")} == {OURS, "fpe-4", "fpe-16", *ABLATED}


def made_up(gains, trials=6):
    """A table in which the recipe is so much better than the best other in each cell."""
    rng = np.random.default_rng(0)
    rows = []
    for neurons, gain in enumerate(gains, 1):
        for trial in range(trials):
            shared = rng.normal()
            for arm, above in (("recipe", gain), ("l1", 0.0), ("dense", -5.0)):
                value = 50 + above + shared + 0.1 * rng.normal()
                rows.append({"neurons": neurons, "arm": arm, "trial": trial, "accuracy": value})
    return pandas.DataFrame(rows)


LEADS = Leads("recipe", ("dense", "l1"))


@pytest.mark.parametrize(
    ("gains", "status"),
    [
        ((1.0, 1.0, 1.0, 1.0), "holds"),
        ((1.0, 1.0, 0.0, 0.0), "holds"),
        ((1.0, 0.0, 0.0, 0.0), "not significant"),
        ((0.0, 0.0, 0.0, 0.0), "not significant"),
        ((1.0, 1.0, 1.0, -1.0), "fails"),
        ((-1.0, -1.0, -1.0, -1.0), "fails"),
    ],
)
def test_leading_is_to_be_nowhere_worse_and_better_in_half(gains, status):
    assert LEADS(made_up(gains)).status == status


def test_leading_is_judged_against_the_best_other():
    verdict = LEADS(made_up((1.0, -1.0)))
    assert "better than the best other in 1 of 2 cells, worse in 1" in verdict.numbers
    assert "against l1 at neurons = 2" in verdict.numbers
    table = made_up((1.0,))
    table.loc[table["arm"] == "dense", "accuracy"] += 10
    verdict = LEADS(table)
    assert "against dense at neurons = 1" in verdict.numbers
    assert verdict.status == "fails"


@pytest.mark.parametrize("arms", [(), ("recipe",), ("dense", "l1")])
def test_leading_nobody_is_no_data(arms):
    table = made_up((1.0, 1.0))
    assert LEADS(table[table["arm"].isin(arms)]).status == "no data"
    assert LEADS(pandas.DataFrame()).status == "no data"


def test_one_trial_leads_nobody():
    assert LEADS(made_up((5.0, 5.0), trials=1)).status == "not significant"


# --- results


def results_of(tmp_path, study, scale="smoke", **changes):
    """Every trial of a study, with invented numbers."""
    works = STUDIES[study].works(scale, None, changes)
    outcomes = [TrialResult(one, {"accuracy": 0.5, "nonzeros": 9.0}, 1.0) for one in works]
    here = Provenance.here("cpu")
    with Store(tmp_path) as store:
        store.add(outcomes, here)
        return load(store, Run(study, scale, None, changes, "fissile run"))


COARSE = "cifar100-coarse-efficientnet-lite2"


@pytest.mark.parametrize(
    ("study", "changes", "told"),
    [
        ("frontier-coarse", {}, "EfficientNet-Lite2"),
        ("frontier-fashionmnist", {}, ""),
        ("frontier-fashionmnist", {"data": "generated", "classes": 2}, "generated"),
        ("frontier-clinc150", {"encoder": "timm:bert"}, "timm:bert"),
        ("frontier-clinc150", {"data": "banking77-minilm"}, "banking77 through all-MiniLM"),
        ("cifar100", {"data": "cifar100-efficientnet-lite2"}, "EfficientNet-Lite2"),
        ("cifar100", {"data": COARSE}, "cifar100-coarse through EfficientNet-Lite2"),
        ("cifar100", {"data": "cifar100-coarse-clip"}, "cifar100-coarse through CLIP"),
        ("cifar100", {}, ""),
    ],
)
def test_what_the_networks_saw_is_named(study, changes, told, tmp_path):
    found = results_of(tmp_path, study, **changes)
    assert found.foreign.startswith(told)
    assert bool(found.foreign) == bool(told) == ("not what the paper used" in found.note)


def test_features_know_what_they_were_made_of():
    names = ("cifar100-clip", "cifar100-coarse-clip", "cifar100", "imagenet100-clip", "generated")
    assert [source(name) for name in names] == [
        "cifar100", "cifar100-coarse", "cifar100", "imagenet100-clip", "generated",
    ]  # fmt: skip


def test_a_report_tells_the_settings_of_contenders(tmp_path):
    found = results_of(tmp_path, "frontier-fashionmnist", data="generated")
    assert _settings(found.works) == {
        "Cells of the grid": "4", "Trials of each cell": "2", "Data": "generated",
        "Features": "none", "Scaling of features": "raw", "Classes": "2",
        "Tested on": "the test set", "Non-zeros": "69", "Epochs": "1",
    }  # fmt: skip
    assert found.frame["improvement"].notna().all()  # each has its dense partner
