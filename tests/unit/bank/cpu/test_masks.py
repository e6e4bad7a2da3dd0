"""Masks that change, in the compiled kernel: those of PyTorch, and networks with them."""

import numpy as np
import pytest
import torch
from bank_data import assert_same, blobs

from fissile._common.random import hash32
from fissile.bank import Bank, Dense, DropConnect, Dynamic, Expand, Spec, engines
from fissile.bank.cpu import kernel
from fissile.bank.cpu.masks import draw
from fissile.bank.loop import Recipe
from fissile.layers import DropConnectLinear

#: Arms, with every recipe that treats them in its own way.
ARMS = {
    "split": Expand(2),
    "dropconnect": DropConnect(2),
    "dynamic": Dynamic(2, every=3, fraction=0.2),
    "by gradient": Dynamic(2, every=4, fraction=0.3, grow="gradient"),
}
RECIPE = Recipe(lr=1e-2, batch=16, l1=1e-3, orthogonal=0.1)


@pytest.mark.parametrize(("children", "inputs"), [(16, 512), (7, 33), (5, 1), (2, 3000)])
def test_compiled_masks_are_those_of_the_layer(children, inputs):
    degree = torch.randint(0, inputs + 1, (3, children))
    degree[0, 0], degree[0, -1] = 0, inputs
    seeds = torch.tensor([0, 2**31, 2**62 + 1])
    layer = DropConnectLinear(torch.randn(3, children, inputs), degree, seed=seeds)
    for _ in range(4):
        keys = hash32(hash32(*layer.stream.unbind(-1))).numpy().astype(np.uint32)
        expected = layer.draw_mask().numpy()
        for network, child in np.ndindex(3, children):
            hashes, flags = np.empty(inputs, np.uint32), np.empty(inputs, bool)
            draw(keys[network], child * inputs, int(degree[network, child]), hashes, flags)
            assert (flags == expected[network, child]).all()


def banks(specs, arm, engine="auto", until=3):
    bank = Bank(specs, dtype=torch.float64, engine=engine)
    bank.train(until=1)
    bank = bank.branch({"": arm})
    bank.train(until=until)
    return bank


@pytest.mark.parametrize("name", ARMS)
def test_networks_are_the_same_alone_and_in_company_to_the_bit(name):
    """In a stack large enough that a thread trains several of them one after the other."""
    data = blobs(0, 3)
    specs = [Spec([8, 6, 3], data, seed=seed, recipe=RECIPE) for seed in range(17)]
    together, plain = banks(specs, ARMS[name]), banks(specs, ARMS[name], "plain")
    dense = banks(specs, Dense())
    for number in (0, 1, 16):
        alone = banks(specs[number : number + 1], ARMS[name])
        assert_same(together.take(number)[0], alone.take(0)[0], 0)
        assert torch.equal(together.accuracy[number], alone.accuracy[0])
        assert_same(together.take(number)[0], plain.take(number)[0], 1e-9)
    torch.testing.assert_close(together.loss, plain.loss, rtol=0, atol=1e-9)
    assert torch.equal(together.nonzeros, dense.nonzeros) == (name != "dropconnect")


@pytest.mark.parametrize("name", ARMS)
def test_they_are_trained_by_the_kernel_alone(name, monkeypatch):
    monkeypatch.setattr(engines, "run_torch", None)
    banks([Spec([8, 6, 3], blobs(0, 3), recipe=RECIPE)], ARMS[name])


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_one_that_diverges_stays_where_it_was_and_harms_no_other(name, engine):
    data = blobs(0, 3)
    wild = Spec([8, 6, 3], data, seed=2, recipe=Recipe(lr=1e38, batch=16))
    specs = [Spec([8, 6, 3], data, seed=seed, recipe=RECIPE) for seed in range(2)]
    mixed = Bank([*specs, wild], engine=engine).branch({"": ARMS[name]})
    healthy, before = mixed.select([0, 1]), mixed.take(2)[0]
    mixed.train(until=2), healthy.train(until=2)
    assert mixed.diverged == [2]
    assert_same(mixed.take(2)[0], before, 0)
    assert mixed.accuracy[2].isnan().all()
    for number in range(2):
        assert_same(mixed.take(number)[0], healthy.take(number)[0], 0)


@pytest.mark.parametrize("name", ARMS)
def test_training_in_parts_changes_nothing(name, monkeypatch):
    """In parts that the user makes, and in those that are left when something fails."""
    specs = [Spec([8, 6, 3], blobs(0, 3), seed=seed, recipe=RECIPE) for seed in range(3)]
    whole, bank = banks(specs, ARMS[name], until=6), banks(specs, ARMS[name], until=2)
    real, calls = kernel.train_networks, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "train_networks", failing)
        with pytest.raises(KeyboardInterrupt):
            bank.train(until=4)
    bank.train(until=6)
    assert torch.equal(bank.accuracy, whole.accuracy)
    assert torch.equal(bank.loss, whole.loss)
    for number in range(3):
        assert_same(bank.take(number)[0], whole.take(number)[0], 0)
