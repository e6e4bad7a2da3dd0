"""Expansion and training on every device at hand; needs neither hypothesis nor files."""

import copy

import numpy as np
import pytest
import torch
from bank_data import assert_same

from fissile import MLP, Rewire, dropconnect, expand, nonzeros, to_dense, to_masked
from fissile.bank import Bank, Data, Dense, DropConnect, Dynamic, Expand, Spec
from fissile.layers import SparseLinear

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SPLITS = ["random", "gram", "2:4", "overlapping"]


def step(model, optimizer):
    (
        model(torch.randn(32, 16, device=next(model.parameters()).device)) - 1
    ).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", SPLITS)
def test_the_split_and_the_budget_are_the_same_on_every_device(device, split):
    torch.manual_seed(0)
    dense = MLP([16, 8, 5])
    here = expand(dense, 2, split)
    there = expand(copy.deepcopy(dense).to(device), 2, split)
    for one, other in zip(here.modules(), there.modules(), strict=True):
        if isinstance(one, SparseLinear):
            assert torch.equal(one.pattern(), other.pattern().cpu())
    count = nonzeros(there)
    optimizer = torch.optim.AdamW(there.parameters(), 1e-2)
    for _ in range(5):
        step(there, optimizer)
    assert nonzeros(there) == count
    values = [(m.weight != 0).sum() for m in to_dense(there).modules() if hasattr(m, "weight")]
    assert int(sum(values)) <= count.weights
    assert nonzeros(there.to("cpu").to(device)) == count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_training_time_arms_on_every_device(device, grow):
    torch.manual_seed(0)
    dense = MLP([16, 8, 5]).to(device)
    optimizer = torch.optim.Adam(dense.parameters(), 1e-2)
    step(dense, optimizer)
    wide = to_masked(expand(dense, 2, optimizer=optimizer), optimizer=optimizer)
    rewire, count = Rewire(wide, optimizer, every=2, grow=grow), nonzeros(wide)
    for _ in range(4):
        (wide(torch.randn(32, 16, device=device)) - 1).square().mean().backward()
        optimizer.step()
        rewire.step()
        optimizer.zero_grad()
    assert nonzeros(wide) == count
    control = dropconnect(MLP([16, 8, 5]).to(device), 2)
    step(control, torch.optim.Adam(control.parameters(), 1e-2))


def small_task():
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Data(x[:200], y[:200], x[200:], y[200:])


ARMS = {
    "dense": Dense(),
    "split": Expand(2),
    "fresh": Expand(2, moments="fresh"),
    "drop": DropConnect(2),
    "dynamic": Dynamic(2, every=3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_bank_on_every_device_agrees_with_the_plain_one_on_the_processor(device, engine):
    data = small_task()
    specs = [Spec([16, 8, 1], data, seed=s) for s in range(3)]
    specs += [Spec([16, 5, 6, 5, 2], data, seed=9, layer_norm=True)]
    banks = []
    for where, how in (("cpu", "plain"), (device, engine)):
        bank = Bank(specs, device=where, engine=how)
        bank.train(until=1)
        bank = bank.branch(ARMS)
        bank.train(until=3)
        banks.append(bank)
    assert torch.equal(banks[0].nonzeros, banks[1].nonzeros)
    for index in range(len(banks[0])):
        assert_same(*(bank.take(index)[0].cpu() for bank in banks), tolerance=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [False, True])
def test_networks_go_out_and_come_back_on_every_device(device, norm):
    specs = [Spec([16, 8, 1], small_task(), seed=s, layer_norm=norm) for s in range(3)]
    bank, twin = (Bank(specs, device=device).branch({"": Expand(2)}) for _ in range(2))
    bank.train(until=1), twin.train(until=1)
    bank.put(1, *bank.take(1))
    assert len(bank._stacks) == 1, "it was to find its place among its like again"
    bank.train(until=3), twin.train(until=3)
    for index in range(3):
        assert_same(*(b.take(index)[0] for b in (bank, twin)), tolerance=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [False, True])
def test_a_file_is_streamed_to_every_device(device, norm, tmp_path):
    task = small_task()
    np.save(tmp_path / "x.npy", task.x.numpy())
    mapped = Data(np.load(tmp_path / "x.npy", mmap_mode="r"), task.y, task.x_test, task.y_test)
    banks = []
    for data in (task, mapped):
        specs = [Spec([16, 8, 1], data, seed=s, layer_norm=norm) for s in range(2)]
        banks.append(Bank(specs, device=device))
        banks[-1].train(until=3)
    torch.testing.assert_close(banks[0].loss, banks[1].loss, rtol=1e-4, atol=1e-5)
    assert torch.equal(banks[0].accuracy, banks[1].accuracy)
