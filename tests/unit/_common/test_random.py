"""Stateless randomness: permutations that are permutations, and noise that looks like noise."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile._common.random import ROUNDS, hash32, noise, order, order_keys, spread


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2000), st.integers(1, 300))
def test_an_order_is_a_permutation(seed, epoch, samples):
    assert order(seed, epoch, samples).sort().values.tolist() == list(range(samples))


def test_orders_differ_by_seed_and_epoch_and_repeat():
    orders = {tuple(order(seed, epoch, 50).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert torch.equal(order(3, 4, 50), order(3, 4, 50))
    assert not torch.equal(order(1, 0, 50), order(1 + 2**32, 0, 50)), "upper seed bits count"


def test_orders_in_a_batch_and_in_parts_are_the_same():
    seeds = torch.tensor([5, 9, 2**40])
    together = order(seeds, 3, 77)
    for seed, row in zip(seeds.tolist(), together, strict=True):
        assert torch.equal(row, order(seed, 3, 77))
    assert torch.equal(order(seeds, 3, 77, 10, 30), together[:, 10:30])


def test_every_item_comes_everywhere():
    """Mean position, and the share of ascents between neighbours, as for true shuffles."""
    for samples in (33, 1000):
        orders = torch.stack([order(seed, 0, samples) for seed in range(400)]).double()
        error = ((samples**2 - 1) / 12 / 400) ** 0.5
        z = (orders.mean(0) - (samples - 1) / 2) / error
        assert 0.8 < float(z.std()) < 1.2
        ascents = (orders[:, 1:] > orders[:, :-1]).double().mean()
        assert abs(float(ascents) - 0.5) < 0.02


def test_noise_is_uniform_independent_and_the_same_in_company():
    seeds = torch.arange(50)
    together = noise(seeds, 3, 40, 25)
    assert together.shape == (50, 40, 25)
    assert torch.equal(together[7], noise(7, 3, 40, 25))
    counts = (together.flatten() * 10).long().bincount(minlength=10)
    expected = together.numel() / 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 30  # chi-square, 9 degrees
    flat = torch.stack([together.flatten(), noise(seeds, 4, 40, 25).flatten()])
    assert abs(float(torch.corrcoef(flat)[0, 1])) < 0.02


def test_keys_are_words_with_odd_multipliers():
    keys = order_keys(torch.tensor([0, 5]), 2)
    assert keys.shape == (2, ROUNDS, 2)
    assert (keys[..., 0] % 2 == 1).all()
    assert ((keys >= 0) & (keys < 2**32)).all()
    assert torch.equal(keys[1], order_keys(5, 2))
    assert hash32(1, 2) != hash32(2, 1)


def in_whole_words(*parts):
    """Return the hash as MurmurHash3 mixes it, in whole numbers that have no end."""
    state = 0x9E3779B9
    for part in parts:
        for word in (part % 2**32, (part >> 32) % 2**32):
            h = ((state ^ word) + 0x9E3779B9) % 2**32
            h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
            h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
            state = h ^ (h >> 16)
    return state


def test_hashes_and_noise_are_the_same_by_any_arithmetic():
    numbers = [0, 1, -1, 2**31, 2**32 + 5, 2**62 + 7, -(2**40)]
    rows, columns = torch.tensor(numbers).unsqueeze(1), torch.tensor(numbers[:3])
    expected = [[in_whole_words(one, other, 3) for other in numbers[:3]] for one in numbers]
    assert hash32(rows, columns, 3).tolist() == expected
    assert hash32(2**64 - 1, 2) == in_whole_words(2**64 - 1, 2)
    keys = hash32(torch.tensor(numbers), 4)
    words = [[in_whole_words(key, entry) for entry in range(6)] for key in keys.tolist()]
    uniform = torch.tensor(words) / 2**32
    assert torch.equal(spread(keys, 2, 3), uniform.view(-1, 2, 3))
    assert torch.equal(noise(torch.tensor(numbers), 4, 2, 3), uniform.view(-1, 2, 3))
