"""The lab on Ray: clusters on this machine that lose workers, nodes and drivers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import FISSILE, LONG_RUN, QUIET, called, stored_trials

from fissile.data.features import write_features
from fissile.data.generated import features
from fissile.lab.run import Tally, run
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

WORKERS = Path(__file__).parent / "workers"
WORKS = STUDIES["theory"].works("paper", 2, {"networks": 150})


class Local:
    """A cluster in a process of its own."""

    def __init__(self, folder):
        nowhere = {"FISSILE_DATA": str(folder / "nowhere"), "FISSILE_LAB": str(folder / "nowhere")}
        self.process = subprocess.Popen(
            [sys.executable, WORKERS / "ray_cluster.py"],
            cwd=folder, env=os.environ | nowhere, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.address = self.process.stdout.readline().strip()
        self.manned = False

    def man(self):
        if not self.manned:
            self.tell("large")
            self.manned = True

    def tell(self, word):
        print(word, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        with contextlib.suppress(ProcessLookupError):  # what Ray leaves of nodes that were killed
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def unmanned(tmp_path_factory):
    cluster = Local(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def local(unmanned):
    unmanned.man()
    return unmanned


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with Store(folder) as store:
        run(WORKS, store)
    return measures(folder, WORKS)


def measures(folder, works):
    with Store(folder, create=False) as store:
        return {row.key: row.measures for row in store.rows([work.key for work in works])}


def start(folder, *words, jobs=1):
    return subprocess.Popen(
        [FISSILE, "run", *LONG_RUN, "--jobs", str(jobs), "--on", "ray", *words, "--out", folder],
        env=os.environ | QUIET, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process, code=0):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == code, out
    assert "Traceback" not in out
    return out


def wait_for(process, folder, count):
    deadline = time.monotonic() + 120
    while stored_trials(folder) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def living():
    """Return every process: its id, its parent, its session and what it is called."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            found.append((int(folder.name), int(parent), int(session), name))
    return found


def below(process):
    """Return the ids of a driver's own cluster: its raylet, and all that came after."""
    found, every = {process.pid}, living()
    for _ in range(5):
        found |= {pid for pid, parent, *_ in every if parent in found}
    assert any(b"raylet" in name for pid, *_, name in every if pid in found)
    return found - {process.pid}


