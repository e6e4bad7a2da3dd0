"""What a plan says, and what it refuses to say."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fissile import FissileError
from fissile.bank.sparse import Plan, Prune, Rewire, SparseStack, SplitAt
from fissile.bank.sparse.plan import hidden_for, is_large, within_budget
from fissile.bank.sparse.plan import recommended_plans as plans

NONSENSE = [
    ({"budget": 0, "hidden": 4}, "budget=0 is not a whole number of at least 1"),
    ({"budget": 99.5, "hidden": 4}, "budget=99.5 is not a whole number"),
    ({"budget": 99, "hidden": -1}, "hidden=-1 is not a whole number of at least 0"),
    ({"budget": 99}, "needs hidden neurons, direct weights, or both"),
    ({"budget": 99, "hidden": 4, "start": "sparse"}, "'sparse' is not one of dense, uniform, erd"),
    ({"budget": 99, "hidden": 4, "dropout": 1.0}, "dropout=1.0 is not a share below 1"),
    ({"budget": 99, "hidden": 4, "smooth": -0.1}, "smooth=-0.1 is not a share below 1"),
    ({"budget": 99, "hidden": 4, "lr": -1e-3}, "lr=-0.001 must be 0 or more"),
    ({"budget": 99, "hidden": 4, "decay": math.nan}, "decay=nan must be 0 or more"),
    ({"budget": 99, "hidden": 4, "direct": True, "l1": True}, "l1 is for linear plans"),
    ({"budget": 99, "direct": True, "l1": True, "prune": Prune()}, "l1 is for linear plans"),
]


@pytest.mark.parametrize(("settings", "words"), NONSENSE, ids=[words for _, words in NONSENSE])
def test_a_plan_refuses_nonsense(settings, words):
    with pytest.raises(FissileError, match=words):
        Plan(**settings)


def test_a_budget_must_pay_for_the_outputs_and_a_weight():
    def stack(budget):
        return SparseStack(
            [Plan(budget, direct=True, prune=Prune())], [0], 4, 3, 1, torch.device("cpu")
        )

    with pytest.raises(FissileError, match=r"a budget of 3 is too small: .* give at least 4"):
        stack(3)
    assert stack(4).room.tolist() == [1]


def test_only_rectified_neurons_have_biases():
    assert Plan(99, 4).bias
    assert not Plan(99, 4, activation="none").bias
    assert not Plan(99, direct=True).bias


shares = st.floats(0, 1)


@given(begin=shares, end=shares, power=st.floats(0.5, 6), share=shares, gap=st.floats(1e-3, 0.5))
def test_what_may_stay_falls_along_a_power(begin, end, power, share, gap):
    begin, end = min(begin, end), max(begin, end, 0.01)
    found = Prune(begin, end, power=power).left(share, share - gap)
    if share < begin or share - gap >= end:
        assert found is None
    elif share >= end:
        assert found == 0
    else:
        assert found == pytest.approx(((end - share) / (end - begin)) ** power)


def test_pruning_begins_with_all_and_ends_once_with_none():
    prune, last = Prune(0.2, 0.7), 100
    left = [prune.left(t / last, (t - 1) / last) for t in range(last + 1)]
    assert left[:20] == [None] * 20
    assert left[71:] == [None] * 30
    falling = left[20:71]
    assert falling[0] == 1
    assert falling[-1] == 0
    assert all(one > other for one, other in pairwise(falling))
    assert falling[25] == pytest.approx(1 / 8)  # half-way, cubed


def test_a_tick_that_steps_over_all_of_it_prunes_to_the_end():
    assert Prune(0.4, 0.5).left(0.9, 0.1) == 0
    assert Prune(0.5, 0.5).left(0.5, 0.4) == 0
    assert Prune(0.5, 0.5).left(0.49, 0.4) is None


def cosine(share):
    return (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.49, 0.5, 0.8, 0.99])
def test_rates(share):
    splits = (SplitAt(2, at=0.25), SplitAt(2, at=0.5))
    begin, end = max(p for p in ((0, 0.25), (0.25, 0.5), (0.5, 1)) if p[0] <= share)

    def rate(schedule):
        return Plan(99, 4, splits=splits, lr=0.01, schedule=schedule).rate(share)

    assert rate("constant") == 0.01
    assert rate("cosine") == pytest.approx(0.01 * cosine(share))
    assert rate("again") == pytest.approx(0.01 * cosine((share - begin) / (end - begin)))


def test_rates_end_at_zero():
    for schedule in ("cosine", "again"):
        plan = Plan(99, 4, splits=(SplitAt(2),), lr=0.01, schedule=schedule)
        assert plan.rate(1.0) == pytest.approx(0, abs=1e-12)


def test_rates_fall_again_without_a_split_as_a_cosine_does():
    plan = Plan(99, 4, schedule="again")
    assert plan.rate(0.3) == pytest.approx(plan.lr * cosine(0.3))


def test_every_network_has_the_rates_of_its_plan():
    pair = [Plan(99, 4, lr=0.01), Plan(99, 4, lr=0.02, schedule="constant")]
    rates = SparseStack(pair, [0, 1, 2], 4, 3, 10, torch.device("cpu")).rates
    expected = [[plan.rate(t / 10) for plan in pair] * 3 for t in range(10)]
    torch.testing.assert_close(rates, torch.tensor(expected))


# ---- the recipe --------------------------------------------------------------------------------


@given(st.integers(12, 200_000), st.integers(1, 3_000), st.integers(1, 10))
def test_how_wide_a_dense_network_may_be(budget, inputs, outputs):
    def size(hidden):
        return hidden * (inputs + 1 + outputs) + outputs

    hidden = within_budget(budget, inputs, outputs)
    assert hidden == 0 or size(hidden) <= budget
    assert size(hidden + 1) > budget


def test_the_recipe_begins_with_a_power_of_two():
    # dense: 9, 85 and 86 neurons, half as many again
    budgets = [5_000, 85 * 513 + 1, 86 * 513 + 1, 200_000]
    assert [hidden_for(budget, 511, 1) for budget in budgets] == [128, 128, 256, 1024]


def test_the_recipe_is_never_wider_than_it_need_be():
    assert {plan.hidden for plan in plans(99_869, inputs=384, outputs=77)} == {1024}
    assert {plan.hidden for plan in plans(3_000_000, inputs=384, outputs=77)} == {16384}


# All of a linear classifier of 20 inputs and 5 outputs takes 105.
@pytest.mark.parametrize(("budget", "large"), [(10, False), (104, False), (105, True)])
def test_the_recipe_is_six_plans(budget, large):
    found = plans(budget, inputs=20, outputs=5)
    assert is_large(budget, inputs=20, outputs=5) == large
    assert len(set(found)) == 6
    assert found[0].hidden == hidden_for(budget, 20, 5) * (4 if large else 1)
    assert any(plan.hidden == 0 for plan in found) != large
    assert all(plan.direct for plan in found) != large
    for plan in found:
        assert plan.budget == budget
        assert plan.prune.saliency == "second-order"
        assert plan.prune.end < 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plan(99, 4, activation="tanh"), "activation='tanh' is not one of relu, none"),
        (lambda: Plan(99, 4, schedule="x"), "schedule='x' is not one of"),
        (lambda: Prune(saliency="x"), "saliency='x' is not one of"),
        (lambda: Prune(0.8, 0.5), "not within the training"),
        (lambda: Prune(0.0, 0.0), "not within the training"),
        (lambda: Prune(0.2, 1.5), "not within the training"),
        (lambda: Rewire(grow="x"), "grow='x' is not one of"),
        (lambda: Rewire(5.0), "fraction=5.0 is not a share"),
        (lambda: SplitAt(2, at=1.2), "not within the training"),
        (lambda: Plan(99, direct=True, splits=(SplitAt(2),)), "no neurons to split"),
    ],
)
def test_nonsense_is_refused(make, words):
    with pytest.raises(FissileError, match=words):
        make()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(30, 16),
        Plan(74, 6, splits=(SplitAt(2),)),
        Plan(20, 64, start="uniform"),
    ],
)
def test_a_plan_that_would_end_over_its_budget_is_refused(plan):
    with pytest.raises(FissileError, match=f"more than the budget of {plan.budget}"):
        SparseStack([plan], [0], 8, 3, 1, torch.device("cpu"))


def test_a_budget_is_counted_to_the_weight_however_large():
    plan = Plan(20_000_001, direct=True)
    assert SparseStack([plan], [0], 8, 2, 1, torch.device("cpu")).room.tolist() == [19_999_999]
