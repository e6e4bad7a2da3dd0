"""Batches: how trials are cut and computed, and what becomes of workers that die; without Ray."""

from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from math import inf

import pytest

from fissile.lab import batching
from fissile.lab import run as running
from fissile.lab.batching import Batch, Halt, Local, Lost, Pending, Report, least_networks
from fissile.lab.compute import TrialResult
from fissile.lab.run import RunFailed, Tally, Watcher, run
from fissile.lab.store import Provenance, Store
from fissile.lab.trial import Arm, Boolean, Contender, Features, Trial

CLIP = Features("imagenet1k-clip")
WHO = Provenance("0", "", "0", "a worker", "3")


def tiny(**changes):
    return Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1, **changes)


def several(count, **changes):
    return [tiny(number=number, **changes) for number in range(count)]


def pretended(works, *_):
    return [TrialResult(work, {"accuracy": 0.5}, 0.1) for work in works]


# --- what is pending


def test_arms_stay_together_and_only_what_is_alike_goes_side_by_side():
    arms = [tiny(number=n, arm=arm) for n in range(3) for arm in (Arm(), Arm("random", 2))]
    longer = [replace(tiny(number=n), fine_tune=2) for n in range(2)]
    pending = Pending([*arms, *longer])
    assert pending.cost == pytest.approx(sum(work.cost for work in (*arms, *longer)))
    assert pending.take(0.0) == arms[:2]
    assert pending.take(inf) == arms[2:]
    assert pending.take(inf) == longer
    assert not pending
    assert pending.cost == pytest.approx(0)


def test_a_batch_has_its_cost_and_its_networks():
    works = several(10)
    assert len(Pending(works).take(2.5 * works[0].cost)) == 3
    assert len(Pending(works).take(0.0, networks=lambda work: 4)) == 4


def test_what_comes_first():
    works = [*several(3, neurons=4), *several(3, neurons=32)]
    cheap, dear = works[0].cost, works[3].cost
    assert cheap < dear
    longest = Pending(works, rank=lambda unit: -unit.cost)
    assert [work.neurons for _ in range(6) for work in longest.take(0.0)] == [32] * 3 + [4] * 3
    other = [replace(work, fine_tune=2) for work in works[:3]]
    first = Pending([*works[:3], *other], rank=lambda unit: unit.number)
    assert [work.number for _ in range(6) for work in first.take(0.0)] == [0, 0, 1, 1, 2, 2]


def test_what_failed_comes_last_and_alone():
    works = several(6)
    pending = Pending(works)
    failed = pending.take(0.0, networks=lambda work: 2)
    pending.add_alone(failed)
    assert pending.take(inf) == works[2:]
    assert [pending.take(inf), pending.take(inf)] == [[failed[0]], [failed[1]]]
    pending.add(works)
    assert pending.clear() == works
    assert not pending
    assert pending.cost == pytest.approx(0)


# --- backends that compute


class Crowd:
    """Workers that do what they are told next: compute, die, or refuse for good."""

    def __init__(self, *orders, size=inf, slots=1):
        self.orders, self.size, self.slots = deque(orders), size, slots
        self.seen, self.busy = [], 0

    def cut(self, pending):
        free = pending and self.busy < self.slots
        return Batch(pending.take(self.size), "cpu") if free else None

    def submit(self, batch, on_steps, on_report):
        self.busy += 1
        self.seen.append(batch.works)
        future, order = Future(), self.orders.popleft() if self.orders else None
        if isinstance(order, Exception):
            future.set_exception(order)
        else:
            future.set_result(Report(pretended(batch.works), WHO, "one", 2.0))
        return future

    def result(self, future):
        self.busy -= 1
        return future.result()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batching, "compute", pretended)
    monkeypatch.setattr(running, "_POLL", 0.01)


def test_who_computed_is_stored_and_told(tmp_path):
    works, heard = several(12), []

    class Ears(Watcher):
        def worked(self, worker, trials, seconds):
            heard.append((worker, trials, seconds))

    crowd = Crowd(size=0.0, slots=3)
    with Store(tmp_path) as store:
        assert run(works, store, crowd, watcher=Ears()) == Tally(computed=12)
        assert {row.provenance for row in store.rows([work.key for work in works])} == {WHO}
    assert heard == 12 * [("one", 1, 2.0)]
    assert sorted(work.number for batch in crowd.seen for work in batch) == list(range(12))


