"""A cluster's nodes, what a worker does, and what is shown of it; without a cluster."""

import logging
import os
import pickle
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fissile._common import cores
from fissile._common.errors import FissileError
from fissile.data.generated import features
from fissile.data.sets import Labelled
from fissile.lab import ray as cluster
from fissile.lab.batching import Batch, Halt, Lost, Pending
from fissile.lab.classifier import Arrays, Classifiers, load
from fissile.lab.compute import compute
from fissile.lab.ray import PROCESS, Node, RayBackend, answers, nodes_of, shares_of, workers
from fissile.lab.run import Bar
from fissile.lab.store import Provenance
from fissile.lab.trial import Boolean, Features, Images, Sampling, Trial

WORKS = [Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1)]

# --- a cluster's nodes


def told(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


def test_nodes_are_read_from_what_ray_says():
    said = [told(CPU=4.0, GPU=1.0, memory=8e9), told(CPU=2.0, memory=4e9), told(False, CPU=8.0)]
    assert nodes_of(said) == [Node(4, 1, 8e9), Node(2, 0, 4e9)]
    assert nodes_of([told(object_store_memory=1e9)])[0].cpus == 0


@pytest.mark.parametrize(
    ("device", "nodes", "shares"),
    [
        (None, [Node(2, 0, 20e9)], (2, 0, 1)),
        (None, [Node(16, 1, 64e9), Node(4, 0, 16e9)], (8 + 4, 8, 8)),  # a core for each on the GPU
        (None, [Node(16, 4, 64e9)], (8, 8, 2)),
        (None, [Node(1, 1, 8e9)], (0, 1, 1)),
        ("cpu", [Node(16, 1, 64e9)], (16, 0, 1)),
        ("cuda", [Node(16, 1, 64e9), Node(4, 0, 16e9)], (0, 8, 8)),
        ("cuda", [Node(4, 0, 16e9)], (0, 0, 1)),
        (None, [Node(64, 0, 10 * PROCESS)], (10, 0, 1)),  # no more than memory suffices for
        (None, [], (0, 0, 1)),
    ],
)
def test_how_many_workers_a_cluster_has(device, nodes, shares):
    found = shares_of(nodes, WORKS, device)
    assert found == shares


def test_a_convolutional_network_has_a_gpu_to_itself():
    works = [Trial(Images("cifar100"), neurons=4)]
    assert shares_of([Node(16, 1, 64e9)], works, "cuda").per_gpu == 1


# --- a cluster that has no workers yet


@pytest.fixture
def asked(monkeypatch):
    """What the autoscaler is asked for, on a cluster that the first look finds without nodes."""
    sdk, found = pytest.importorskip("ray.autoscaler.sdk"), []
    monkeypatch.setattr(sdk, "request_resources", lambda bundles: found.append(bundles))
    monkeypatch.setattr(cluster, "_LOOK", 0.0)
    return found


def looks(monkeypatch, *nodes):
    """Let every look at the cluster find the next of these, and then the last."""
    left = list(nodes)
    monkeypatch.setattr(cluster, "_nodes", lambda: left.pop(0) if len(left) > 1 else left[0])


def test_workers_that_come_later_are_waited_for_and_asked_for(monkeypatch, caplog, asked):
    looks(monkeypatch, [], [Node(0, 0, 1e9)], [Node(0, 0, 1e9)], [Node(4, 0, 64e9)])
    mine = RayBackend(WORKS, wait=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a core for us: waiting for workers (300 s) ..." in caplog.text
    assert [mine.cut(Pending(WORKS)) for _ in range(3)] == [None, None, (WORKS, "cpu")]
    assert asked == [[{"CPU": 1}]]  # once
    assert mine.slots == 5
    mine.dismiss()
    assert asked[1:] == [[]]


def test_more_workers_are_asked_for_where_there_is_more_to_do(monkeypatch, asked):
    looks(monkeypatch, [])
    works = [Sampling(networks=400_000_000)]
    assert 8 < works[0].cost / cluster.PATIENCE < 9
    RayBackend(works, device="cuda", wait=True)
    assert asked == [9 * [{"CPU": 1, "GPU": 1}]]
    RayBackend(works, device="cuda", jobs=2, wait=True)
    assert asked[1:] == [2 * [{"CPU": 1, "GPU": 1}]]


def test_workers_that_do_not_come_are_an_error(monkeypatch, caplog, asked):
    looks(monkeypatch, [Node(4, 0, 64e9)])
    with pytest.raises(FissileError, match="has a GPU for us; add one that has"):
        RayBackend(WORKS, device="cuda")
    assert not caplog.records  # nobody would come
    monkeypatch.setattr(cluster, "PATIENCE", 1e-6)
    with pytest.raises(Halt, match="has had no worker for 0 seconds"):
        RayBackend(WORKS, device="cuda", jobs=1, wait=True).cut(Pending(WORKS))


def test_workers_that_all_go_are_waited_for(monkeypatch, asked):
    looks(monkeypatch, [Node(4, 0, 64e9)], [], [], [Node(4, 0, 64e9)])
    mine = RayBackend(WORKS)
    slots = []
    for _ in range(3):
        mine.cut(Pending())
        slots.append(mine.slots)
    assert slots == [0, 0, 5]
    mine.dismiss()
    assert not asked


# --- batches for a cluster


@pytest.fixture
def sent(monkeypatch, asked):
    """The tasks that a cluster with a GPU and four cores has; they are never run."""
    ray, tasks = pytest.importorskip("ray"), []

    class Task:
        def options(self, **options):
            self.wanted = options
            return self

        def remote(self, *payload):
            reference = SimpleNamespace(answer=Future(), wanted=self.wanted, cancelled=False)
            reference.future = lambda: reference.answer
            tasks.append(reference)
            return reference

    def cancel(reference, *, force):
        reference.cancelled = True
        reference.answer.set_exception(ray.exceptions.TaskCancelledError())

    monkeypatch.setattr(ray, "remote", lambda function: Task())
    monkeypatch.setattr(ray, "cancel", cancel)
    looks(monkeypatch, [Node(5, 1, 64e9)])
    return tasks


def several(count):
    return [replace(WORKS[0], number=number) for number in range(count)]


def test_batches_shrink_towards_the_end_so_that_all_workers_have_one(sent):
    works = several(400)
    one = works[0].cost
    backend, pending = RayBackend(works, device="cpu", jobs=4, every=19.5 * one), Pending(works)
    sizes = []
    while pending:
        sizes.append(len(backend.cut(pending)[0]))
    assert sizes[0] == 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-4:-1] == [3, 3, 3]


def test_workers_with_a_gpu_have_batches_first(sent):
    backend, pending = RayBackend(several(12), every=0.0), Pending(several(12))
    devices = []
    while (batch := backend.cut(pending)) is not None:
        devices.append(batch.device)
        backend.submit(batch)
    assert devices == 3 * ["cuda"] + 4 * ["cpu"]  # one more than there are workers
    assert [task.wanted["num_gpus"] for task in sent] == 3 * [0.5] + 4 * [0]
    assert sent[-1].wanted["memory"] == PROCESS


def test_what_lies_with_workers_that_have_gone_is_called_back(monkeypatch, sent):
    backend = RayBackend(several(3), every=1e9)
    future = backend.submit(backend.cut(Pending(several(3))))
    looks(monkeypatch, [Node(4, 0, 64e9)])
    assert backend.cut(Pending(several(1)))[1] == "cpu"
    assert sent[0].cancelled
    with pytest.raises(CancelledError):
        backend.result(future)


def test_a_batch_that_no_machine_is_large_enough_for_any_more_is_called_back(monkeypatch, sent):
    backend = RayBackend(several(3), device="cpu")
    backend.submit(backend.cut(Pending(several(3))))
    looks(monkeypatch, [Node(4, 0, 7e8)])
    backend.cut(Pending())
    assert sent[0].wanted["memory"] > 7e8
    assert sent[0].cancelled


def test_what_becomes_of_a_batch(sent):
    from ray import exceptions

    backend = RayBackend(several(1), device="cpu")
    died = exceptions.WorkerCrashedError()
    for answer, error in {
        died: Lost,
        exceptions.RayTaskError("f", "its trace", died): Lost,  # it could not read its data
        exceptions.RayTaskError("f", "its trace", FissileError("no such split")): FissileError,
        "the worker has another version": Halt,
    }.items():
        future = backend.submit(Batch(several(1), "cpu"))
        told = sent[-1].answer.set_result if isinstance(answer, str) else future.set_exception
        told(answer)
        with pytest.raises(error):
            backend.result(future)


def test_a_data_set_that_has_changed_is_the_batch_s_own_error(monkeypatch, sent):
    def changed(task):
        raise FissileError("the files have changed")

    monkeypatch.setattr(cluster, "load", changed)
    backend = RayBackend(several(1), device="cpu")
    future = backend.submit(Batch([Trial(Features("cifar100-clip"))], "cpu"))
    with pytest.raises(FissileError, match="the files have changed"):
        backend.result(future)


# --- what a worker does


@pytest.fixture
def unconfined(monkeypatch):
    monkeypatch.setattr(workers, "keep_to", lambda count: None)


def test_a_worker_reports_what_it_computed_and_who_it_is(unconfined):
    work = Sampling(networks=10)
    report = workers.perform(pickle.dumps((compute, [work], "cpu")))
    assert [one.work for one in report.outcomes] == [work]
    assert report.provenance == Provenance.here("cpu")
    assert report.worker.endswith(f":{os.getpid()}")
    assert report.seconds > 0


def look(works, device, arrays):
    """Stand in for computing: look at the data set."""
    return load(works[0].task, arrays)


def load_data(trial, found):
    """Return the arrays as a bank takes them."""
    return Classifiers("cpu", Arrays("cifar100-clip", found, "f")).spec(trial).data


def test_a_worker_reads_the_data_set_it_is_given_in_place(unconfined):
    made = features(inputs=512, classes=100, train=200, test=100)
    fixed = Labelled(*(np.array(a) for a in (made.x, made.y, made.x_test, made.y_test)))
    for array in (fixed.x, fixed.y, fixed.x_test, fixed.y_test):
        array.flags.writeable = False  # as arrays in Ray's object store are
    works = [Trial(Features("cifar100-clip", fingerprint="f"), warm_up=1, fine_tune=1)]
    seen = workers.perform(pickle.dumps((look, works, "cpu")), Arrays("cifar100-clip", fixed, "f"))
    assert seen.outcomes is fixed
    assert load_data(works[0], fixed).x.shape == (200, 512)


def test_a_data_set_that_is_handed_over_must_be_the_one_that_is_meant():
    made, work = features(inputs=8, classes=2, train=20, test=10), Features("cifar100-clip")
    arrays = Arrays("cifar100-clip", made, "one")
    assert load(replace(work, fingerprint="one"), arrays) is made
    with pytest.raises(FissileError, match="now hold one, not two"):
        load(replace(work, fingerprint="two"), arrays)


def test_a_process_keeps_to_its_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "_most", None)
    threads = torch.get_num_threads()
    assert cores.cores() == 64
    try:
        cores.keep_to(1)
        assert (cores.cores(), torch.get_num_threads()) == (1, 1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("given", "seen", "number"),
    [([], "", 0), ([1], "", 1), (["3"], "2,3", 1), ([2], "2,3", 0), (["1"], "0,1", 1)],
)
def test_a_worker_takes_the_gpu_it_is_given(monkeypatch, given, seen, number):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert workers.given_gpu() == number


def test_a_worker_of_another_version_says_so_before_it_reads_anything():
    said = workers.entry()("9.9", b"not even a pickle", None)
    assert "and this is 9.9; install the same version everywhere" in said


# --- what is shown


def test_the_bar_has_a_line_for_every_worker_but_not_for_too_many():
    with Bar() as bar:
        bar.start(100, work=10.0)
        bar.worked("a:1", 10, 4.0)
        bar.worked("a:1", 10, 4.0)
        assert bar._lines() == ["  a:1: 20 trials, 2.5 a second"]
        for number in range(10):
            bar.worked(f"b:{number}", 1, 1.0)
        lines = bar._lines()
    assert len(lines) == 9
    assert lines[-1] == "  and 3 more"


def test_nobody_answers_where_nobody_is():
    assert not answers("127.0.0.1:1")
    assert not answers("ray://127.0.0.1:1")
    assert not answers("nonsense")
