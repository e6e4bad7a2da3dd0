"""Lanes: how trials are cut and dealt, and what becomes of workers that die; without Ray."""

from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import inf
from unittest import mock

import pytest

from fissile.lab import run as running
from fissile.lab.batching import (
    Halt,
    Here,
    Lane,
    Lost,
    Pending,
    Recalled,
    Report,
    memory_of,
    network_bytes,
    process_bytes,
)
from fissile.lab.classifier import contest
from fissile.lab.compute import TrialResult, compute
from fissile.lab.run import RunFailed, Tally, Watcher, run
from fissile.lab.store import Provenance, Store
from fissile.lab.trial import Arm, Boolean, Contender, Features, Images, Sampling, Trial

CLIP = Features("imagenet1k-clip")
WHO = Provenance("0", "", "0", "a worker", "3")


def tiny(**changes):
    return Trial(Boolean(train=64, test=64), warm_up=1, fine_tune=1, **changes)


def several(count, **changes):
    return [tiny(number=number, **changes) for number in range(count)]


def pretended(works, device="cpu"):
    return [TrialResult(work, {"accuracy": 0.5}, 0.1) for work in works]


# --- what is pending


def test_arms_stay_together_and_only_what_is_alike_goes_side_by_side():
    arms = [tiny(number=n, arm=arm) for n in range(3) for arm in (Arm(), Arm("random", 2))]
    longer = [replace(tiny(number=n), fine_tune=2) for n in range(2)]
    pending = Pending([*arms, *longer])
    assert len(pending) == 8
    assert pending.cost == pytest.approx(sum(work.cost for work in (*arms, *longer)))
    assert pending.take(0.0) == arms[:2]
    assert pending.take(inf) == arms[2:]
    assert pending.take(inf) == longer
    assert not pending
    assert pending.cost == pytest.approx(0)


def test_a_batch_has_its_cost_its_networks_and_no_more_than_its_memory():
    works = several(10)
    one = works[0].cost
    assert len(Pending(works).take(2.5 * one)) == 3
    assert len(Pending(works).take(0.0, networks=4)) == 4
    need = network_bytes(works[0])
    assert len(Pending(works).take(inf, memory=3.5 * need)) == 3
    assert len(Pending(works).take(inf, memory=need / 2)) == 1  # or it could never be computed


def test_a_batch_needs_memory_for_its_data_too():
    works = [Trial(Features("cifar100-clip"), neurons=4, number=number) for number in range(3)]
    data = 4 * 60_000 * 512
    assert memory_of(works) > sum(network_bytes(work) for work in works) + data
    assert len(Pending(works).take(inf, memory=data + 2.5 * network_bytes(works[0]))) < 3


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
    failed = pending.take(0.0, networks=2)
    pending.alone(failed)
    assert pending.take(inf) == works[2:]
    assert [pending.take(inf), pending.take(inf)] == [[failed[0]], [failed[1]]]
    pending.add(works)
    assert pending.clear() == 6
    assert not pending
    assert pending.cost == 0


def test_batches_shrink_towards_the_end_so_that_all_workers_have_one():
    works = several(400)
    one = works[0].cost
    lane = Lane(Here(), size=19.5 * one, least=2.5 * one)
    pending, sizes = Pending(works), []
    while pending:
        sizes.append(len(lane.cut(pending, slots=4)))
    assert sizes[0] == 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-4:-1] == [3, 3, 3]
    steady, pending = Lane(Here(), size=19.5 * one), Pending(works)
    assert {len(steady.cut(pending, slots=4)) for _ in range(20)} == {20}


# --- lanes that compute