def wait_until_gone(ids, but=b"\n"):
    deadline = time.monotonic() + 60
    while left := [name for pid, *_, name in living() if pid in ids and but not in name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def busy(local):
    """Return the workers of a cluster that compute."""
    raylets = {pid for pid, parent, *_ in living() if parent == local.process.pid}
    return [pid for pid, parent, _, name in living() if parent in raylets and b"fissile" in name]


def test_options_that_do_not_go_together(tmp_path):
    def refused(*words):
        return called("run", "theory", *words, "--out", tmp_path, code=1).stderr

    assert "--address is that of a Ray cluster" in refused("--address", "127.0.0.1:6379")
    assert "--device cuda:1" in refused("--on", "ray", "--device", "cuda:1")
    assert "no Ray cluster answers at 127.0.0.1:1;" in refused(
        "--on", "ray", "--address", "127.0.0.1:1"
    )


@pytest.mark.slow
def test_what_a_laptop_has_finished_a_cluster_does_not_repeat(unmanned, tmp_path, monkeypatch):
    # The features are where the driver finds them, and nobody else.
    made = features(inputs=512, classes=100, train=1000, test=200)
    write_features(tmp_path / "cifar100-clip-vit-b-16.npz", made)
    monkeypatch.setenv("FISSILE_DATA", str(tmp_path))
    lab, other = tmp_path / "lab", tmp_path / "other"
    ask = ("run", "interference", "cifar100", "--scale", "smoke", "--trials", "1", "--out")
    here = called(*ask, lab, "--only", "arm=dense").stdout
    on_ray = ("--on", "ray", "--address", unmanned.address, "--device", "cpu", "--jobs", "1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([FISSILE, *ask, lab, *on_ray], **pipes) as there:
        # The cluster has no worker yet: it is waited for.
        assert "has a core for us: waiting for workers (300 s) ..." in there.stderr.readline()
        unmanned.man()
        out, err = there.communicate(timeout=120)
    assert there.returncode == 0, err
    done = int(here.partition(" trials computed")[0].split()[-1])
    assert 0 < done < stored_trials(lab)
    assert f"{stored_trials(lab) - done} trials computed, {done} found" in out
    assert " a second" in err  # a line for every worker
    # And the other way round: a laptop finds everything, and comes to the same numbers alone.
    assert f"0 trials computed, {stored_trials(lab)} found" in called(*ask, lab).stdout
    called(*ask, other)
    with Store(lab) as ours, Store(other) as theirs:
        works = [w for r in ours.runs() for w in STUDIES[r.study].works("smoke", 1, r.changes)]
        assert {row.key for row in ours.rows([w.key for w in works])} == {w.key for w in works}
        assert {r.key: r.measures for r in ours.rows([w.key for w in works])} == {
            r.key: r.measures for r in theirs.rows([w.key for w in works])
        }


@pytest.mark.slow
def test_nobody_outlives_a_driver_that_is_stopped_or_killed(tmp_path, undisturbed):
    # A cluster of the driver's own: by Ctrl-C, then by kill -9.
    process = start(tmp_path)
    wait_for(process, tmp_path, 10)
    ids = below(process)
    process.send_signal(signal.SIGINT)
    assert "trials; the same command goes on" in ended(process, 130)
    wait_until_gone(ids)
    process = start(tmp_path)
    wait_for(process, tmp_path, stored_trials(tmp_path) + 10)
    ids = below(process)
    process.kill()
    wait_until_gone(ids, but=b"Agent")  # Ray's own agents notice it only after a minute
    process.communicate()
    kept = stored_trials(tmp_path)
    assert 20 <= kept < len(WORKS)
    with Store(tmp_path) as store:
        assert run(WORKS, store) == Tally(found=kept, computed=len(WORKS) - kept)
    assert measures(tmp_path, WORKS) == undisturbed


@pytest.mark.slow
def test_a_worker_that_is_killed_and_a_node_that_disappears_cost_nothing(
    local, tmp_path, undisturbed
):
    local.tell("small")
    process = start(tmp_path, "--address", local.address, jobs=2)
    wait_for(process, tmp_path, 10)
    while not (found := busy(local)):  # between two tasks
        assert process.poll() is None
    os.kill(found[0], signal.SIGKILL)
    wait_for(process, tmp_path, 25)
    local.tell("remove")
    out = ended(process)
    assert f"{len(WORKS)} trials computed, 0 found in the store" in out
    assert measures(tmp_path, WORKS) == undisturbed
    with Store(tmp_path) as store:
        assert run(WORKS, store) == Tally(found=len(WORKS))


@pytest.fixture(scope="module")
def scenes(local, tmp_path_factory):
    """What became of trials that no study has; at the end of the last of them the cluster goes."""
    folder = tmp_path_factory.mktemp("scenes")
    command = [sys.executable, WORKERS / "ray_driver.py", local.address, folder]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        wait_for(process, folder / "lost", 5)
        local.tell("end")
        found = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    return json.loads(found.splitlines()[-1])  # what comes before it is Ray's


@pytest.mark.slow
def test_a_task_that_fails_is_told_by_its_own_error_and_the_others_are_stored(scenes):
    assert "2 trials computed" in scenes["failing"]["said"]
    assert "alpha=200" in scenes["failing"]["said"]
    assert [number for number, _ in scenes["failing"]["stored"]] == [0, 2]


@pytest.mark.slow
def test_a_trial_that_kills_its_workers_does_not_stop_the_others(scenes):
    assert "2 trials computed" in scenes["dying"]["said"]
    assert "its worker died" in scenes["dying"]["said"]
    assert [number for number, _ in scenes["dying"]["stored"]] == [0, 2]


@pytest.mark.slow
def test_workers_of_both_kinds_take_part_with_one_core_each(scenes):
    seen = [measures for _, measures in scenes["mixed"]["stored"]]
    assert len(seen) == 6
    assert {one["gpu"] for one in seen} == {True, False}
    assert {(one["cores"], one["threads"]) for one in seen} == {(1, 1)}


@pytest.mark.slow
def test_a_data_set_comes_to_the_cluster_once_and_not_with_every_task(scenes):
    assert scenes["data"]["puts"] == ["cifar100-clip"]
    assert len(scenes["data"]["stored"]) == 4


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused(scenes):
    assert "this is 9.9; install the same version everywhere" in scenes["mismatched"]["said"]
    assert not scenes["mismatched"]["stored"]


@pytest.mark.slow
def test_a_cluster_that_is_gone_is_one_clear_error(scenes, local):
    said = scenes["lost"]["said"]
    assert f"the cluster at {local.address} does not answer any more" in said
    assert "what is stored is kept: the same command goes on" in said
    assert 5 <= len(scenes["lost"]["stored"]) < len(WORKS)
