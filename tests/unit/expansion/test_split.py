"""Who inherits which input: every split against what its name promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import splits_for

from fissile import Blocks, Gram, Groups, Random, Structured
from fissile._common.random import seeded
from fissile.expansion.split import gram_points
from fissile.layers import gathered, owner_mask, spread


def weights(parents, inputs, seed=0):
    return torch.randn(parents, inputs, generator=torch.Generator().manual_seed(seed))


def sizes(owner, alpha):
    """How many inputs each child has: (parents, alpha)."""
    return owner_mask(owner, alpha).sum(-1).unflatten(-1, (-1, alpha))


shapes = st.tuples(st.integers(1, 6), st.integers(2, 8), st.integers(1, 5), st.integers(0, 999))


@settings(max_examples=50, deadline=None)
@given(shapes)
def test_random_deals_evenly(shape):
    parents, alpha, times, seed = shape
    for inputs in (alpha * times, alpha * times + alpha // 2):
        owner = Random().deal(weights(parents, inputs), alpha, seeded(seed))
        found = sizes(owner, alpha)
        assert int(found.max() - found.min()) <= 1
        assert found.sum(-1).eq(inputs).all()


def test_random_is_random_and_each_parent_deals_on_its_own():
    owner = Random().deal(weights(200, 16), 2, seeded(0)).float()
    assert len({tuple(row.tolist()) for row in owner}) > 190
    assert (owner.mean(0) - 0.5).abs().max() < 0.15, "an input favours a child"
    assert abs(float(torch.corrcoef(owner[:, :2].T)[0, 1])) < 0.25


@settings(max_examples=50, deadline=None)
@given(shapes, st.data())
def test_groups_stay_whole_and_are_dealt_evenly(shape, data):
    parents, alpha, times, seed = shape
    count = alpha * times
    extra = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    groups = torch.tensor([*range(count), *extra])
    owner = Groups(groups).deal(weights(parents, len(groups)), alpha, seeded(seed))
    for parent in owner:
        of_group = []
        for group in range(count):
            children = parent[groups == group].unique()
            assert len(children) == 1, "a group was torn apart"
            of_group.append(int(children))
        assert torch.tensor(of_group).bincount(minlength=alpha).tolist() == [times] * alpha


def test_groups_of_unequal_size_are_evened_out():
    """Eight large and eight small groups: nobody gets only large ones."""
    groups = torch.cat([torch.arange(8).repeat_interleave(9), torch.arange(8, 16)])
    owner = Groups(groups).deal(weights(50, len(groups)), 4, seeded(0))
    assert sizes(owner, 4).unique().tolist() == [20]
    # One group dominates: its child gets the smallest others.
    groups = torch.tensor([0] * 10 + [1, 1, 2, 3])
    found = sizes(Groups(groups).deal(weights(50, 14), 2, seeded(0)), 2).sort(-1).values
    assert found.unique(dim=0).tolist() == [[3, 11]]


def test_groups_are_dealt_anew_for_each_parent():
    owner = Groups(torch.arange(32) // 4).deal(weights(100, 32), 2, seeded(0))
    assert len({tuple(row.tolist()) for row in owner}) > 40
    assert (owner.float().mean(0) - 0.5).abs().max() < 0.2


def test_gram_keeps_the_blocks_of_a_block_diagonal_network_whole():
    blocks = torch.arange(24) // 3
    weight = torch.zeros(8, 24)
    weight[blocks, torch.arange(24)] = 1 + torch.rand(24, generator=torch.manual_seed(0)) / 10
    owner = Gram(clusters=8).deal(weight, 4, seeded(0))
    for parent in owner:
        for block in range(8):
            assert len(parent[blocks == block].unique()) == 1
    assert sizes(owner, 4).unique().tolist() == [6]
    assert len({tuple(row.tolist()) for row in owner}) > 1


def test_gram_has_four_clusters_per_child_unless_told():
    weight = weights(5, 40)
    assert torch.equal(Gram().deal(weight, 2, seeded(3)), Gram(8).deal(weight, 2, seeded(3)))
    few = weights(5, 6)
    assert torch.equal(Gram().deal(few, 2, seeded(3)), Gram(6).deal(few, 2, seeded(3)))


def test_gram_points_are_as_far_apart_as_the_rows_of_the_gram_matrix():
    for neurons, inputs in ((3, 20), (20, 3), (4, 4)):
        weight = weights(neurons, inputs).double()
        gram = weight.mT @ weight
        torch.testing.assert_close(torch.cdist(gram_points(weight), gram_points(weight)),
                                   torch.cdist(gram, gram))  # fmt: skip


@pytest.mark.parametrize(("n", "alpha"), [(1, 2), (2, 2), (1, 4), (2, 3), (3, 8)])
def test_structured_gives_every_child_n_of_every_block(n, alpha):
    owner = Structured(n, n * alpha).deal(weights(30, 3 * n * alpha), alpha, seeded(0))
    blocks = owner_mask(owner, alpha).unflatten(-1, (3, n * alpha)).sum(-1)
    assert blocks.unique().tolist() == [n]
    assert len({tuple(row.tolist()) for row in owner}) > 1


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.data())
def test_a_stack_is_split_as_each_network_alone(alpha, times, data):
    inputs = alpha * times * 2
    split = data.draw(st.sampled_from(splits_for(inputs, alpha)))
    stack = torch.stack([weights(3, inputs, seed) for seed in range(4)])
    seeds = torch.tensor([5, 6, 7, 8])
    together = split.deal(stack, alpha, seeded(seeds))
    for seed, weight, owner in zip(seeds.tolist(), stack, together, strict=True):
        assert torch.equal(owner, split.deal(weight, alpha, seeded(seed)))


@given(shapes)
def test_gathering_undoes_spreading(shape):
    parents, alpha, times, seed = shape
    weight = weights(parents, alpha * times, seed)
    owner = Random().deal(weight, alpha, seeded(seed))
    assert torch.equal(gathered(spread(weight, owner, alpha), owner, alpha), weight)


def test_blocks_are_groups_of_consecutive_inputs():
    weight = weights(10, 24)
    owner = Blocks(4).deal(weight, 3, seeded(5))
    assert torch.equal(owner, Groups(torch.arange(24) // 4).deal(weight, 3, seeded(5)))
    assert not torch.equal(owner, Blocks(2).deal(weight, 3, seeded(5)))
