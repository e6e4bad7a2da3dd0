"""Planning a run: how batches are dealt, what they need, and what is said of it."""

import json
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from command import called
from hypothesis import given
from hypothesis import strategies as st

from fissile._common.errors import FissileError
from fissile.lab import measured
from fissile.lab.budget_search import contest
from fissile.lab.compute import Outcome, compute
from fissile.lab.cost import data_bytes, process_bytes
from fissile.lab.measured import Load, Speed, Worker, kind_of, loads, machine_of, worker_for
from fissile.lab.plan import plan
from fissile.lab.schedule import Schedule, dealt
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Arm, Boolean, Contender, Features, Images, Sampling, Trial

TINY = Boolean(4, train=64, test=64)
CLIP = Features("imagenet1k-clip")
SECONDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


# --- dealing


@given(SECONDS, st.integers(1, 60))
def test_no_schedule_is_shorter_than_its_longest_batch_or_its_share(seconds, workers):
    ends = dealt(seconds, workers)
    assert len(ends) == workers
    assert sum(ends) == pytest.approx(sum(seconds))
    assert max(ends) >= max(max(seconds), sum(seconds) / workers) - 1e-9


@given(SECONDS)
def test_one_worker_takes_the_sum(seconds):
    assert dealt(seconds, 1) == [pytest.approx(sum(seconds))]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 4))
def test_the_longest_first_is_within_a_third_of_the_best(seconds, workers):
    ranked = sorted(seconds, reverse=True)
    most = max(dealt(ranked, workers))
    best = _best(ranked, workers)
    assert best <= most <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9  # Graham 1969
    assert max(dealt(ranked, workers + 1)) <= 4 / 3 * most + 1e-9


def _best(seconds, workers):
    """The shortest schedule there is, by trying all."""
    return min(
        max(sum(s for s, mine in zip(seconds, who, strict=True) if mine == w) for w in set(who))
        for who in product(range(min(workers, len(seconds))), repeat=len(seconds))
        if list(dict.fromkeys(who)) == sorted(set(who))  # workers are alike
    )


# --- a schedule of trials


def _works(**changes):
    return [
        replace(Trial(TINY, warm_up=1, fine_tune=1, arm=arm, number=number), **changes)
        for number in range(30)
        for arm in (Arm(), Arm("random", 2))
    ]


def _slow(**speeds):
    return Worker(
        "abacus", "cpu", 2.0, 0.0, {"boolean": Speed(**{"cost": 1e4, **speeds}, error=1.5)}
    )


@pytest.mark.parametrize("workers", [1, 2, 7, 500])
def test_every_trial_is_in_one_batch_and_arms_stay_together(workers):
    schedule = Schedule(_works(), _slow(), every=1e-4)
    found = [work for batch in schedule.batches(workers) for work in batch.works]
    assert sorted(work.key for work in found) == sorted(work.key for work in _works())
    networks = [{work.network() for work in batch.works} for batch in schedule.batches(workers)]
    assert sum(map(len, networks)) == 30
    assert schedule.busy(workers) == min(workers, len(networks))


def test_more_workers_than_networks_change_nothing_and_that_is_said():
    with _known(_slow()):
        found = {count: plan({"mine": _works()}, count, every=1e-9) for count in (30, 1_000)}
    assert found[30].batches == found[1_000].batches == 30
    assert found[30].wall == pytest.approx(found[1_000].wall)
    assert found[1_000].busy == 30
    assert any("970 of 1,000 workers have nothing to do" in text for text in found[1_000].advice)
    assert any("no number of workers is faster" in text for text in found[1_000].advice)


def test_as_many_workers_as_are_needed_are_as_fast():
    works = [*_works(), *_works(fine_tune=9_999)]  # which decide how long it takes
    schedule = Schedule(works, _slow(), every=1e-9)
    few = schedule.as_fast(1_000)
    assert 30 <= few < schedule.busy(1_000) == 60
    assert schedule.wall(few) <= 1.05 * schedule.wall(1_000)
    assert schedule.wall(few - 1) > 1.05 * schedule.wall(1_000)


