"""Runs that are killed, stopped, doubled and handed on to others, through the real command."""

import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import called, stored_trials

from fissile._common.errors import FileError
from fissile.lab.batching import Local, pool
from fissile.lab.results import load
from fissile.lab.run import RunFailed, Tally, Watcher, run
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Arm, Boolean, Trial

CHANGES = {"train": 500, "test": 200}
#: Some twenty networks with all their arms, stored a few at a time.
ARGUMENTS = (
    "run", "interference", "--scale", "quick", "--every", "0.05",
    "--set", "train=500", "--set", "test=200", "--out",
)  # fmt: skip
WORKS = STUDIES["interference"].everything("quick", None, CHANGES)


def measures(folder):
    with Store(folder, create=False) as store:
        return {row.key: row.measures for row in store.rows([work.key for work in WORKS])}


def start(folder):
    command = [sys.executable, "-m", "fissile.cli", *ARGUMENTS, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(process, folder, count):
    """Wait until the store holds so many trials; the process must be alive till then."""
    deadline = time.monotonic() + 120
    while stored_trials(folder) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with Store(folder) as store:
        tally = run(WORKS, store)
    assert tally == Tally(computed=len(WORKS))
    return measures(folder)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(tmp_path, undisturbed):
    for share in (0.2, 0.4):
        process = start(tmp_path)
        wait_for(process, tmp_path, int(share * len(WORKS)))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    kept = stored_trials(tmp_path)
    assert 0.4 * len(WORKS) <= kept < len(WORKS)
    out = called(*ARGUMENTS, tmp_path).stdout
    assert f"{len(WORKS) - kept} trials computed, {kept} found in the store" in out
    assert measures(tmp_path) == undisturbed


@pytest.mark.slow
def test_two_processes_share_the_work_and_agree(tmp_path, undisturbed):
    process = start(tmp_path)
    wait_for(process, tmp_path, 1)  # this process begins at once, that one has much to import
    outs = [called(*ARGUMENTS, tmp_path).stdout, process.communicate(timeout=180)[0].decode()]
    assert process.returncode == 0, outs
    assert measures(tmp_path) == undisturbed
    computed = [int(out.split(" trials computed")[0].split()[-1].replace(",", "")) for out in outs]
    assert sum(computed) == len(WORKS)  # nothing was computed twice


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_stored_and_the_same_command_goes_on(tmp_path, undisturbed):
    process = start(tmp_path)
    wait_for(process, tmp_path, 10)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"trials; the same command goes on" in out
    assert b"Traceback" not in out
    assert 10 <= stored_trials(tmp_path) < len(WORKS)
    with Store(tmp_path) as store:
        run(WORKS, store)
    assert measures(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_pool_of_processes_computes_the_same(tmp_path, undisturbed):
    part = WORKS[:20]
    with Store(tmp_path) as store, pool(2) as executor:
        tally = run(part, store, Local(executor=executor, slots=2, every=0.05))
        assert tally.computed == len(part)
        found = {row.key: row.measures for row in store.rows([work.key for work in part])}
    assert found == {work.key: undisturbed[work.key] for work in part}


def family(process):
    """Return the living processes of a session, as the kernel lists them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(session) == process.pid and state != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_of_a_pool_outlives_its_run(tmp_path, how, code):
    command = [sys.executable, "-m", "fissile.cli", *ARGUMENTS, str(tmp_path), "--jobs", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while stored_trials(tmp_path) < 5:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(family(process)) >= 3
        process.send_signal(how)
        assert process.wait(60) == code
        while family(process):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert b"Traceback" not in process.stderr.read()
    assert stored_trials(tmp_path) >= 5


def tiny(**changes):
    return Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1, **changes)


def test_finished_trials_are_never_computed_again(tmp_path):
    works = [
        tiny(number=number, arm=arm) for number in range(2) for arm in (Arm(), Arm("random", 2))
    ]
    with Store(tmp_path) as store:
        assert run(works[:3], store).computed == 3
        assert run(works, store) == Tally(found=3, computed=1)
        assert run(works, store) == Tally(found=4)
        alone = run([works[3]], store)
    assert alone == Tally(found=1)


class Here(Executor):
    """Computes what it is given at once."""

    def submit(self, fn, /, *args):
        future = Future()
        future.set_result(fn(*args))
        return future


def test_a_run_that_may_not_take_longer_has_the_first_trials_of_all_cells(tmp_path, monkeypatch):
    works = [tiny(number=number, neurons=width) for width in (4, 8) for number in range(3)]
    clock = itertools.count()
    told = SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep)
    monkeypatch.setattr("fissile.lab.run.time", told)
    with Store(tmp_path) as store:
        # It looks at the clock before each batch, and a tick has passed since.
        tally = run(works, store, Local(executor=Here(), every=0.0), within=4.5)
        found = store.finished(work.key for work in works)
        done = {(work.number, work.neurons) for work in works if work.key in found}
        assert done == {(0, 4), (0, 8), (1, 4), (1, 8)}
        assert tally == Tally(computed=4, left=2)
        assert "2 left for want of time" in tally.text()
        assert run(works, store) == Tally(found=4, computed=2)


class Impatient(Watcher):
    """Presses Ctrl-C once something is stored."""

    def __init__(self, store):
        self.store = store

    def refresh(self, ahead):
        if self.store.count():
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_convolutional_network_is_stored_before_its_batch_is_done(tmp_path):
    works = STUDIES["cnn-256"].works("smoke", 2, {"data": "generated-images"})
    with Store(tmp_path / "whole") as store:
        run(works, store)
        whole = {row.key: row.measures for row in store.rows([work.key for work in works])}
    with Store(tmp_path / "parts") as store:
        with pytest.raises(KeyboardInterrupt):
            run(
                works, store, Local(every=1e9), watcher=Impatient(store)
            )  # both networks in one batch
        # A network is stored with all its arms, which come from one warm-up, or not at all.
        assert store.count() == len(works) // 2
        tally = run(works, store)
        assert tally == Tally(found=len(works) // 2, computed=len(works) // 2)
        assert {r.key: r.measures for r in store.rows([w.key for w in works])} == whole


def test_an_arm_added_later_goes_on_from_the_same_warm_up(tmp_path):
    pair = [tiny(), tiny(arm=Arm("random", 2))]
    with Store(tmp_path / "together") as store:
        run(pair, store)
        together = [row.measures for row in store.rows([work.key for work in pair])]
    with Store(tmp_path / "apart") as store:
        run(pair[:1], store)
        run(pair, store)
        assert [row.measures for row in store.rows([work.key for work in pair])] == together


def test_a_trial_that_fails_does_not_stop_the_others(tmp_path):
    works = [tiny(), tiny(arm=Arm("random", 200)), tiny(number=1)]  # 200 children of 32 inputs
    works += [tiny(number=2, arm=Arm("random", 200)), tiny(number=2, arm=Arm())]
    possible = {work.key for work in works if work.arm.split == "dense"}
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match=r"trials? computed.* failed .*alpha=200"):
            run(works, store)
        found = store.finished([work.key for work in works])
    assert found <= possible
    assert works[2].key in found  # its batch had no impossible arm


def test_networks_of_a_batch_that_fails_are_tried_one_by_one(tmp_path):
    # Twenty children need twenty inputs: the smaller formula has sixteen.
    arms = (Arm(), Arm("random", 20))
    works = [
        replace(tiny(arm=arm), task=Boolean(clauses, train=64, test=64))
        for clauses in (4, 8)
        for arm in arms
    ]
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match=r"2 trials computed.* 2 failed"):
            run(works, store)
        assert store.finished(work.key for work in works) == {work.key for work in works[2:]}


def _die(works, device):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("fissile.lab.batching.compute", _die)
    with Store(tmp_path) as store, pool(2) as executor:
        with pytest.raises(RunFailed, match="a process that computes was killed"):
            run([tiny()], store, Local(executor=executor, slots=2))
        assert store.claim([tiny().key]) == {tiny().key}  # nothing stays claimed


def test_a_full_disk_stops_the_run_and_keeps_what_is_stored(tmp_path):
    works = [tiny(number=number) for number in range(60)]
    with Store(tmp_path) as store:
        run(works[:5], store)
        # The database may not grow any more, as if the disk were full.
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(FileError, match="full"):
            run(works, store, Local(every=0))
        kept = store.finished(work.key for work in works)
    assert {work.key for work in works[:5]} <= kept
    assert len(kept) < len(works)
    with Store(tmp_path) as store:  # there is room again
        assert run(works, store).found == len(kept)


def test_a_watcher_hears_of_everything(tmp_path):
    class Ears(Watcher):
        def __init__(self):
            self.trials, self.shares, self.total = 0, [], None

        def start(self, total, *, work):
            self.total, self.cost = total, work

        def advance(self, count, *, work):
            self.trials += count

        def refresh(self, ahead):
            self.shares.append(ahead / self.cost)

    ears = Ears()
    with Store(tmp_path) as store:
        run([tiny(), tiny(number=1)], store, watcher=ears)
    assert ears.trials == ears.total == 2
    assert ears.shares[-1] == pytest.approx(1)


def test_results_know_what_is_missing(tmp_path):
    study = STUDIES["theory"]
    with Store(tmp_path) as store:
        wanted = Run("theory", "smoke", None, {}, "fissile run theory", "2026-01-01T00:00:00+00:00")
        store.note_run(wanted)
        nothing = load(store, wanted)
        assert not nothing.complete
        assert {verdict.status for _, verdict in nothing.verdicts} == {"no data"}
        run(study.works("smoke")[:2], store)
        some = load(store, wanted)
        assert (len(some.rows), len(some.works), some.complete) == (2, 4, False)
        run(study.works("smoke"), store)
        assert load(store, wanted).complete
        assert load(store, wanted).seconds > 0
