"""Trials on real data: the bank trains what a plain loop would, on the arrays that were meant."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim import Adam

import fissile
from fissile._common.errors import FissileError
from fissile.bank.loop import accuracy, fit
from fissile.data import catalogue
from fissile.lab import classifier
from fissile.lab.compute import compute
from fissile.lab.run import run
from fissile.lab.store import Store
from fissile.lab.trial import Arm, Features, Trial

DATA = Features("generated")


def trial(split="dense", alpha=1, **changes):
    return Trial(DATA, 6, warm_up=2, fine_tune=2, arm=Arm(split, alpha), number=3, **changes)


def by_hand(arm, depth=2, layer_norm=False):
    """The same network trained alone by the plain loop."""
    held = catalogue.load("generated")
    x, y, x_test, y_test = map(torch.tensor, (held.x, held.y, held.x_test, held.y_test))
    torch.manual_seed(3)
    model = fissile.MLP([64, *[6] * (depth - 1), 20], layer_norm=layer_norm)
    adam = Adam(model.parameters(), 1e-3)
    fit(model, adam, x, y, epochs=2, seed=3)
    warm = accuracy(model, x_test, y_test)
    if arm.split != "dense":
        model = fissile.expand(model, arm.alpha, arm.split, seed=3, optimizer=adam)
    fit(model, adam, x, y, epochs=2, seed=3, start=2)
    return warm, accuracy(model, x_test, y_test), fissile.nonzeros(model)


@pytest.mark.parametrize("split", ["dense", "random", "gram", "overlapping"])
def test_a_trial_is_what_a_plain_loop_comes_to(split):
    one = trial(split, 1 if split == "dense" else 4)
    found = compute([one])[0].measures
    warm, last, _ = by_hand(one.arm)
    assert found["warm"] == pytest.approx(warm, abs=0.003)
    assert found["accuracy"] == pytest.approx(last, abs=0.007)  # of 500 samples, three


def test_deep_networks_too():
    one = trial("random", 2, depth=5, layer_norm=True)
    warm, last, _ = by_hand(one.arm, depth=5, layer_norm=True)
    found = compute([one])[0].measures
    assert found["warm"] == pytest.approx(warm, abs=0.003)
    assert found["accuracy"] == pytest.approx(last, abs=0.007)


def test_all_arms_keep_the_budget_but_dropconnect_which_has_none():
    arms = ["dense", "random", "gram", "2:4", "overlapping", "dynamic", "dropconnect"]
    works = [trial(split, 1 if split == "dense" else 2) for split in arms]
    found = {one.work.arm.split: one.measures for one in compute(works)}
    budget = 6 * 64 + 6 * 20
    assert {split: m["nonzeros"] for split, m in found.items() if split != "dropconnect"} == {
        split: budget for split in arms if split != "dropconnect"
    }
    assert found["dropconnect"]["nonzeros"] > budget
    assert len({m["warm"] for m in found.values()}) == 1
    assert all(0 <= m["absolute_cosine"] <= 1 for m in found.values())


def test_the_curve_is_kept_where_it_is_drawn():
    outcome = compute([trial("random", 4, pictures=True)])[0]
    curve = outcome.arrays["curve"]
    assert curve.shape == (4,)
    assert float(curve[-1]) == pytest.approx(outcome.measures["accuracy"])
    assert float(curve[1]) == pytest.approx(outcome.measures["warm"])
    assert compute([trial("random", 4)])[0].arrays == {}


def test_a_split_at_once_has_a_curve_too():
    outcome = compute([replace(trial("random", 4, pictures=True), warm_up=0)])[0]
    assert outcome.arrays["curve"].shape == (2,)
    assert np.isnan(outcome.measures["warm"])


@pytest.mark.parametrize("scaling", ["unit", "length-10", "standard"])
def test_features_are_scaled_before_networks_see_them(scaling):
    held = catalogue.load("generated")
    task = replace(DATA, scaling=scaling)
    found = compute([replace(trial(), task=task)])[0].measures
    arrays = classifier.Arrays("generated", held.scaled(scaling), "scaled")
    alone = compute([trial()], arrays=arrays)[0].measures
    assert found == alone
    assert found != compute([trial()])[0].measures
    assert replace(trial(), task=task).key != trial().key


def test_validation_never_sees_the_test_set():
    held = catalogue.load("generated")
    spec = classifier.Classifiers("cpu").spec(replace(trial(), task=Features("generated", 0, True)))
    rows = {row.tobytes() for row in held.x}
    seen = [np.asarray(x) for x in (spec.data.x, spec.data.x_test)]
    assert [len(x) for x in seen] == [1800, 200]
    assert all(row.tobytes() in rows for x in seen for row in x)
    assert not {row.tobytes() for row in seen[0]} & {row.tobytes() for row in seen[1]}


def test_fewer_classes_are_fewer_samples_and_outputs():
    bench = classifier.Classifiers("cpu")
    few, more = (bench.spec(replace(trial(), task=Features("generated", n))) for n in (5, 10))
    assert (few.sizes[-1], more.sizes[-1]) == (5, 10)
    assert (len(few.data.x), len(more.data.x)) == (500, 1000)
    rows = {row.tobytes() for row in np.asarray(more.data.x)}
    assert all(row.tobytes() in rows for row in np.asarray(few.data.x))  # nested
    whole = bench.spec(replace(trial(), task=Features("generated", 20)))
    assert len(whole.data.x) == 2000


def test_other_arrays_than_were_meant_are_refused():
    task = Features("generated", fingerprint=classifier.meant("generated")["fingerprint"])
    assert classifier.load(task).classes == 20
    with pytest.raises(FissileError, match="files of generated have changed since this run began"):
        compute([replace(trial(), task=replace(task, fingerprint="0" * 16))])


def test_a_large_set_stays_in_its_file_and_trains_the_same(tmp_path, monkeypatch):
    held = catalogue.load("generated")
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, held.x.shape)
    mapped[:] = held.x
    usual = compute([trial("random", 4, depth=5, layer_norm=True)])[0].measures
    monkeypatch.setattr(classifier, "STREAMED", 0)
    arrays = classifier.Arrays("generated", replace(held, x=mapped), "0")
    monkeypatch.setattr(classifier, "_from_files", lambda name: arrays)
    spec = classifier.Classifiers("cpu").spec(trial())
    assert isinstance(spec.data.x, np.memmap)
    assert compute([trial("random", 4, depth=5, layer_norm=True)])[0].measures == usual


def test_the_encoder_is_what_the_file_says_and_no_part_of_the_key():
    plain, told = Features("cifar100-clip"), Features("cifar100-clip", encoder="timm:resnet18")
    assert plain.columns()["encoder"] == "CLIP ViT-B/16"
    assert told.columns()["encoder"] == "timm:resnet18"
    assert Trial(plain).key == Trial(told).key  # the arrays decide, and have a fingerprint


def test_trials_are_bound_to_the_arrays_that_are_here(tmp_path):
    works = [trial(), trial("random", 2)]
    held = classifier.bound(works)
    assert {work.task.fingerprint for work in held} == {
        classifier.meant("generated")["fingerprint"]
    }
    assert [replace(work, task=DATA) for work in held] == works
    with Store(tmp_path) as store, pytest.raises(FissileError, match=r"bound\(works\)"):
        run([Trial(Features("cifar100-clip"))], store)