class Crowd(Executor):
    """Workers that do what they are told next: compute, die, or refuse for good."""

    def __init__(self, *orders, name="one"):
        self.orders, self.name, self.seen = deque(orders), name, []

    def submit(self, fn, /, works, device):
        self.seen.append(list(works))
        future, order = Future(), self.orders.popleft() if self.orders else None
        if isinstance(order, Exception):
            future.set_exception(order)
        else:
            future.set_result(Report((order or fn)(works, device), WHO, self.name, 2.0))
        return future


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(running, "compute", pretended)
    monkeypatch.setattr(running, "_POLL", 0.01)


def test_lanes_take_from_one_pool_what_suits_each(tmp_path):
    works, heard = several(12), []

    class Ears(Watcher):
        def worked(self, worker, trials, seconds):
            heard.append((worker, trials, seconds))

    large = Lane(Crowd(name="large"), "cuda", size=inf, networks=1)
    large.memory = memory_of(works[:4])
    small = Lane(Crowd(name="small"), size=0.0)
    with Store(tmp_path) as store:
        assert run(works, store, lanes=lambda: [large, small], watcher=Ears()) == Tally(computed=12)
        assert {row.provenance for row in store.rows([work.key for work in works])} == {WHO}
    assert {len(batch) for batch in large.executor.seen} <= {4, 3, 2, 1}
    assert max(map(len, large.executor.seen)) == 4
    assert {len(batch) for batch in small.executor.seen} == {1}
    assert sum(trials for _, trials, _ in heard) == 12
    assert {worker for worker, *_ in heard} == {"large", "small"}
    done = [work for crowd in (large, small) for batch in crowd.executor.seen for work in batch]
    assert sorted(work.number for work in done) == list(range(12))


def test_a_batch_whose_worker_dies_is_computed_by_another(tmp_path):
    works = several(4)
    crowd = Crowd(Lost("gone"), Lost("gone"), Lost("gone"))
    with Store(tmp_path) as store:
        assert run(works, store, lanes=lambda: [Lane(crowd, size=inf)]) == Tally(computed=4)
    assert crowd.seen == [works] * 4


def test_workers_that_keep_dying_are_reported_and_the_rest_is_stored(tmp_path):
    works = several(3)

    class Deadly(Crowd):
        """The first trial kills whoever has it."""

        def submit(self, fn, /, batch, device):
            if works[0] in batch:
                self.orders.append(Lost("its worker died: killed"))
            return super().submit(fn, batch, device)

    crowd = Deadly()
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match=r"2 trials computed.* 1 failed .*its worker died"):
            run(works, store, lanes=lambda: [Lane(crowd, size=inf)])
        assert store.finished(work.key for work in works) == {work.key for work in works[1:]}
        assert store.claim([works[0].key])  # nothing stays claimed
    # The batch four times, then each network alone: the first of them four times more.
    assert [len(batch) for batch in crowd.seen] == [3] * 4 + [1] * 6


def test_what_a_large_worker_lost_is_cut_for_a_small_one(tmp_path):
    works = several(4)
    large, small = Lane(Crowd(Lost("gone")), size=inf), Lane(Crowd(), size=0.0, slots=0)
    looks = []

    def lanes():
        looks.append(None)
        if len(looks) == 3:
            large.gone, large.slots, small.slots = True, 0, 1
        return [large, small]

    with Store(tmp_path) as store:
        assert run(works, store, lanes=lanes) == Tally(computed=4)
    assert (len(large.executor.seen[0]), len(small.executor.seen)) == (4, 4)


def test_being_called_back_is_nobodys_fault(tmp_path):
    crowd = Crowd(*[Recalled("called back")] * 20)
    with Store(tmp_path) as store:
        assert run(several(2), store, lanes=lambda: [Lane(crowd, size=inf)]) == Tally(computed=2)


def test_networks_that_all_kill_their_workers_are_given_up_side_by_side(tmp_path):
    crowd = Crowd(*[Lost("its worker died")] * 100)
    with Store(tmp_path) as store, pytest.raises(RunFailed, match=r"3 failed \(3 with: its worker"):
        run(several(3), store, lanes=lambda: [Lane(crowd, size=inf, slots=3)])
    assert len(crowd.seen) < 30


