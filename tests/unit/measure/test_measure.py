"""Measures against slow loops, scikit-learn and networks whose answers are known."""

from __future__ import annotations

import importlib
import itertools
import sys
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, install_import_hook
from sklearn.metrics import adjusted_rand_score, rand_score
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.random import Draw, drawer, stacked


def fresh(*hooks: AbstractContextManager[object]) -> ModuleType:
    """A copy of its own of fissile.measure, however the rest of the suite imported it."""
    usual = {name: mod for name, mod in sys.modules.items() if name.startswith("fissile.measure")}
    with patch.dict(sys.modules), ExitStack() as stack:
        for name in usual:
            del sys.modules[name]
        for hook in hooks:
            stack.enter_context(hook)
        copy = importlib.import_module("fissile.measure")
    if usual:  # importing had put the copy in the package as well
        sys.modules["fissile"].measure = usual["fissile.measure"]  # type: ignore[attr-defined]
    return copy


measure = fresh(install_import_hook("fissile.measure", "beartype.beartype"))

DTYPES = (torch.float32, torch.float64)
BATCHES = ((), (1,), (3,), (2, 2))


def seeded(seed: int) -> Draw:
    return drawer(torch.Generator().manual_seed(seed))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def clause_ids(clauses: int, literals: int) -> Tensor:
    return torch.arange(clauses).repeat_interleave(literals)