def test_an_executor_computes_batches_side_by_side(tmp_path):
    works = several(5)
    with Store(tmp_path) as store, ThreadPoolExecutor(2) as executor:
        backend = Local(executor=executor, slots=2, every=0.0)
        assert run(works, store, backend) == Tally(computed=5)
        rows = store.rows([work.key for work in works])
    assert {row.provenance for row in rows} == {Provenance.here("cpu")}


def test_a_batch_whose_worker_dies_is_computed_by_another(tmp_path):
    works = several(4)
    crowd = Crowd(Lost("gone"), Lost("gone"), Lost("gone"))
    with Store(tmp_path) as store:
        assert run(works, store, crowd) == Tally(computed=4)
    assert crowd.seen == [works] * 4


def test_workers_that_keep_dying_are_reported_and_the_rest_is_stored(tmp_path):
    works = several(3)

    class Deadly(Crowd):
        """The first trial kills whoever has it."""

        def submit(self, batch, *rest):
            if works[0] in batch.works:
                self.orders.append(Lost("its worker died: killed"))
            return super().submit(batch, *rest)

    crowd = Deadly()
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match=r"2 trials computed.* 1 failed .*its worker died"):
            run(works, store, crowd)
        assert store.finished(work.key for work in works) == {work.key for work in works[1:]}
        assert store.claim([works[0].key])  # nothing stays claimed
    # The batch four times, then each network alone: the first of them four times more.
    assert [len(batch) for batch in crowd.seen] == [3] * 4 + [1] * 6


def test_what_a_large_worker_lost_is_cut_for_a_small_one(tmp_path):
    class Shrinking(Crowd):
        """Once the large worker has died there is none for a while, and then a small one."""

        looks = 0

        def cut(self, pending):
            self.looks += 1
            if self.looks == 2:
                self.size, self.slots = 0.0, 0
            if self.looks == 4:
                self.slots = 1
            return super().cut(pending)

    crowd = Shrinking(Lost("gone"))
    with Store(tmp_path) as store:
        assert run(several(4), store, crowd) == Tally(computed=4)
    assert [len(batch) for batch in crowd.seen] == [4, 1, 1, 1, 1]


def test_being_called_back_is_nobodys_fault(tmp_path):
    crowd = Crowd(*[CancelledError()] * 20)
    with Store(tmp_path) as store:
        assert run(several(2), store, crowd) == Tally(computed=2)


def test_networks_that_all_kill_their_workers_are_given_up_side_by_side(tmp_path):
    crowd = Crowd(*[Lost("its worker died")] * 100, slots=3)
    with Store(tmp_path) as store, pytest.raises(RunFailed, match=r"3 failed \(3 with: its worker"):
        run(several(3), store, crowd)
    assert len(crowd.seen) < 30


def test_what_cannot_go_on_stops_the_run_in_one_sentence(tmp_path):
    crowd = Crowd(None, Halt("the worker on there has another version"), size=0.0)
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match="another version; what is stored is kept"):
            run(several(3), store, crowd)
        assert store.count() == 1


def test_a_result_that_was_given_up_and_comes_after_all_counts_once(tmp_path):
    works = several(2)

    class Late(Crowd):
        def submit(self, batch, *rest):
            if not self.seen:  # lost to us, while it is being stored
                with Store(tmp_path) as other:
                    other.add(pretended(batch.works), WHO)
            return super().submit(batch, *rest)

    crowd = Late(Lost("unheard of"))
    with Store(tmp_path) as store:
        tally = run(works, store, crowd)
        assert store.count() == 2
    assert tally == Tally(elsewhere=2)
    assert len(crowd.seen) == 1


def test_contenders_of_a_data_set_are_one_graph_on_a_gpu():
    cells = [Contender(Features("clinc150-minilm"), method=name) for name in ("dense", "l1")]
    others = several(3)
    assert least_networks(cells[0], "cuda") == inf
    assert least_networks(cells[0], "cuda", contenders=1) == 1  # shared by two workers
    assert least_networks(others[0], "cuda") == 1
    assert least_networks(others[0], "cpu", cores=2) == 2
    mixed, local = Pending([*cells, *others]), Local("cuda", slots=4, every=0.0)
    assert sorted(len(local.cut(mixed)[0]) for _ in range(4)) == [1, 1, 1, 2]
    assert not mixed
    assert local.cut(mixed) is None