def test_what_cannot_go_on_stops_the_run_in_one_sentence(tmp_path):
    crowd = Crowd(None, Halt("the worker on there has another version"))
    with Store(tmp_path) as store:
        with pytest.raises(RunFailed, match="another version; what is stored is kept"):
            run(several(3), store, lanes=lambda: [Lane(crowd, size=0.0)])
        assert store.count() == 1


class Silent(Executor):
    """Workers that are gone: what they have is called back."""

    def submit(self, fn, /, works, device):
        return _Recalled()


class _Recalled(Future):
    def cancel(self):
        self.set_exception(Recalled("called back"))
        return True


def test_what_lies_with_workers_that_have_gone_is_called_back(tmp_path):
    gone, here = Lane(Silent(), "cuda", size=inf), Lane(Crowd(), slots=0)
    looks = []

    def lanes():
        looks.append(None)
        if len(looks) == 4:
            gone.gone, gone.slots, here.slots = True, 0, 1
        return [gone, here]

    with Store(tmp_path) as store:
        assert run(several(3), store, lanes=lanes) == Tally(computed=3)


def test_a_result_that_was_given_up_and_comes_after_all_counts_once(tmp_path):
    works = several(2)

    class Late(Crowd):
        def submit(self, fn, /, batch, device):
            if not self.seen:  # lost to us, while it is being stored
                with Store(tmp_path) as other:
                    other.add(pretended(batch), WHO)
            return super().submit(fn, batch, device)

    crowd = Late(Lost("unheard of"))
    with Store(tmp_path) as store:
        tally = run(works, store, lanes=lambda: [Lane(crowd, size=inf)])
        assert store.count() == 2
    assert tally == Tally(elsewhere=2)
    assert len(crowd.seen) == 1


def test_contenders_of_a_data_set_are_one_graph_on_a_gpu():
    cells = [Contender(Features("clinc150-minilm"), method=name) for name in ("dense", "l1")]
    others = several(3)
    least = running.side_by_side([*cells, *others], "cuda")
    assert (least(cells[0]), least(others[0])) == (2, 1)
    assert running.side_by_side(cells, "cuda", workers=2)(cells[0]) == 1
    assert running.side_by_side(others, "cpu", cores=2)(others[0]) == 2
    mixed = Pending([*cells, *others])
    sizes = [len(mixed.take(0.0, least)) for _ in range(4)]
    assert sorted(sizes) == [1, 1, 1, 2]
    assert not mixed


# --- memory


def test_wider_networks_and_more_children_need_more_memory():
    for task in (Boolean(8), CLIP, Images()):
        wide = [network_bytes(Trial(task, neurons)) for neurons in (2, 8, 64, 512)]
        assert wide == sorted(set(wide))
        children = [network_bytes(Trial(task, 8, arm=Arm("random", alpha))) for alpha in (2, 4, 8)]
        assert children == sorted(set(children))
    depths = [network_bytes(Trial(CLIP, 8, depth=depth)) for depth in (2, 5, 9)]
    assert depths == sorted(set(depths))
    widths = [network_bytes(Contender(CLIP, neurons, "dense")) for neurons in (2, 8, 64, 512)]
    assert widths == sorted(set(widths))
    assert network_bytes(Sampling(networks=10)) < network_bytes(Sampling(networks=1_000))


def test_memory_holds_at_least_weights_moments_and_gradients():
    bank = 4 * 4 * 128 * (512 + 1_000)
    assert bank < network_bytes(Trial(CLIP, 128)) < 10 * bank
    assert network_bytes(Trial(Images("cifar100"))) > 16 * _parameters(Images("cifar100"))
    assert process_bytes([]) < process_bytes([Trial()]) < process_bytes([Contender(CLIP)])


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
    assert max(sizes) < sum(network_bytes(work) for work in works) < 20 * max(sizes)
