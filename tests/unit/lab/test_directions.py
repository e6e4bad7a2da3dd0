"""Features of data as directions: what is measured of them, and the splits that they guide."""

from dataclasses import replace

import pytest
import torch

import fissile
from fissile import FissileError
from fissile._common.random import seeded
from fissile.bank import Bank, Data, Spec
from fissile.data import catalogue
from fissile.lab.compute import compute
from fissile.lab.directions import Directions, Guided, atoms, strongest
from fissile.lab.trial import Arm, Boolean, Features, Trial

pytest.importorskip("sklearn")
TASK = Features("generated", scaling="length-10")
TRIAL = Trial(TASK, 6, warm_up=2, fine_tune=1, diagnosed=True)


@pytest.fixture(scope="module")
def data():
    held = catalogue.load("generated").scaled("length-10")
    arrays = (torch.from_numpy(part) for part in (held.x, held.y, held.x_test, held.y_test))
    return Data(*arrays)


def test_what_is_told_before_the_split_is_what_diagnose_says(data):
    found = Directions(data)
    bank = Bank([Spec([64, 6, 20], data, seed=1), Spec([64, 3, 20], data, seed=2)])
    bank.train(until=1)
    before = found.before(bank)
    for number in range(2):
        network = bank.take(number)[0]
        [means] = fissile.diagnose(network, (data.x, data.y), draws=2)
        [of_atoms] = fissile.diagnose(network, data.x, features=found.rows["atoms"], draws=2)
        told = [
            means.total / means.features,
            of_atoms.total / of_atoms.features,
            means.demand / means.neurons,
        ]
        assert [float(before[name][number]) for name in before] == pytest.approx(told, rel=1e-4)
    assert list(before) == ["before_means", "before_atoms", "before_rank"]
    after = found.after(bank)["means_capacity"]
    assert after / 20 == pytest.approx(before["before_means"])


def test_a_dictionary_finds_directions_that_make_the_samples():
    draw = torch.Generator().manual_seed(0)
    true = torch.linalg.qr(torch.randn(16, 16, generator=draw))[0][:4]
    parts = torch.rand(600, 4, generator=draw) * (torch.rand(600, 4, generator=draw) < 0.2)
    found = atoms(30 * parts @ true)
    alike = (torch.nn.functional.normalize(found, dim=-1) @ true.mT).abs()
    assert (alike.amax(0) > 0.9).all()


def test_a_guided_split_keeps_the_inputs_of_a_feature_together():
    rows = torch.zeros(5, 20)
    for input in range(20):
        rows[input % 5, input] = 1.0 + input
    assert strongest(rows).tolist() == [*range(5)] * 4
    owner = Guided(lambda: rows).deal(torch.randn(3, 20), 2, seeded(0))
    for parent in owner:
        assert all(len(set(parent[group::5].tolist())) == 1 for group in range(5))
        assert set(parent.tolist()) == {0, 1}
    again = Guided(lambda: rows).deal(torch.randn(3, 20), 2, seeded(1))
    assert not torch.equal(owner, again)


def test_diagnosed_trials_measure_features_and_train_as_others_do():
    arms = [Arm(), Arm("random", 4), Arm("means", 4), Arm("atoms", 4)]
    found = [one.measures for one in compute([replace(TRIAL, arm=arm) for arm in arms])]
    plain = [
        one.measures for one in compute([replace(TRIAL, arm=a, diagnosed=False) for a in arms])
    ]
    for full, bare in zip(found, plain, strict=True):
        assert {name: full[name] for name in bare} == bare
        assert full["before_means"] == found[0]["before_means"]
        assert 0 < full["means_capacity"] <= 20
        assert 0 < full["atoms_capacity"] <= 64
    assert "before_means" not in plain[0]
    assert len({one["nonzeros"] for one in found}) == 1
    assert len({one["accuracy"] for one in found}) > 1
    assert len({one["means_capacity"] for one in found}) == len(arms)


@pytest.mark.parametrize("arm", [Arm("means", 4), Arm("atoms", 2)])
def test_formulas_have_no_such_features(arm):
    with pytest.raises(FissileError, match="means or atoms are for classifiers of features"):
        Trial(Boolean(), arm=arm)
    with pytest.raises(FissileError, match="diagnosed"):
        Trial(Boolean(), diagnosed=True)
