"""The study of foretelling: its criterion, and runs on several data sets."""

import math

import numpy as np
import pandas
import pytest

from fissile import FissileError
from fissile.cli import run as cli
from fissile.data import catalogue
from fissile.lab.results import load
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES
from fissile.lab.studies.foretell import Foretells, left_out

CHECK = Foretells(("load", "before_means"), "random-4")
SETS = {"a": 10, "b": 20, "c": 100, "d": 150}


def frame(gain, sets=SETS):
    """A table in which ``gain`` tells the gain in points from load and capacity."""
    rng, rows = np.random.default_rng(0), []
    for data, features in sets.items():
        for neurons in (4, 8, 16, 32):
            own, noise = 0.01 * neurons, rng.normal()
            for trial in range(3):
                shared = {"data": data, "neurons": neurons, "load": features / neurons}
                shared |= {"before_means": own, "trial": trial}
                dense = 50 + trial + noise
                rows.append({**shared, "arm": "dense", "accuracy": dense})
                more = gain(features / neurons, own, rng)
                rows.append({**shared, "arm": "random-4", "accuracy": dense + more})
    return pandas.DataFrame(rows)


def test_a_line_that_foretells_is_recognised():
    found = CHECK(frame(lambda load, own, rng: 3 * math.log(load) - 20 * own))
    assert found.status == "holds"
    assert found.numbers.startswith("R² = 1.00 over 16 cells of 4 data sets; off by 0.0 points")


def test_noise_is_not_foretold():
    found = CHECK(frame(lambda load, own, rng: 9 * rng.choice([-1, 1])))
    assert found.status == "fails"


def test_a_line_that_every_set_has_for_itself_does_not_help_another():
    alone = {10: 5, 20: -9, 100: 12, 150: -14}

    def gain(load, own, rng):
        return alone[round(load * own * 100)]

    assert CHECK(frame(gain)).status == "fails"


@pytest.mark.parametrize("sets", [{"a": 10, "b": 20}, {}])
def test_two_sets_are_too_few(sets):
    table = frame(lambda *_: 1.0, sets) if sets else pandas.DataFrame()
    assert CHECK(table).status == "no data"


def test_a_set_is_foretold_by_the_others_alone():
    sets, known = np.array(list("aabbcc")), np.array([[0.0], [1], [0], [1], [0], [1]])
    gains = np.array([100.0, 300, 0, 1, 0, 1])
    said, mean = left_out(sets, known, gains)
    assert said[:2] == pytest.approx([0, 1])
    assert mean[:2] == pytest.approx([0.5, 0.5])
    assert said[2:4] == pytest.approx([50, 150.5])


# --- studies on several data sets


def test_a_run_notes_every_set_and_leaves_out_what_is_not_here(monkeypatch, capsys):
    here = ("digits",)
    monkeypatch.setattr(cli, "find_set", lambda entry: entry.name in here or None)
    [run], works = cli.requested(["foretell"], "quick", 1, [])
    assert {work.task.data for work in works} == {"digits"}
    assert "foretell (needs fashionmnist)" in capsys.readouterr().err
    fingerprint = catalogue.load("digits").fingerprint()
    assert run.changes["fingerprint"] == f"digits={fingerprint}"
    assert {work.task.fingerprint for work in works} == {fingerprint}
    monkeypatch.setattr(cli, "find_set", lambda entry: None)
    with pytest.raises(FissileError, match="nothing to run"):
        cli.requested(["foretell"], "quick", 1, [])


def test_trials_of_several_sets_are_found_again(tmp_path):
    [run], works = cli.requested(["guided"], "smoke", 2, [])
    seen = {name: catalogue.load(name).fingerprint() for name in ("digits", "generated")}
    assert run.changes == {"fingerprint": ",".join(f"{n}={f}" for n, f in seen.items())}
    assert {(w.task.data, w.task.fingerprint) for w in works} == set(seen.items())
    with Store(tmp_path) as store:
        store.note_run(run)
        [noted] = store.runs()
        again = load(store, noted)
        assert list(again.works) == [w for w in works if w.arm.split != "converged"]
        assert again.foreign == ""
    assert STUDIES["guided"].works("smoke", 2, noted.changes) == list(again.works)


def test_the_encoders_of_all_sets_stand_beside_the_numbers(tmp_path):
    changes = {"fingerprint": "digits=0,cifar100-efficientnet-lite2=1,banking77-minilm=2"}
    [run], _ = cli.requested(["guided"], "smoke", 2, [])
    with Store(tmp_path) as store:
        store.note_run(type(run)("foretell", "quick", 1, changes, "run"))
        found = load(store, store.runs()[0])
    assert {work.task.data for work in found.works} == {
        p.split("=")[0] for p in changes["fingerprint"].split(",")
    }
    assert found.foreign == (
        "EfficientNet-Lite2 (ImageNet-supervised, PCA 512), not CLIP and all-MiniLM-L6-v2, not CLIP"
    )
