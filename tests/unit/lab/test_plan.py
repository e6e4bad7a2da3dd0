"""Planning a run: rates from stored times and their error, and what the command prints."""

import json
import time
from dataclasses import asdict, replace
from unittest import mock

import pytest
from command import called
from hypothesis import given
from hypothesis import strategies as st

from fissile._common.errors import FissileError
from fissile.lab import plan as module
from fissile.lab.compute import TrialResult
from fissile.lab.plan import Rate, calibrated, estimate, kind_of, rates
from fissile.lab.store import Provenance, Run, Store, Time
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Arm, Boolean, Contender, Features, Images, Sampling, Trial

TINY = Boolean(4, train=64, test=64)
CLIP = Features("imagenet1k-clip")
ABACUS = Provenance("0.1.0", "", "2.0", "abacus, 2 cores", "3.11")


@pytest.fixture(autouse=True)
def abacus(monkeypatch):
    monkeypatch.setattr(Provenance, "here", lambda device: replace(ABACUS, device=_named(device)))


def _named(device):
    return "abacus, 2 cores" if device == "cpu" else device


def _works(**changes):
    return [
        replace(Trial(TINY, warm_up=1, fine_tune=1, arm=arm, number=number), **changes)
        for number in range(30)
        for arm in (Arm(), Arm("random", 2))
    ]


def _times(works, rate, finished="noon", device="abacus, 2 cores"):
    """Stored times of trials that took ``rate`` core-seconds for a unit of cost, on two cores."""
    return [Time(w.kind, asdict(w), device, rate * w.cost / 2, finished) for w in works]


# --- rates


@pytest.mark.slow
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_a_rate_is_the_seconds_of_all_cores_over_the_cost(speeds):
    times = [one for i, rate in enumerate(speeds) for one in _times(_works(), rate, str(i))]
    with mock.patch.object(Provenance, "here", return_value=ABACUS):
        found = rates(times)["boolean"]
    assert found.seconds == pytest.approx(sum(speeds) / len(speeds))
    others = [(sum(speeds) - one) / (len(speeds) - 1) for one in speeds]
    assert found.ratios == pytest.approx([o / m for o, m in zip(speeds, others, strict=True)])


def test_one_batch_says_nothing_of_its_error():
    found = estimate({"mine": _works()}, _times(_works(), 3.0))
    assert found.rates["boolean"].ratios == ()
    assert found.error is None
    assert found.seconds == pytest.approx(3.0 * sum(work.cost for work in _works()))


def test_the_error_is_the_spread_of_stored_batches():
    times = [one for i in range(20) for one in _times(_works(), 2.0, str(i))]
    times += _times(_works(), 4.0, "late")
    found = estimate({"mine": _works()}, times).error
    assert found["batches"] == 21
    assert found["median"] == pytest.approx(20 / 21, rel=0.01)
    assert found["low"] <= found["median"] <= found["high"] < 2


def test_times_of_another_machine_do_not_count():
    assert rates(_times(_works(), 3.0, device="other, 2 cores")) == {}
    assert rates(_times(_works(), 3.0, device="NVIDIA H200")) == {}
    assert set(rates(_times(_works(), 3.0, device="abacus, 64 cores"))) == {"boolean"}


def test_without_a_gpu_here_those_of_the_store_count():
    found = rates(_times(_works(), 3.0, device="NVIDIA H200"), "cuda")
    assert found["boolean"].seconds == pytest.approx(1.5)
    assert rates(_times(_works(), 3.0), "cuda") == {}


def test_a_trial_that_is_not_made_any_more_is_left_out():
    strange = [replace(one, spec=one.spec | {"neurons": 0}) for one in _times(_works(), 3.0)]
    assert rates(strange) == {}


# --- calibration


