"""k-means and the draws it takes its numbers from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

import fissile.expansion.split as module
from fissile._common.errors import FissileError
from fissile._common.random import Draw, drawer, stacked
from fissile.expansion.split import kmeans

DTYPES = (torch.float32, torch.float64)


def seeded(seed: int) -> Draw:
    return drawer(torch.Generator().manual_seed(seed))


def nested(seeds: Sequence[int], shape: tuple[int, ...]) -> Draw:
    """One draw for a batch of any number of dimensions."""
    if not shape:
        return seeded(seeds[0])
    step = len(seeds) // shape[0]
    parts = [seeds[i * step : (i + 1) * step] for i in range(shape[0])]
    return stacked([nested(part, shape[1:]) for part in parts])


def inertia(points: Tensor, labels: Tensor) -> float:
    total = 0.0
    for label in set(labels.tolist()):
        members = points[labels == label].double()
        total += float((members - members.mean(0)).square().sum())
    return total


def blobs(seed: int, clusters: int, each: int, dims: int, spread: float) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    truth = np.repeat(np.arange(clusters), each)
    centres = 3 * random.standard_normal((clusters, dims))
    points = centres[truth] + spread * random.standard_normal((len(truth), dims))
    return torch.from_numpy(points), torch.from_numpy(truth)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.sampled_from([(1,), (2,), (5,), (2, 3), (3, 1, 2)]),
    points=st.integers(1, 20),
    dims=st.integers(1, 9),
    clusters=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    grid=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_batched_equals_single(batch, points, dims, clusters, dtype, grid, seed):
    clusters = min(clusters, points)
    x = torch.randn(*batch, points, dims, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x = x.round() if grid else x  # a grid has many ties and coinciding points
    seeds = [seed + i for i in range(int(np.prod(batch)))]
    together = kmeans(x, clusters, nested(seeds, batch), restarts=3)
    assert together.shape == (*batch, points)
    for single, labels, own in zip(x.flatten(0, -3), together.flatten(0, -2), seeds, strict=True):
        assert torch.equal(kmeans(single, clusters, seeded(own), restarts=3), labels)
        assert set(labels.tolist()) == set(range(clusters))


def test_slow_and_fast_elements_keep_their_own_results_at_every_step_limit():
    easy, _ = blobs(0, clusters=4, each=10, dims=3, spread=0.01)
    hard = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for steps in (1, 2, 3, 20):
        both = kmeans(torch.stack([easy, hard]), 4, nested([5, 6], (2,)), restarts=1, steps=steps)
        assert torch.equal(both[0], kmeans(easy, 4, seeded(5), restarts=1, steps=steps))
        assert torch.equal(both[1], kmeans(hard, 4, seeded(6), restarts=1, steps=steps))
        results.append(both)
    assert torch.equal(results[0][0], results[-1][0])  # settled at once
    assert not torch.equal(results[0][1], results[-1][1])  # still moved


@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_working_in_pieces_changes_nothing(monkeypatch, budget):
    x = torch.rand(3, 17, 5, generator=torch.Generator().manual_seed(0))
    whole = kmeans(x, 6, nested([1, 2, 3], (3,)))
    monkeypatch.setattr(module, "_ELEMENTS", budget)
    assert torch.equal(kmeans(x, 6, nested([1, 2, 3], (3,))), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_recovers_separate_blobs_at_any_scale(dtype, scale):
    points, truth = blobs(3, clusters=8, each=6, dims=4, spread=0.01)
    labels = kmeans((points * scale).to(dtype), 8, seeded(0))
    assert adjusted_rand_score(truth, labels) == 1


def test_finds_the_best_partition_of_few_points():
    points = torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    best = min(
        inertia(points, torch.tensor(labels)) for labels in itertools.product(range(3), repeat=7)
    )
    assert inertia(points, kmeans(points, 3, seeded(0))) == pytest.approx(best)


@pytest.mark.parametrize("clusters", [3, 8, 25])
def test_is_as_good_as_scikit_learn(clusters):
    points, _ = blobs(clusters, clusters=clusters, each=4, dims=12, spread=1.0)
    theirs = KMeans(clusters, n_init=8, random_state=0).fit(points.numpy()).inertia_
    assert inertia(points, kmeans(points, clusters, seeded(0))) <= 1.02 * theirs


def test_more_restarts_are_no_worse_and_sometimes_better():
    points, _ = blobs(5, clusters=12, each=5, dims=2, spread=1.0)

    class Recorded:
        """Gives every call the same leading restarts."""

        numbers = seeded(0)(64, 12, 4)

        def __call__(self, *shape: int) -> Tensor:
            assert shape[1:] == (12, 4)
            return self.numbers[: shape[0]]

    results = [inertia(points, kmeans(points, 12, Recorded(), restarts=r)) for r in (1, 4, 64)]
    assert results == sorted(results, reverse=True)
    assert results[-1] < results[0]


def test_lloyd_result_is_a_fixed_point():
    points = torch.rand(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    labels = kmeans(points, 5, seeded(0), steps=500)
    centres = torch.stack([points[labels == k].mean(0) for k in range(5)])
    assert torch.equal(torch.cdist(points, centres).argmin(-1), labels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -2.5])
@pytest.mark.parametrize("clusters", [1, 2, 5, 6])
def test_equal_points_fill_every_cluster(dtype, value, clusters):
    labels = kmeans(torch.full((6, 3), value, dtype=dtype), clusters, seeded(0))
    assert set(labels.tolist()) == set(range(clusters))


def test_two_places_and_three_clusters():
    points = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0]])
    labels = kmeans(points, 3, seeded(0)).tolist()
    assert set(labels) == {0, 1, 2}
    assert not set(labels[:3]) & set(labels[3:])


def test_one_cluster_per_point():
    points = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    assert sorted(kmeans(points, 9, seeded(0)).tolist()) == list(range(9))


def test_empty_batch_and_points_without_dims():
    assert kmeans(torch.zeros(0, 4, 2), 2, lambda *shape: torch.zeros(shape)).shape == (0, 4)
    assert set(kmeans(torch.zeros(4, 0), 2, seeded(0)).tolist()) == {0, 1}


def test_takes_weights_that_require_grad_and_leaves_them_alone():
    points = torch.rand(8, 2, requires_grad=True)
    before = points.detach().clone()
    assert not kmeans(points, 2, seeded(0)).requires_grad
    assert torch.equal(points, before)


def test_the_number_of_draws_does_not_depend_on_data():
    shapes: list[list[tuple[int, ...]]] = []
    for points in (torch.zeros(6, 2), torch.rand(6, 2), torch.rand(6, 9)):
        asked: list[tuple[int, ...]] = []

        def draw(*shape: int, asked: list[tuple[int, ...]] = asked) -> Tensor:
            asked.append(shape)
            return seeded(0)(*shape)

        kmeans(points, 3, draw, restarts=2)
        shapes.append(asked)
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(
    ("points", "clusters", "options", "message"),
    [
        (torch.zeros(3, 1), 4, {}, "cannot fill 4 clusters"),
        (torch.zeros(3, 1), 0, {}, "at least 1 cluster"),
        (torch.zeros(3), 1, {}, "Points need shape"),
        (torch.zeros(3, 1), 1, {"restarts": 0}, "restarts=0"),
        (torch.zeros(3, 1), 1, {"steps": 0}, "steps=0"),
        (torch.tensor([[float("nan")]]), 1, {}, "NaN"),
    ],
)
def test_says_what_is_wrong(points, clusters, options, message):
    with pytest.raises(FissileError, match=message):
        kmeans(points, clusters, seeded(0), **options)


def test_drawer_follows_its_generator():
    draw, same, other = seeded(1), seeded(1), seeded(2)
    first = draw(1000)
    assert first.dtype == torch.float64
    assert first.device.type == "cpu"
    assert 0 <= float(first.min()) < 0.01 < 0.99 < float(first.max()) < 1
    assert torch.equal(first, same(1000))
    assert not torch.equal(first, draw(1000))
    assert not torch.equal(first, other(1000))


def test_stacked_keeps_each_stream():
    together, alone = stacked([seeded(1), seeded(2)]), [seeded(1), seeded(2)]
    for shape in ((3, 2), (), (5,)):
        expected = torch.stack([each(*shape) for each in alone])
        assert torch.equal(together(2, *shape), expected)


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
def test_stacked_counts_its_networks(shape):
    with pytest.raises(FissileError, match="2 stacked drawers"):
        stacked([seeded(1), seeded(2)])(*shape)


def test_stacked_of_nothing():
    with pytest.raises(FissileError, match="at least one"):
        stacked([])(0, 2)
