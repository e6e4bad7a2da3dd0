"""Trials of GPTs on texts."""

from dataclasses import asdict, replace

import pytest

from fissile import FissileError
from fissile.bank.loop import Recipe
from fissile.lab.batching import default_jobs, least_networks
from fissile.lab.compute import compute
from fissile.lab.frame import table
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Arm, Text, Trial, changed, from_spec

TASK = Text("generated-text", layers=1, width=8, heads=2, context=8, beside=4, steps=3)
PLAIN = Recipe(batch=4, l1=0.0, l2=0.0)
TRIAL = Trial(TASK, 4, recipe=PLAIN, warm_up=1, fine_tune=1)
ARMS = [Arm(), Arm("random", 2), Arm("random", 2, allocation="layer"), Arm("dynamic", 2)]


@pytest.mark.parametrize("place", ["ffn", "head"])
def test_trials_of_all_seeds_and_arms_are_computed_together(place):
    cell = replace(TRIAL, task=replace(TASK, place=place))
    works = [replace(cell, arm=arm, number=n) for n in range(2) for arm in ARMS]
    assert len({work.batch_key() for work in works}) == 1
    told = []
    found = compute(works, on_steps=told.append)
    assert [one.work for one in found] == works
    assert told[-1] == 1
    frame = table(works, {one.work.key: one.measures for one in found})
    assert frame["nonzeros"].nunique() == 1
    assert (frame.groupby("trial")["warm_nats"].nunique() == 1).all()
    assert (frame[frame["arm"] == "dense"]["improvement"] == 0).all()
    assert set(frame["arm"]) == {"dense", "random-2", "random-layer-2", "dynamic-2"}
    assert frame["nats"].between(1, 4).all()
    alone = compute(works[:4])
    assert alone[2].measures["nats"] == pytest.approx(found[2].measures["nats"], rel=1e-5)


def test_a_trial_is_stored_and_read_again():
    for work in (TRIAL, replace(TRIAL, arm=Arm("random", 4, allocation="layer"))):
        again = from_spec(work.kind, asdict(work))
        assert again == work
        assert again.key == work.key
    keys = {replace(TRIAL, arm=arm).key for arm in ARMS}
    assert len(keys) == len(ARMS)
    assert replace(TRIAL, task=replace(TASK, place="head")).key != TRIAL.key
    assert changed(TRIAL, {"context": 16}).task.context == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Text("generated"), "is no text of characters"),
        (lambda: Text(place="attention"), "place='attention' is not known"),
        (lambda: Text(width=10, heads=4), "cannot be shared by 4 heads"),
        (lambda: replace(TRIAL, arm=Arm("dropconnect", 2)), "a GPT has no arm 'dropconnect-2'"),
        (lambda: replace(TRIAL, arm=Arm("converged")), "a GPT has no arm 'converged'"),
        (lambda: replace(TRIAL, recipe=Recipe()), "without penalties"),
        (lambda: Trial(arm=Arm("random", 2, allocation="layer")), "allocation is for a GPT alone"),
        (lambda: Arm("random", 2, allocation="all"), "allocation='all' is not known"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(FissileError, match=message):
        make()


def test_a_gpu_trains_all_networks_of_a_shape_at_once_in_one_process():
    assert least_networks(TRIAL, "cuda") == float("inf")
    assert least_networks(TRIAL, "cpu", cores=2) == 2
    assert default_jobs("cuda", [TRIAL], cores=16) == 1


def test_the_study_has_what_was_asked():
    works = STUDIES["transformer"].works("paper")
    assert {(w.task.place, w.neurons) for w in works} == {
        ("ffn", 16), ("ffn", 64), ("ffn", 256), ("head", 4), ("head", 16), ("head", 64),
    }  # fmt: skip
    assert {(w.task.layers, w.task.width) for w in works} == {(4, 128)}
    assert {w.number for w in works} == set(range(5))
    assert len({w.arm for w in works}) == 9
    assert not STUDIES["transformer"].converged("paper")