@pytest.mark.slow
@pytest.mark.parametrize("work", [Trial(TINY), Sampling(), Trial(CLIP), Contender(CLIP)])
def test_small_trials_give_a_rate_without_data(work, monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH", 0.01)
    assert calibrated(work).seconds > 0


def test_networks_are_not_trained_until_they_converge(monkeypatch):
    works = []

    def computed(batch, device):
        works.extend(batch)
        time.sleep(0.01)

    monkeypatch.setattr(module, "_ENOUGH", 0.01)
    monkeypatch.setattr(module, "compute", computed)
    converged = Trial(CLIP, arm=Arm("converged"))
    assert kind_of(converged) == "classifier"
    assert calibrated(converged).seconds > 0
    assert {work.arm for work in works} == {Arm()}


def test_what_cannot_be_tried_is_unknown():
    assert calibrated(Trial(Images())) is None
    assert calibrated(Trial(TINY), "cuda") is None  # there is none here
    found = estimate({"mine": [Trial(Images())], "other": _works()}, _times(_works(), 3.0))
    assert found.unknown == ["images"]
    assert found.seconds is found.studies["mine"] is None
    assert found.studies["other"] > 0


def test_stored_times_come_before_a_calibration():
    with mock.patch.object(module, "calibrated", return_value=Rate(7.0)) as asked:
        found = estimate({"mine": [*_works(), Sampling()]}, _times(_works(), 3.0))
    assert [call.args[0].kind for call in asked.call_args_list] == ["sampling"]
    assert found.rates["sampling"].seconds == 7.0


# --- estimates


def test_no_number_of_workers_is_faster_than_the_longest_network():
    works = [*_works(), Trial(TINY, number=99, fine_tune=10_000)]
    times = _times(works, 3.0)
    one, many = (estimate({"mine": works}, times, workers=n).seconds for n in (1, 1_000))
    assert one == pytest.approx(3.0 * sum(work.cost for work in works))
    assert many == pytest.approx(3.0 * works[-1].cost)


def test_trials_that_studies_share_are_counted_once():
    works = _works()
    found = estimate({"first": works[:40], "second": works[20:]}, _times(works, 3.0))
    assert found.trials == 60
    assert found.seconds < found.studies["first"] + found.studies["second"]
    assert estimate({"mine": []}).seconds == 0


def test_workers_are_counted():
    with pytest.raises(FissileError, match="workers=0"):
        estimate({"mine": _works()}, workers=0)


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (Trial(), "boolean"),
        (Trial(embedding=8), "embedded"),
        (Trial(CLIP), "classifier"),
        (Trial(CLIP, depth=3), "deep"),
        (Trial(CLIP, arm=Arm("dynamic", 2)), "dynamic"),
        (Trial(CLIP, arm=Arm("dropconnect", 2)), "dropconnect"),
        (Trial(Images()), "images"),
        (Sampling(), "sampling"),
        (Contender(CLIP), "contender"),
    ],
)
def test_kinds_of_trials(work, kind):
    assert kind_of(work) == kind


# --- the command


def _told(*words):
    return json.loads(called("plan", *words, "--json").stdout)


def _stored(store, works, provenance=ABACUS):
    store.add([TrialResult(work, {"accuracy": 1.0}, 3.0 * work.cost) for work in works], provenance)


def test_a_plan_past_this_machine_needs_no_data_and_says_what_it_does_not_know(tmp_path):
    words = "imagenet1k", "--scale", "paper", "--device", "cuda", "--out", tmp_path / "none"
    found = _told(*words, "--workers", 8)
    assert found["trials"] == found["missing"]["imagenet1k"] == 120 + 6  # and six that converge
    assert (found["workers"], found["seconds"], found["unknown"]) == (8, None, ["deep"])
    assert not (tmp_path / "none").exists()
    said = called("plan", *words).stdout
    assert "unknown" in said
    assert "No time is known, and none can be tried here, of: deep." in said


def test_what_the_store_has_is_left_out_and_its_times_are_used(tmp_path):
    works = STUDIES["codes"].everything("smoke")
    words = "codes", "--scale", "smoke", "--out", tmp_path
    with Store(tmp_path) as store:
        store.note_run(Run("codes", "smoke", None, {}, "fissile run codes"))
        _stored(store, works[:2], Provenance.here("cpu"))
        said = called("plan", *words).stdout
        assert "From a single measurement, with an unknown error: boolean." in said
        assert "Stored batches" not in said
        time.sleep(0.002)  # batches are told apart by when they were finished
        _stored(store, works[2:4], Provenance.here("cpu"))
        found, said = _told(*words), called("plan", *words).stdout
        assert found["trials"] == len(works) - 4
        assert found["rates"]["boolean"][0] == pytest.approx(6.0)
        assert found["error"]["batches"] == 2
        assert f"All {len(works) - 4} on" in said
        assert "single measurement" not in said
        assert (
            "Stored batches took 1.00 times as long as the other batches' times say "
            "(median of 2; 90 % took 1.00 to 1.00 times)." in said
        )
        _stored(store, works)
    assert _told(*words)["trials"] == 0
    assert "nothing to do" in called("plan", *words).stdout


def test_the_arrays_that_a_store_saw_are_remembered(tmp_path):
    seen = {"fingerprint": "0123456789abcdef"}
    works = STUDIES["fashionmnist"].everything("smoke", changes=seen)
    with Store(tmp_path) as store:
        store.note_run(Run("fashionmnist", "smoke", None, seen, "fissile run fashionmnist"))
        _stored(store, works)
    assert _told("fashionmnist", "--scale", "smoke", "--out", tmp_path)["trials"] == 0


def test_cells_and_settings_are_those_of_a_run(tmp_path):
    words = "superposition", "--scale", "smoke", "--device", "cuda", "--out", tmp_path / "none"
    whole, some = _told(*words), _told(*words, "--only", "neurons=4")
    assert 0 < some["trials"] < whole["trials"]
    assert _told(*words, "--trials", 1)["trials"] < whole["trials"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nothing",), "there is no study 'nothing'"),
        (("codes", "--set", "colour=red"), "no setting 'colour'"),
        (("codes", "--only", "colour=red"), "--only takes KEY=VALUE"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, text):
    found = called("plan", *words, "--out", tmp_path / "none", code=1)
    assert text in found.stderr
    assert "Traceback" not in found.stderr