def test_parts_add_up_to_the_time():
    with _known(_slow(shapes=0.5, steps=0.01)):
        for workers in (1, 3, 100):
            one = plan({"mine": _works()}, workers, every=1e-4)
            parts = one.parts
            whole = parts.start + parts.data + parts.set_up + parts.training + parts.waiting
            assert whole == pytest.approx(one.wall)
            assert parts.set_up > 0
            assert parts.start == (2.0 if workers == 1 else 4.0)
            assert one.low == pytest.approx(one.wall / 1.5)
            assert one.high == pytest.approx(one.wall * 1.5)


def test_larger_batches_are_advised_where_steps_take_the_time():
    with _known(_slow(cost=0.0, steps=1.0)):
        text = " ".join(plan({"mine": _works()}, 2, every=1e-3).advice)
    assert "--every" in text
    with _known(_slow()):
        assert "--every" not in " ".join(plan({"mine": _works()}, 2, every=1e-3).advice)


def test_studies_share_what_both_need_and_the_work_is_shared_out():
    works = _works()
    with _known(_slow()):
        one = plan({"first": works[:40], "second": works[20:]}, 2)
    assert one.trials == 60
    assert sum(one.studies.values()) == pytest.approx(1)
    assert one.studies["first"] == pytest.approx(2 / 3, rel=0.01)


def test_data_goes_to_every_machine_but_the_only_one():
    works = [Trial(CLIP, 8, number=number) for number in range(100)]
    worker = Worker("abacus", "cuda", 2.0, 3.0, {"classifier": Speed(cost=1.0, error=1.1)})
    schedule = Schedule(works, worker)
    assert schedule.sent(8) == schedule.sent(1) == 3.0 * schedule.data / 2**30
    assert schedule.sent(8) < schedule.sent(9) < schedule.sent(100)
    assert schedule.data == data_bytes(CLIP) == 4 * 512 * 1_331_167 + 8 * 1_331_167


def _known(worker):
    return mock.patch.object(measured, "_workers", return_value=[worker])


# --- the model


def test_steps_of_one_shape_are_made_once_and_costs_add_up():
    one, many = (loads(_works()[:count]) for count in (2, 60))
    assert one["boolean"][:2] == many["boolean"][:2] == (2, 1 + 1 + 1)
    assert many["boolean"].cost == pytest.approx(30 * one["boolean"].cost)
    mixed = [Trial(TINY, neurons, number=neurons) for neurons in (4, 5, 5, 6)]
    assert loads(mixed)["boolean"].shapes == 3
    arms = Arm("random", 2), Arm("2:4", 2), Arm("random", 4), Arm("dynamic", 2), Arm("dynamic", 4)
    found = loads([Trial(CLIP, 8, arm=arm) for arm in arms])
    assert (found["classifier"].shapes, found["dynamic"].shapes) == (2, 2)