def perfect(clauses: int, literals: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and outgoing weight of the network with one neuron per clause."""
    owner = clause_ids(clauses, literals)
    weight = (owner[None] == torch.arange(clauses)[:, None]).to(dtype)
    bias = torch.full((clauses,), 0.5 - literals, dtype=dtype)
    return weight, bias, torch.ones(clauses, dtype=dtype)


def assignments(literals: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=literals)), dtype=dtype)


def satisfied_by(on: Tensor, groups: Tensor) -> Tensor:
    return torch.stack([on[..., groups == g].all(-1) for g in range(int(groups.max()) + 1)], -1)


# --- networks whose answers are known


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("clauses", "literals"), [(1, 3), (2, 4), (3, 3), (4, 2)])
def test_one_neuron_per_clause(dtype, clauses, literals):
    weight, bias, out = perfect(clauses, literals, dtype)
    groups = clause_ids(clauses, literals)
    x = assignments(clauses * literals, dtype)
    satisfied = satisfied_by(x > 0, groups)

    assert float(measure.collisions(weight, bias, x, x > 0, satisfied)) == 0
    assert torch.equal(measure.codes(weight, bias, out, groups), torch.eye(clauses).bool())
    assert int(measure.coded_clauses(weight, bias, out, groups)) == clauses
    assert float(measure.total_capacity(weight, groups)) == clauses
    assert measure.recovery(weight, groups, seeded(0)) == (1, 1)
    assert float(measure.cosine(weight)) == 0
    blocks = groups[:, None] == groups
    assert torch.equal(measure.gram(weight), blocks.to(dtype))
    # Every literal of the one satisfied clause, and nothing else, is used on every sample.
    usage = measure.edge_usage(weight, bias, x, x > 0, satisfied)
    assert torch.equal(usage, torch.eye(clauses, dtype=dtype)[..., None] * weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_neurons(dtype):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype).repeat(5, 1)
    groups = clause_ids(2, 2)
    assert float(measure.cosine(weight)) == pytest.approx(1)
    assert float(measure.total_capacity(weight, groups)) == pytest.approx(1)  # one dimension
    x = assignments(4, dtype)
    bias = torch.zeros(5, dtype=dtype)
    rate = measure.collisions(weight, bias, x, x > 0, satisfied_by(x > 0, groups))
    assert float(rate) == 1  # always active, so every edge serves both clauses


def test_opposite_neurons_differ_only_by_absolute():
    weight = torch.tensor([[1.0, -2.0], [-3.0, 6.0]])
    assert float(measure.cosine(weight)) == pytest.approx(-1)
    assert float(measure.cosine(weight, absolute=True)) == pytest.approx(1)


def test_a_shared_edge_by_hand():
    # One neuron sees both clauses of one literal each; a second sees the first clause only.
    weight, bias = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([-0.5, -0.5])
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    usage = measure.edge_usage(weight, bias, x, x > 0, x > 0)
    # The sample with both clauses satisfied is not traced: else edges would collide.
    assert usage.tolist() == [[[1, 0], [1, 0]], [[0, 1], [0, 0]]]
    assert float(measure.collisions(weight, bias, x, x > 0, x > 0)) == 0
    # A neuron that is active anyway uses the other literal where that one happens to be on.
    satisfied = torch.tensor([[True, False], [False, True], [True, False]])
    rate = measure.collisions(weight, bias, x, x > 0, satisfied, share=0.0)
    assert float(rate) == pytest.approx(1 / 3)  # of edges (0,0), (0,1), (1,0) only (0,1)
    # Edge (1,0) is used on one of two samples, not on most of them.
    assert float(measure.collisions(weight, bias, x, x > 0, satisfied)) == pytest.approx(1 / 2)
    # A neuron with a higher threshold fires on one of the three samples with the literal on.
    more = torch.cat([x, torch.tensor([[1.0, 0.4], [1.0, 0.4]])])
    on, which = more > 0, torch.cat([satisfied, satisfied[:1], satisfied[:1]])
    usage = measure.edge_usage(weight, bias - 1, more, on, which)
    assert float(usage[0, 0, 1]) == pytest.approx(1 / 3)


def test_on_is_not_read_from_x():
    # With inputs of -1 and 1 a literal that is off still moves the pre-activation.
    weight, bias = torch.tensor([[1.0, 1.0]]), torch.tensor([0.5])
    on = torch.tensor([[True, False], [False, True]])
    x = torch.where(on, 1.0, -1.0)
    assert float(measure.edge_usage(weight, bias, x, on, on).sum()) == 2
    assert float(measure.edge_usage(weight, bias - 1, x, on, on).sum()) == 0


# --- slow loops


def slow_capacity(vectors: np.ndarray) -> list[float]:
    result = []
    for i in range(vectors.shape[1]):
        own = float(vectors[:, i] @ vectors[:, i])
        shared = sum(float(vectors[:, i] @ vectors[:, j]) ** 2 for j in range(vectors.shape[1]))
        result.append(own**2 / shared if own else 0.0)
    return result


def slow_cosine(weight: np.ndarray, absolute: bool) -> float:
    found = []
    for one, two in itertools.combinations(weight, 2):
        lengths = float(np.linalg.norm(one) * np.linalg.norm(two))
        if lengths:
            value = float(one @ two) / lengths
            found.append(abs(value) if absolute else value)
    return float(np.mean(found)) if found else 0.0


def slow_collisions(weight, bias, x, on, satisfied, share) -> float:
    clauses = satisfied.shape[-1]
    used = np.zeros((clauses, *weight.shape), dtype=bool)
    for clause, i, j in np.ndindex(used.shape):
        samples = [
            s
            for s in range(len(x))
            if satisfied[s].sum() == 1 and satisfied[s, clause] and on[s, j]
        ]
        hits = sum(bool(weight[i] @ x[s] + bias[i] > 0 and weight[i, j] > 0) for s in samples)
        used[clause, i, j] = bool(samples) and hits / len(samples) > share
    users = used.sum(0)
    return float((users >= 2).sum() / (users >= 1).sum()) if users.any() else 0.0


def slow_codes(weight, bias, out, groups) -> list[list[bool]]:
    return [
        [
            all(weight[i, j] > 0 for j in range(len(groups)) if groups[j] == clause)
            and bool(bias[i] < 0 < out[i])
            for i in range(len(weight))
        ]
        for clause in range(max(groups) + 1)
    ]


sizes = st.fixed_dictionaries(
    {
        "batch": st.sampled_from(BATCHES),
        "neurons": st.integers(1, 6),
        "clauses": st.integers(1, 4),
        "literals": st.integers(1, 3),
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 10_000),
    }
)


def network(size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, bias, outgoing weight and shuffled groups, with some weights and neurons dead."""
    seed, dtype, inputs = size["seed"], size["dtype"], size["clauses"] * size["literals"]
    shape = (*size["batch"], size["neurons"])
    weight = normal(seed, *shape, inputs, dtype=dtype)
    weight = weight * (normal(seed + 1, *shape, inputs) > -0.8)
    weight = weight * (normal(seed + 2, *shape, 1) > -1)
    weight = weight + 0.5 * (weight != 0)  # codes should not be too rare
    groups = clause_ids(size["clauses"], size["literals"])
    groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    bias, out = normal(seed + 3, *shape, dtype=dtype), normal(seed + 4, *shape, dtype=dtype)
    return weight, bias, out, groups


def flat(tensor: Tensor, dims: int) -> Tensor:
    """One batch dimension, whatever the number there was."""
    return tensor.reshape(-1, *tensor.shape[tensor.ndim - dims :])


def close(actual: Tensor, expected, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    expected = torch.as_tensor(np.array(expected), dtype=dtype).reshape(actual.shape)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(size=sizes)
def test_capacity_and_cosine_against_loops(size):
    weight, _, _, groups = network(size)
    dtype, singles = size["dtype"], flat(weight, 2).double().numpy()
    ids = groups.numpy()
    summed = [np.stack([w[:, ids == g].sum(1) for g in range(ids.max() + 1)], 1) for w in singles]
    close(measure.gram(weight), [w.T @ w for w in singles], dtype)
    close(measure.features(weight, groups), summed, dtype)
    close(measure.capacity(weight), [slow_capacity(w) for w in singles], dtype)
    close(measure.capacity(weight, groups), [slow_capacity(v) for v in summed], dtype)
    totals = [sum(slow_capacity(v)) for v in summed]
    close(measure.total_capacity(weight, groups), totals, dtype)
    for absolute in (False, True):
        expected = [slow_cosine(w, absolute) for w in singles]
        close(measure.cosine(weight, absolute=absolute), expected, dtype)


@settings(max_examples=40, deadline=None)
@given(size=sizes, share=st.sampled_from([0.0, 0.25, 0.5]), batched=st.booleans())
def test_collisions_against_loops(size, share, batched):
    weight, bias, _, groups = network(size)
    lead = size["batch"] if batched else ()
    on = normal(size["seed"] + 5, *lead, 12, len(groups)) > -0.6
    x = torch.where(on, 1.0, -0.5).to(size["dtype"])
    satisfied = satisfied_by(on, groups)
    rates = measure.collisions(weight, bias, x, on, satisfied, share=share)
    assert rates.shape == size["batch"]
    count = flat(weight, 2).shape[0]
    data = [flat(t, 2).expand(count, -1, -1).numpy() for t in (x, on, satisfied)]
    singles = zip(flat(weight, 2).numpy(), flat(bias, 1).numpy(), *data, strict=True)
    close(rates, [slow_collisions(*single, share) for single in singles], size["dtype"])


@settings(max_examples=40, deadline=None)
@given(size=sizes)
def test_codes_against_loops(size):
    weight, bias, out, groups = network(size)
    found = measure.codes(weight, bias, out, groups)
    singles = zip(flat(weight, 2), flat(bias, 1), flat(out, 1), strict=True)
    expected = [slow_codes(*single, groups.tolist()) for single in singles]
    assert flat(found, 2).tolist() == expected
    coded = [sum(any(clause) for clause in single) for single in expected]
    assert measure.coded_clauses(weight, bias, out, groups).flatten().tolist() == coded


@settings(max_examples=40, deadline=None)
@given(
    batch=st.sampled_from(BATCHES),
    inputs=st.integers(1, 12),
    ours=st.integers(1, 5),
    theirs=st.integers(1, 5),
    shared=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_agreement_against_scikit_learn(batch, inputs, ours, theirs, shared, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(ours, (*batch, inputs), generator=generator)
    truth = torch.randint(theirs, (inputs,) if shared else labels.shape, generator=generator)
    pairs = list(zip(flat(labels, 1), flat(truth.expand_as(labels), 1), strict=True))
    dtype = torch.get_default_dtype()
    expected = [rand_score(t, mine) for mine, t in pairs]
    close(measure.pairwise_agreement(labels, truth), expected, dtype)
    expected = [adjusted_rand_score(t, mine) for mine, t in pairs]
    close(measure.adjusted_rand(labels, truth), expected, dtype)


@settings(max_examples=20, deadline=None)
@given(size=sizes)
def test_recovery_of_a_stack_is_that_of_each(size):
    size = size | {"batch": (3,)}
    weight, _, _, groups = network(size)
    weight = (4 * weight).round()  # whole numbers: a stacked Gram matrix is then not rounded apart
    stack = measure.recovery(weight, groups, stacked([seeded(i) for i in range(3)]))
    labels = measure.gram_clusters(weight, size["clauses"], stacked([seeded(i) for i in range(3)]))
    for i, single in enumerate(weight):
        alone = measure.recovery(single, groups, seeded(i))
        assert (
            alone.agreement == stack.agreement[i] == measure.pairwise_agreement(labels, groups)[i]
        )
        assert alone.adjusted_rand == stack.adjusted_rand[i]


@pytest.mark.parametrize("rows", ["raw", "unit", "cosine"])
def test_recovery_by_other_rows_of_a_stack_is_that_of_each(rows):
    generator = torch.Generator().manual_seed(0)
    weight, groups = torch.randn(3, 5, 12, generator=generator), torch.arange(12) // 4
    stack = measure.recovery(weight, groups, stacked([seeded(i) for i in range(3)]), rows=rows)
    for i, single in enumerate(weight):
        alone = measure.recovery(single, groups, seeded(i), rows=rows)
        assert alone == (stack.agreement[i], stack.adjusted_rand[i])


def test_absolute_cosines_do_not_see_how_large_weights_are():
    groups = torch.arange(12) // 4
    codes = torch.eye(3).repeat_interleave(4, 1) * torch.tensor([1.0, -1.0]).repeat(6)
    sizes = torch.tensor([1.0, 30.0, 0.1, 5.0]).repeat(3)
    found = [
        float(measure.recovery(codes * sizes, groups, seeded(0), rows=rows).adjusted_rand)
        for rows in ("raw", "cosine")
    ]
    assert found[0] < 1
    assert found[1] == 1


# --- degenerate inputs


@pytest.mark.parametrize("labels", [[0], [0, 0, 0], [0, 1, 2]])
def test_equal_degenerate_partitions_agree_fully(labels):
    partition = torch.tensor(labels)
    assert float(measure.adjusted_rand(partition + 7, partition)) == 1
    assert float(measure.pairwise_agreement(partition + 7, partition)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_networks_are_all_zero(dtype):
    weight, bias = torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    groups, x = clause_ids(2, 2), assignments(4, dtype)
    assert measure.capacity(weight).tolist() == [[0] * 4] * 2
    assert measure.total_capacity(weight, groups).tolist() == [0, 0]
    assert measure.cosine(weight).tolist() == [0, 0]
    satisfied = satisfied_by(x > 0, groups)
    assert measure.collisions(weight, bias, x, x > 0, satisfied).tolist() == [0, 0]
    assert not measure.codes(weight, bias - 1, bias + 1, groups).any()
    scores = measure.recovery(weight, groups, stacked([seeded(0), seeded(1)]))
    assert all(torch.isfinite(score).all() for score in scores)


def test_neurons_without_direction_are_left_out():
    pair = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    padded = torch.cat([pair, torch.zeros(3, 2)])
    assert float(measure.cosine(padded)) == pytest.approx(0.5**0.5)
    assert float(measure.cosine(padded[1:])) == 0  # one direction makes no pair


def test_clauses_without_a_lone_sample_use_nothing():
    x = torch.ones(2, 2)  # both clauses at once, on every sample
    weight, bias = torch.ones(1, 2), torch.zeros(1)
    assert not measure.edge_usage(weight, bias, x, x > 0, x > 0).any()
    assert float(measure.collisions(weight, bias, x, x > 0, x > 0)) == 0


def test_one_clause_never_collides():
    weight, bias = torch.ones(3, 2), torch.zeros(3)
    x = assignments(2, torch.float32)
    satisfied = satisfied_by(x > 0, clause_ids(1, 2))
    assert measure.edge_usage(weight, bias, x, x > 0, satisfied).all()
    assert float(measure.collisions(weight, bias, x, x > 0, satisfied)) == 0


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_scale_changes_neither_capacity_nor_cosine(scale):
    weight = normal(0, 4, 6, dtype=torch.float32)
    torch.testing.assert_close(measure.capacity(weight * scale), measure.capacity(weight))
    torch.testing.assert_close(measure.cosine(weight * scale), measure.cosine(weight))


def test_threads_change_no_digit_of_a_cosine():
    weight, before = normal(0, 12, 512, 512, dtype=torch.float32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [measure.cosine(one) for one in weight]
        torch.set_num_threads(max(2, before))
        together = [measure.cosine(one) for one in weight]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.stack(alone), torch.stack(together))


def test_gradients_stay_finite_with_dead_neurons_and_features():
    weight = torch.zeros(3, 4)
    weight[0, 0] = 1
    weight.requires_grad_()
    (measure.total_capacity(weight) + measure.cosine(weight)).backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


# --- accuracy


def test_accuracy_on_numbers_and_tensors():
    assert measure.accuracy_per_parameter(0.5, 200.0) == 0.0025
    assert measure.relative_improvement(0.9, 0.6) == pytest.approx(0.5)
    assert measure.relative_improvement(0.3, 0.6) == pytest.approx(-0.5)
    accuracies, dense = torch.tensor([0.9, 0.6]), torch.tensor([0.6, 0.6])
    each = measure.accuracy_per_parameter(accuracies, torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(each, torch.tensor([0.09, 0.03]))
    torch.testing.assert_close(measure.accuracy_per_parameter(accuracies, 10.0), accuracies / 10)
    gains = measure.relative_improvement(accuracies, dense)
    torch.testing.assert_close(gains, torch.tensor([0.5, 0.0]))


@pytest.mark.parametrize("zero", [0.0, -1.0, float("nan"), torch.tensor([1.0, 0.0])])
def test_division_by_nothing_is_refused(zero):
    top = torch.ones(2) if isinstance(zero, Tensor) else 1.0
    with pytest.raises(FissileError, match="nonzeros="):
        measure.accuracy_per_parameter(top, zero)
    with pytest.raises(FissileError, match="dense="):
        measure.relative_improvement(top, zero)


# --- errors


@pytest.mark.parametrize("ids", [[0, 0, 2, 2], [1, 1, 2, 2], [-1, 0, 0, 1]])
def test_group_ids_with_gaps_are_refused(ids):
    groups, weight = torch.tensor(ids), torch.ones(2, 4)
    bias = torch.ones(2)
    for call in (
        lambda: measure.features(weight, groups),
        lambda: measure.capacity(weight, groups),
        lambda: measure.codes(weight, bias, bias, groups),
        lambda: measure.recovery(weight, groups, seeded(0)),
    ):
        with pytest.raises(FissileError, match="without gaps"):
            call()


def test_share_must_be_a_fraction():
    one = torch.ones(1, 1)
    for share in (-0.1, 1.0):
        with pytest.raises(FissileError, match="share="):
            measure.collisions(one, one[0], one, one > 0, one > 0, share=share)


def test_shapes_are_checked_while_these_tests_run():
    with pytest.raises(TypeCheckError):
        measure.adjusted_rand(torch.ones(3), torch.arange(3))
    with pytest.raises(TypeCheckError):  # of what reaches a measure of weights, too
        measure.edge_usage(torch.ones(2, 4), torch.ones(2, 1, 1), *[torch.ones(5, 4) > 0] * 3)


def test_wrong_shapes_have_clear_messages_without_a_checker():
    unhooked = fresh()
    weight, bias, x = torch.ones(2, 4), torch.ones(2), torch.ones(5, 4)
    on, satisfied = x > 0, torch.ones(5, 2, dtype=torch.bool)
    cases = [
        (lambda: unhooked.capacity(weight, torch.arange(3)), "4 inputs; give one group id"),
        (lambda: unhooked.capacity(weight.T, torch.arange(4)), r"transposed: give weight\.T"),
        (lambda: unhooked.recovery(weight.T, torch.arange(4), seeded(0)), "looks transposed"),
        (lambda: unhooked.capacity(weight, torch.arange(4.0)), "integers"),
        (lambda: unhooked.codes(weight, bias[:1], bias, torch.arange(4)), "one number per neuron"),
        (lambda: unhooked.collisions(weight, bias[:1], x, on, satisfied), "bias has shape"),
        (lambda: unhooked.collisions(weight, bias, x[:, 1:], on, satisfied), "x .* must both end"),
        (lambda: unhooked.collisions(weight, bias, x, on[1:], satisfied), "x .* must both end"),
        (lambda: unhooked.collisions(weight, bias, x, on, satisfied[1:]), "satisfied .* must end"),
        (lambda: unhooked.adjusted_rand(torch.arange(3), torch.arange(4)), "same inputs"),
        (lambda: unhooked.gram_clusters(weight, 2, seeded(0), rows="sign"), "raw, unit, cosine"),
    ]
    for call, message in cases:
        with pytest.raises(FissileError, match=message):
            call()
