"""Where training sparse networks could go wrong: ample budgets, company, divergence, bad input."""

import pytest
import torch

from fissile import FissileError
from fissile.bank.sparse import Plan, Prune, Rewire, SplitAt, train

INPUTS, CLASSES = 8, 3
DENSE = 16 * (INPUTS + 1 + CLASSES) + CLASSES


def task(samples=60):
    x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(3))
    return x, x[:, :CLASSES].argmax(1)


def trained(*plans, seeds=(0,), epochs=3, batch=20, **settings):
    x, y = task()
    return train(plans, seeds, x, y, outputs=CLASSES, epochs=epochs, batch=batch, **settings)


@pytest.mark.parametrize("budget", [DENSE, 10_000])
def test_an_ample_budget_prunes_nothing(budget):
    [(stack, _)] = trained(Plan(budget, 16, prune=Prune(0.2, 0.75)), epochs=30, batch=60)
    assert stack.nonzeros().item() == DENSE


def test_what_was_pruned_may_be_rewired_and_stays_within_the_budget():
    plan = Plan(60, 32, prune=Prune(0.1, 0.3), rewire=Rewire(0.3, "random", 1.0))
    [(stack, _)] = trained(plan, seeds=range(4), epochs=30)
    assert (stack.nonzeros() <= 60).all()
    assert (stack.nonzeros() > 40).all()


def test_a_count_does_not_depend_on_company():
    sparse, pruned = Plan(40, 12, start="uniform"), Plan(40, 12, prune=Prune())
    [(alone, _)] = trained(sparse, seeds=(0, 1))
    [(both, _)] = trained(sparse, pruned, seeds=(0, 1))
    assert alone.nonzeros()[:, 0].tolist() == both.nonzeros()[:, 0].tolist() == [40, 40]


def test_a_split_happens_once_wherever_ticks_fall():
    budget = 6 * (INPUTS + 1 + CLASSES) + CLASSES
    plan = Plan(budget, 6, splits=(SplitAt(2, at=0.993),))
    [(stack, _)] = trained(plan, epochs=301, batch=60)
    assert stack.weights["first"].shape[1] == 12


@pytest.mark.parametrize("plan", [Plan(30, 16, prune=Prune(), lr=1e38), Plan(30, 8, lr=1e38,
    direct=True, prune=Prune(saliency="second-order"))])  # fmt: skip
def test_a_network_that_diverges_keeps_to_its_budget_and_is_told(plan):
    [(stack, _)] = trained(plan, epochs=10)
    assert not stack.finite().any()
    assert (stack.nonzeros() <= 30).all()
    for name, mask in stack.masks.items():
        assert (stack.weights[name][~mask] == 0).all()


def test_sound_networks_are_finite():
    [(stack, _)] = trained(Plan(30, 16, prune=Prune()))
    assert stack.finite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plans": []}, "nothing to train"),
        ({"seeds": []}, "nothing to train"),
        ({"x": torch.zeros(0, INPUTS), "y": torch.zeros(0, dtype=torch.long)}, "one label for"),
        ({"y": torch.zeros(7, dtype=torch.long)}, "one label for each"),
        ({"y": torch.full((60,), 3)}, "from 0 to 2"),
        ({"y": torch.full((60,), -1)}, "from 0 to 2"),
        ({"weights": torch.ones(5)}, "5 weights were given for 60 samples"),
        ({"batch": 0}, "batch=0"),
        ({"epochs": 0}, "epochs=0"),
    ],
)
def test_what_cannot_be_trained_is_refused(change, words):
    x, y = task()
    given = {"plans": [Plan(99, 4)], "seeds": [0], "x": x, "y": y, "outputs": CLASSES} | change
    with pytest.raises(FissileError, match=words):
        train(**given)


def test_other_kinds_of_numbers_are_taken():
    x, y = task()
    [(stack, _)] = train([Plan(99, 4)], [0], x.double(), y.int(), outputs=CLASSES, epochs=1)
    assert stack.weights["first"].dtype == torch.float32