def test_contenders_go_side_by_side():
    work = Contender(Features("generated"), 4, "dense", epochs=10)
    alone, more = loads([work])["contender"], loads([work, replace(work, method="gradual")])
    assert alone.steps == more["contender"].steps == 10 * (1_800 // 64 + 2_000 // 64)
    assert more["contender"].shapes > alone.shapes


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
def test_a_kind_that_was_never_measured_is_a_guess_and_that_is_said(work, kind):
    assert kind_of(work) == kind
    with _known(Worker("abacus", "cpu", 2.0, 0.0)):
        one = plan({"mine": [work]})
    assert one.unmeasured == [kind]
    assert one.error is one.low is one.high is None
    assert one.wall == pytest.approx(2.0 + 2 * loads([work])[kind].cost)
    assert any("a guess" in text and kind in text for text in one.notes)


def test_errors_of_kinds_are_weighed_by_their_time():
    worker = Worker("abacus", "cpu", 2.0, 0.0, {"a": Speed(error=2.0), "b": Speed(error=1.0)})
    assert worker.error({"a": 1.0, "b": 0.0}) == pytest.approx(2.0)
    assert worker.error({"a": 1.0, "b": 1.0}) == pytest.approx(2**0.5)
    assert worker.error({"a": 1.0, "c": 1e-9}) is None
    assert Speed(1.0, 0.1, 0.01).seconds(Load(2, 30, 400.0)) == pytest.approx(9.0)


def test_times_beside_networks_that_were_never_measured_are_guesses_and_that_is_said():
    speeds = {"classifier": {"cost": 1e-9, "error": 1.1, "batches": 2, "studies": 1}}
    told = {"name": "abacus", "device": "cpu", "start": None, "kinds": speeds}
    works = [Trial(CLIP, 8, number=number) for number in range(3)]
    with _known(measured._worker(told)):
        one = plan({"mine": works})
    assert one.parts.start == measured.GUESSES["start"]
    said = "that a process takes 10 s to start, and that a GiB of data is read in 10 s."
    assert f"Never measured on abacus, and a guess: {said}" in one.notes
    assert one.low is one.high is None  # they are nearly all of the time
    speeds["classifier"]["cost"] = 1e4
    with _known(measured._worker(told)):
        assert plan({"mine": works}).error == pytest.approx(1.1)  # now little of it
    with _known(measured._worker(told | {"start": 2.0, "reads": 1.0})):
        one = plan({"mine": works})
    assert one.parts.start == 2.0
    assert not any("Never measured" in text for text in one.notes)
    with _known(measured._worker(told | {"start": 2.0})):
        assert not any("Never measured" in text for text in plan({"mine": _works()}).notes)


def test_a_kind_with_too_few_batches_has_no_error_and_that_is_said():
    with _known(Worker("abacus", "cpu", 2.0, 0.0, {"sampling": Speed(cost=1.0, batches=1)})):
        one = plan({"mine": [Sampling()]})
    assert one.error is None
    assert one.notes[-1].endswith("1 measured batch; too few to say how far off it is: sampling.")


def test_features_that_stay_in_their_file_are_said_not_to_be_in_the_time():
    def said(task, device):
        with _known(Worker("abacus", device, 2.0, 0.0)):
            notes = plan({"mine": [Trial(task)]}, 1, device).notes
        return any("took 3.3 times as long" in text for text in notes)

    assert said(CLIP, "cpu")
    assert not said(CLIP, "cuda")
    assert not said(Features("imagenet100-clip"), "cpu")


def test_what_was_measured_is_there_and_sound():
    for device in ("cpu", "cuda"):
        worker = worker_for(device).worker
        assert worker.device == device
        assert worker.start > 0
        assert worker.kinds
        for speed in worker.kinds.values():
            assert min(speed.shapes, speed.steps, speed.cost) >= 0
            assert max(speed.shapes, speed.steps, speed.cost) > 0
            assert speed.error == 0 or speed.error >= 1  # 0: too few to tell
            assert speed.batches >= speed.studies >= 1


def test_a_machine_that_was_not_measured_gets_the_nearest_with_a_word():
    with _known(_slow()):
        worker, notes = worker_for("cpu")
    assert worker.name == "abacus"
    assert len(notes) == 1
    assert "abacus" in notes[0]
    here = machine_of(Provenance.here("cpu").device)[0]
    with _known(replace(_slow(), name=here)):
        assert worker_for("cpu").notes == []


def test_an_unknown_device_is_refused():
    with pytest.raises(FissileError, match="no run was measured on 'abacus'; plan for cpu or cuda"):
        plan({"mine": _works()}, 1, "abacus")
    with pytest.raises(FissileError, match="nothing to plan"):
        plan({"mine": []})
    with pytest.raises(FissileError, match="workers=0"):
        plan({"mine": _works()}, 0)


# --- memory


def test_wider_networks_and_more_children_need_more_memory():
    for task in (Boolean(8), CLIP, Images()):
        wide = [Trial(task, neurons).memory for neurons in (2, 8, 64, 512)]
        assert wide == sorted(set(wide))
        children = [Trial(task, 8, arm=Arm("random", alpha)).memory for alpha in (2, 4, 8)]
        assert children == sorted(set(children))
    depths = [Trial(CLIP, 8, depth=depth).memory for depth in (2, 5, 9)]
    assert depths == sorted(set(depths))
    widths = [Contender(CLIP, neurons, "dense").memory for neurons in (2, 8, 64, 512)]
    assert widths == sorted(set(widths))
    assert Sampling(networks=10).memory < Sampling(networks=1_000).memory


def test_memory_holds_at_least_weights_moments_and_gradients():
    bank = 4 * 4 * 128 * (512 + 1_000)
    assert bank < Trial(CLIP, 128).memory < 10 * bank
    assert Trial(Images("cifar100")).memory > 16 * _parameters(Images("cifar100"))
    assert process_bytes([]) < process_bytes(_works()) < process_bytes([Contender(CLIP)])


def test_of_convolutional_networks_only_some_are_in_memory_at_once():
    works = [Trial(Images(), number=number) for number in range(50)]
    worker = Worker("abacus", "cuda", 2.0, 0.0)
    batch = Schedule(works, worker, every=1e9).batches(1)[0]
    assert len(batch.works) == 50
    assert batch.memory < data_bytes(Images()) + 10 * works[0].memory


def _parameters(task):
    from fissile.bank.vision import ConvNet

    return sum(p.numel() for p in ConvNet(task.projection, 8, task.outputs).parameters())


def test_a_contender_is_given_what_its_stacks_hold():
    works = [Contender(Features("generated"), 16, "dense", 1, number=n) for n in range(2)]
    sizes, make = [], contest.__globals__["train"]

    def train(*args, **kwargs):
        found = make(*args, **kwargs)
        tensors = [t for s, _ in found for t in (*s.weights.values(), *s.masks.values())]
        moments = [t for s, _ in found for each in s.moments.values() for t in each]
        sizes.append(sum(t.numel() * t.element_size() for t in (*tensors, *moments)))
        return found

    with mock.patch.dict(contest.__globals__, {"train": train}):
        compute(works)
    assert len(sizes) == 2  # the search, then the test
    assert max(sizes) < sum(work.memory for work in works) < 20 * max(sizes)


# --- the command


def _told(*words, **options):
    return json.loads(called("plan", *words, "--json", **options).stdout)["plans"]


def test_a_plan_past_this_machine_needs_no_data(tmp_path):
    few, many = _told(
        "imagenet1k", "--scale", "paper", "--device", "cuda",
        "--workers", 8, "--workers", 1000, "--out", tmp_path / "none",
    )  # fmt: skip
    assert few["trials"] == many["trials"] == 120 + 6  # and six that converge
    assert few["workers"] == 8
    assert few["busy"] == 8
    assert many["busy"] == many["batches"] == 60 + 6  # a network is never cut in two
    assert many["wall"] < few["wall"]
    assert few["data_bytes"] == data_bytes(CLIP)
    assert few["device_bytes"] > data_bytes(CLIP)
    assert not (tmp_path / "none").exists()


def test_tables_name_what_decides(tmp_path):
    words = "codes", "capacity", "--scale", "smoke", "--workers", 1, "--workers", 50
    said = called("plan", *words, "--out", tmp_path / "none").stdout
    for text in (
        "18 trials",
        "1 core",
        "50 cores",
        "core-hours",
        "longest batch",
        "share: training",
    ):
        assert text in said, text
    assert "codes" in said
    assert "capacity" in said
    assert "nothing to do" in said


def test_what_the_store_has_is_left_out(tmp_path):
    study = STUDIES["codes"]
    works, here = study.everything("smoke"), Provenance.here("cpu")
    words = "codes", "--scale", "smoke", "--out", tmp_path
    with Store(tmp_path) as store:
        store.note_run(Run("codes", "smoke", None, {}, "fissile run codes"))
        store.add([Outcome(work, {"accuracy": 1.0}, 1.0) for work in works[:3]], here)
        assert _told(*words)[0]["trials"] == len(works) - 3
        store.add([Outcome(work, {"accuracy": 1.0}, 1.0) for work in works], here)
    assert _told(*words) == []
    assert "nothing to do" in called("plan", *words).stdout


def test_the_arrays_that_a_store_saw_are_remembered(tmp_path):
    seen = {"fingerprint": "0123456789abcdef"}
    works = STUDIES["fashionmnist"].everything("smoke", changes=seen)
    with Store(tmp_path) as store:
        store.note_run(Run("fashionmnist", "smoke", None, seen, "fissile run fashionmnist"))
        store.add([Outcome(work, {"accuracy": 1.0}, 1.0) for work in works], Provenance.here("cpu"))
    assert _told("fashionmnist", "--scale", "smoke", "--out", tmp_path) == []


def test_cells_and_settings_are_those_of_a_run(tmp_path):
    words = "superposition", "--scale", "smoke", "--out", tmp_path / "none"
    whole, some = _told(*words)[0], _told(*words, "--only", "neurons=4")[0]
    assert 0 < some["trials"] < whole["trials"]
    longer = _told(*words, "--set", "fine_tune=200")[0]
    assert longer["work"] > whole["work"]
    assert _told(*words, "--trials", 1)[0]["trials"] < whole["trials"]


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
