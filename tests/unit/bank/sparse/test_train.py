"""Training sparse networks: gradients, company, the split, and what is left in the end."""

import importlib
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fissile
from fissile import MLP
from fissile._common.random import order
from fissile.bank.sparse import Plan, Prune, Rewire, SparseStack, SplitAt, train
from fissile.bank.sparse.plan import recommended_plans as recipe
from fissile.bank.sparse.plan import within_budget
from fissile.bank.sparse.train import tick

module = importlib.import_module("fissile.bank.sparse.train")  # a function has its name
CPU = torch.device("cpu")
INPUTS, CLASSES = 8, 3


def task(outputs=CLASSES, samples=60, inputs=INPUTS):
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(samples, inputs, generator=generator)
    return x, x[:, :outputs].argmax(1) if outputs > 1 else (x[:, 0] > 0).long()


def trained(plans, seeds=(0,), outputs=CLASSES, epochs=3, **settings):
    x, y = task(outputs)
    return train(plans, seeds, x, y, outputs=outputs, epochs=epochs, batch=20, **settings)


def only(found):
    [(stack, places)] = found
    assert places == list(range(len(stack.plans)))
    return stack


# ---- gradients ---------------------------------------------------------------------------------

SHAPES = {
    "hidden": {"hidden": 5},
    "beside": {"hidden": 5, "direct": True},
    "linear": {"direct": True},
    "factored": {"hidden": 5, "activation": "none"},
    "factored beside": {"hidden": 5, "activation": "none", "direct": True},
}


def loss_of(plan, weights, x, y, counts):
    """Write one network and its loss down as anybody would."""
    logits = weights["out"].expand(len(x), -1)
    if plan.hidden:
        said = F.linear(x, weights["first"], weights.get("bias"))
        said = said.relu() if plan.activation == "relu" else said
        logits = logits + F.linear(said, weights["second"])
    if plan.direct:
        logits = logits + F.linear(x, weights["direct"])
    if logits.shape[1] == 1:
        wanted = y.double() * (1 - plan.smooth) + plan.smooth / 2
        losses = F.binary_cross_entropy_with_logits(logits[:, 0], wanted, reduction="none")
    else:
        losses = F.cross_entropy(logits, y, label_smoothing=plan.smooth, reduction="none")
    return (losses * counts).mean()


def random_stack(plans, seeds, outputs):
    """A stack with weights everywhere, in float64."""
    stack = SparseStack(plans, seeds, INPUTS, outputs, 10, CPU)
    torch.manual_seed(1)
    stack.weights = {name: torch.randn_like(w).double() for name, w in stack.weights.items()}
    return stack


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, CLASSES])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_autograd(shape, outputs, weighted):
    plans = [Plan(500, **SHAPES[shape], smooth=smooth) for smooth in (0.0, 0.25)]
    stack, found = random_stack(plans, [0, 1, 2], outputs), {}
    stack._update = found.update
    x = torch.randn(3, 11, INPUTS).double()
    y = torch.randint(0, max(2, outputs), (3, 11))
    targets = y.unsqueeze(-1) if outputs == 1 else F.one_hot(y, outputs)
    counts = torch.rand(3, 11).double() if weighted else torch.ones(3, 11)
    stack.train(x, targets.mT.double(), counts if weighted else None)
    assert found.keys() == stack.weights.keys()
    for number in range(6):
        seed, plan = number // 2, plans[number % 2]
        own = {name: w[number].clone().requires_grad_() for name, w in stack.weights.items()}
        loss_of(plan, own, x[seed], y[seed], counts[seed]).backward()
        for name, weight in own.items():
            torch.testing.assert_close(found[name][number], weight.grad, msg=f"{name} {number}")


@pytest.mark.parametrize("outputs", [1, CLASSES])
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy_is_the_share_of_right_answers(shape, outputs):
    plans = [Plan(500, **SHAPES[shape]), Plan(600, **SHAPES[shape])]
    stack, (x, y) = random_stack(plans, [0, 1], outputs), task(outputs)
    found = stack.accuracy(x.double(), y)
    assert found.shape == (2, 2)
    assert 0 < found.min() < found.max() < 1
    for number, share in enumerate(found.flatten().tolist()):
        own = {name: w[number] for name, w in stack.weights.items()}
        right = 0
        for one, label in zip(x.double(), y, strict=True):
            answers = torch.arange(max(2, outputs))
            costs = [loss_of(plans[0], own, one[None], a[None], 1.0) for a in answers]
            right += int(torch.stack(costs).argmin() == label)
        assert share == pytest.approx(right / len(x))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_training_is_a_loop_with_adamw_in_which_biases_do_not_decay(schedule):
    plan = Plan(500, 5, direct=True, lr=0.02, schedule=schedule, decay=0.3)
    x, y = task()
    start = SparseStack([plan], [3], INPUTS, CLASSES, 6, CPU)
    own = {name: w[0].clone().requires_grad_() for name, w in start.weights.items()}
    groups = [
        {"params": [own[name] for name in ("first", "second", "direct")], "weight_decay": 0.3},
        {"params": [own[name] for name in ("bias", "out")], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups)
    batches = [rows for epoch in range(3) for rows in order(3, epoch, 60).split(25)]
    full = [rows for rows in batches if len(rows) == 25]  # ten are left over every time
    for done, rows in enumerate(full):
        adam.zero_grad()
        loss_of(plan, own, x[rows], y[rows], 1.0).backward()
        for group in adam.param_groups:
            group["lr"] = plan.rate(done / 6)
        adam.step()
    stack = only(train([plan], [3], x, y, outputs=CLASSES, epochs=3, batch=25))
    assert int(stack.step) == len(full) == 6
    for name, weight in own.items():
        torch.testing.assert_close(stack.weights[name][0], weight.detach(), rtol=1e-4, atol=1e-5)


def test_dropped_inputs_are_not_seen_and_the_others_count_for_them(monkeypatch):
    seen = []
    monkeypatch.setattr(SparseStack, "train", lambda stack, x, y, weights: seen.append(x))
    x, y = torch.full((500, INPUTS), 3.0), torch.arange(500) % CLASSES
    train(
        [Plan(500, direct=True, dropout=0.25)], [0, 1], x, y, outputs=CLASSES, batch=500, epochs=1
    )
    assert set(seen[0].flatten().tolist()) == {0.0, 4.0}
    assert 0.72 < (seen[0] > 0).double().mean() < 0.78
    assert not torch.equal(seen[0][0], seen[0][1])  # every seed has its own


# ---- company -----------------------------------------------------------------------------------

COMPANY = [
    Plan(60, 6, prune=Prune(0.2, 0.8)),
    Plan(45, 6, prune=Prune(0.5, 0.5, "second-order"), lr=1e-2, decay=0.1, smooth=0.1),
    # Once only: weights that came back make a first step of the same size, and rounding would say
    # which of them goes again.
    Plan(60, 6, start="erdos-renyi", rewire=Rewire(0.4, until=0.2)),
    Plan(70, 6, start="uniform", rewire=Rewire(0.4, "gradient", until=0.2), schedule="constant"),
    Plan(50, 6, direct=True, prune=Prune(0.1, 0.7, "second-order", 5.0)),
    Plan(20, direct=True, prune=Prune()),
    Plan(15, direct=True, l1=True, lr=1e-2),
    Plan(18, direct=True, l1=True, lr=1e-2),
    Plan(40, 6, activation="none", prune=Prune()),
    Plan(84, 6, splits=(SplitAt(2),), schedule="again"),
    Plan(84, 6, splits=(SplitAt(2),), lr=1e-2),
    Plan(50, 6, direct=True, prune=Prune(), dropout=0.2),
    Plan(60, 6, splits=(SplitAt(2, at=0.25, scale=0.5),), prune=Prune(0.3)),
]


def network(stack, seed, plan):
    number = seed * len(stack.plans) + plan
    parts = {"weight": stack.weights, "mask": stack.masks}
    return {f"{name} {kind}": w[number] for kind, part in parts.items() for name, w in part.items()}


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_company_changes_nothing(weighted):
    seeds = [5, 0, 2**40]
    weights = torch.arange(60) % 3 / 2 if weighted else None
    together = trained(COMPANY, seeds, weights=weights)
    assert len(together) == 8
    assert sorted(place for _, places in together for place in places) == list(range(len(COMPANY)))
    for stack, places in together:
        for here, place in enumerate(places):
            assert stack.plans[here] == COMPANY[place]
            for number, seed in enumerate(seeds):
                alone = only(trained([COMPANY[place]], [seed], weights=weights))
                expected = network(alone, 0, 0)
                for name, found in network(stack, number, here).items():
                    torch.testing.assert_close(
                        found, expected[name], rtol=1e-5, atol=1e-5, msg=f"{place} {seed} {name}"
                    )


def test_stacks_in_threads_of_their_own_learn_the_same(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 2)
    before, threads, runs = torch.get_num_threads(), [], []
    real = SparseStack.train

    def noted(stack, *batch):
        threads[-1].add(threading.current_thread())
        real(stack, *batch)

    monkeypatch.setattr(SparseStack, "train", noted)
    for worth in (10**9, 1):
        monkeypatch.setattr(module, "_WORTH_A_THREAD", worth)
        threads.append(set())
        runs.append(trained(COMPANY, [5, 0]))
    assert threads[0] == {threading.current_thread()}
    assert threading.current_thread() not in threads[1]
    assert torch.get_num_threads() == before
    for (one, places), (other, same) in zip(*runs, strict=True):
        assert places == same
        for name, weight in one.weights.items():
            assert torch.equal(weight, other.weights[name])


def test_seeds_and_plans_make_a_difference():
    stack = only(trained([Plan(99, 6, lr=1e-2), Plan(99, 6, lr=1e-3)], [0, 1]))
    firsts = stack.weights["first"]
    distances = (firsts.unsqueeze(0) - firsts.unsqueeze(1)).abs().amax((-2, -1))
    assert (distances + torch.eye(4) > 1e-3).all()


def test_a_sample_that_counts_nothing_is_not_learnt_from():
    x, y = task()
    there, other = torch.ones(60), y.clone()
    there[::4], other[::4] = 0, (y[::4] + 1) % 3
    plans = [Plan(99, 6, direct=True)]
    runs = [
        only(train(plans, [0], x, labels, outputs=3, epochs=2, batch=20, weights=weights))
        for labels, weights in ((y, there), (other, there), (other, None))
    ]
    one, same, different = (stack.weights["first"] for stack in runs)
    assert torch.equal(one, same)
    assert not torch.allclose(one, different)


def test_every_epoch_is_told_of():
    told = []
    trained([Plan(99, 6)], epochs=4, on_epoch=told.append)
    assert told == [1, 2, 3, 4]


def test_it_learns():
    plans = [
        Plan(75, 6, lr=1e-2),
        Plan(40, 32, direct=True, prune=Prune(), lr=1e-2),
        Plan(20, direct=True, l1=True, lr=1e-2),
    ]
    x, y = task()
    for stack, _ in trained(plans, epochs=60):
        assert stack.accuracy(x, y).item() > 0.85


# ---- the split ---------------------------------------------------------------------------------


def as_mlp(stack, number):
    """Return a network of a stack, and its Adam, as PyTorch has them."""
    model = MLP([stack.inputs, stack.weights["first"].shape[1], stack.outputs])
    adam = torch.optim.Adam(model.parameters())
    for name, parameter in zip(NAMES, model.parameters(), strict=True):
        parameter.data.copy_(stack.weights[name][number])
        mean, square = (moment[number].clone() for moment in stack.moments[name])
        adam.state[parameter] = {"step": torch.tensor(4.0), "exp_avg": mean, "exp_avg_sq": square}
    return model, adam


NAMES = ("first", "bias", "second", "out")


def step(stack, x, y):
    targets = F.one_hot(y, CLASSES).mT.float()
    stack.train(x.expand(len(stack.seeds), -1, -1), targets.expand(len(stack.seeds), -1, -1))


def assert_expanded(stack, number, wide, adam):
    """Compare a network's masks, weights and moments with those of a model."""
    assert torch.equal(stack.masks["first"][number], wide.layers[0].mask)
    assert torch.equal(stack.masks["second"][number], wide.layers[2].mask)
    for name, parameter in zip(NAMES, wide.parameters(), strict=True):
        state = adam.state[parameter]
        pairs = zip(stack.moments[name], (state["exp_avg"], state["exp_avg_sq"]), strict=True)
        for found, expected in ((stack.weights[name], parameter.data), *pairs):
            kept = stack.masks[name][number] if name in stack.masks else torch.tensor(True)
            assert torch.equal(found[number], expected * kept), name


@pytest.mark.parametrize(
    ("alpha", "split", "allocation"),
    [
        (2, "random", "magnitude"),
        (3, "random", "magnitude"),
        (4, "random", "magnitude"),
        (2, "overlapping", "magnitude"),
        (4, "2:8", "layer"),
        (2, "gram", "erdos-renyi"),
        (2, "random", "saliency"),
    ],
)
def test_a_split_is_what_expand_makes_of_the_same_network(alpha, split, allocation):
    at = SplitAt(alpha, allocation=allocation, split=split)
    plans = [Plan(75, 6, splits=(at,), lr=lr) for lr in (1e-2, 1e-3)]
    stack, (x, y) = SparseStack(plans, [7, 4], INPUTS, CLASSES, 10, CPU), task()
    for _ in range(4):
        step(stack, x, y)
    assert not tick(stack, 0.4, 0.3)
    before = [as_mlp(stack, number) for number in range(4)]
    assert tick(stack, 0.5, 0.4)
    for number, (model, adam) in enumerate(before):
        wide = fissile.expand(
            model, alpha, split, seed=[7, 4][number // 2], budget="all", allocation=allocation,
            optimizer=adam,
        )  # fmt: skip
        wide = fissile.to_masked(wide, optimizer=adam)
        assert_expanded(stack, number, wide, adam)
        assert stack.nonzeros()[number // 2, number % 2] == fissile.nonzeros(wide).all == 75


def dense_size(hidden, inputs=INPUTS, outputs=CLASSES):
    return hidden * (inputs + 1 + outputs) + outputs


STAGES = {
    "2": (SplitAt(2),),
    "3": (SplitAt(3, at=0.2),),
    "4": (SplitAt(4),),
    "2 then 2": (SplitAt(2, at=0.25), SplitAt(2, at=0.75)),
    "at once": (SplitAt(2, at=0.0),),
    "in the end": (SplitAt(2, at=1.0),),
}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("direct", [False, True])
def test_splitting_keeps_the_budget_to_the_weight(stages, direct):
    splits, alpha = STAGES[stages], 1
    budget = dense_size(6) + direct * INPUTS * CLASSES
    stack = only(trained([Plan(budget, 6, direct=direct, splits=splits)], [0, 1]))
    for split in splits:
        alpha *= split.alpha
    assert stack.weights["first"].shape == (2, 6 * alpha, INPUTS)
    assert stack.nonzeros().tolist() == [[budget], [budget]]
    assert_zero_outside(stack)


def test_children_share_their_parents_inputs_without_meeting():
    stack = only(trained([Plan(dense_size(6), 6, splits=(SplitAt(2),))]))
    assert stack.masks["first"][0].view(6, 2, INPUTS).sum(1).max() == 1


@pytest.mark.parametrize("at", [0.5, 0.75])
def test_copies_can_be_scaled(at):
    plan = Plan(dense_size(6), 6, splits=(SplitAt(2, at=at, scale=0.5),), lr=0.0)
    start = SparseStack([plan], [3], INPUTS, CLASSES, 10, CPU)
    stack = only(trained([plan], [3]))
    copies = start.weights["second"].repeat_interleave(2, -1) / 2
    assert torch.equal(stack.weights["second"], copies * stack.masks["second"])
    assert stack.weights["second"].count_nonzero() == stack.masks["second"].sum() > CLASSES * 6


# ---- budgets -----------------------------------------------------------------------------------


def assert_zero_outside(stack):
    for name, mask in stack.masks.items():
        for one in (stack.weights[name], *stack.moments[name]):
            assert not one[~mask].any()


def strict_count(stack, number):
    """Count the weights that are not zero, and the biases of the neurons that they keep alive."""
    own = {name: stack.weights[name][number] != 0 for name in stack.masks}
    total = sum(int(w.sum()) for w in own.values()) + stack.outputs
    if "bias" in stack.weights:
        total += int((own["first"].any(1) & own["second"].any(0)).sum())
    return total


def dense_sized(budget, **settings):
    return Plan(budget, within_budget(budget, INPUTS, CLASSES), **settings)


KINDS = {
    "dense": dense_sized,
    "split": lambda budget: dense_sized(budget, splits=(SplitAt(2),)),
    "stages": lambda budget: dense_sized(budget, splits=(SplitAt(2, at=0.3), SplitAt(2, at=0.6))),
    "uniform": lambda budget: Plan(budget, 9, start="uniform"),
    "erdos-renyi": lambda budget: Plan(budget, 9, start="erdos-renyi", direct=True),
    "factored from the start": lambda budget: Plan(budget, 9, activation="none", start="uniform"),
    "SET": lambda budget: Plan(budget, 9, start="erdos-renyi", rewire=Rewire()),
    "RigL": lambda budget: Plan(budget, 9, start="uniform", rewire=Rewire(0.5, "gradient", 1.0)),
    "one shot": lambda budget: Plan(budget, 16, prune=Prune(0.5, 0.5)),
    "gradual": lambda budget: Plan(budget, 16, direct=True, prune=Prune(0.1, 1.0, "second-order")),
    "linear": lambda budget: Plan(budget, direct=True, prune=Prune(), dropout=0.2),
    "factored": lambda budget: Plan(budget, 16, activation="none", prune=Prune()),
    "l1": lambda budget: Plan(budget, direct=True, l1=True),
    "split, then pruned": lambda budget: Plan(
        budget, 8, splits=(SplitAt(2, at=0.3),), prune=Prune(0.4)
    ),
}


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("kind", KINDS)
@given(budget=st.integers(15, 110), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_no_plan_is_left_with_more_than_its_budget(kind, budget, epochs, seed):
    plan = KINDS[kind](budget)
    stack = only(trained([plan], [seed, seed + 1], epochs=epochs))
    assert (stack.nonzeros() <= budget).all()
    assert max(strict_count(stack, number) for number in range(2)) <= budget
    assert_zero_outside(stack)


@pytest.mark.parametrize(
    "kind", ["uniform", "erdos-renyi", "factored from the start", "SET", "RigL"]
)
def test_what_is_sparse_from_the_start_uses_its_budget_up(kind):
    stack = only(trained([KINDS[kind](70)], [0, 1]))
    assert stack.nonzeros().tolist() == [[70], [70]]


@pytest.mark.parametrize("kind", ["one shot", "gradual", "linear", "factored"])
def test_pruning_leaves_about_the_budget(kind):
    found = only(trained([KINDS[kind](24)], range(5))).nonzeros()
    assert found.max() <= 24
    assert found.min() > 18  # a neuron may go as a whole


@pytest.mark.parametrize("saliency", ["magnitude", "second-order"])
def test_what_goes_first_is_of_the_least_saliency(saliency):
    plan = Plan(13, direct=True, prune=Prune(0.5, 0.5, saliency))
    stack = SparseStack([plan], [0], INPUTS, CLASSES, 10, CPU)
    torch.manual_seed(0)
    weight, square = stack.weights["direct"].normal_(), stack.moments["direct"].square.uniform_()
    score = weight.abs() if saliency == "magnitude" else weight.square() * square
    expected = score >= score.flatten().sort(descending=True).values[9]
    tick(stack, 0.5, 0.4)
    assert torch.equal(stack.masks["direct"], expected)
    assert_zero_outside(stack)


def test_what_is_due_at_the_end_is_done_when_ticks_do_not_end_there():
    stack = only(trained([Plan(10, direct=True, prune=Prune(1.0, 1.0))], epochs=67))
    assert int(stack.step) == 201  # looked at every second step
    assert stack.nonzeros().item() == 10


def test_a_penalty_keeps_no_weight_of_zero():
    stack = only(trained([Plan(15, direct=True, l1=True, lr=0.0)]))
    assert stack.nonzeros().item() == CLASSES


def test_a_penalty_leaves_about_the_budget():
    x, y = task(inputs=40)
    plan = Plan(33, direct=True, l1=True, lr=1e-2)
    found = only(train([plan], [0, 1], x, y, outputs=3, epochs=40, batch=20)).nonzeros()
    assert found.max() <= 33
    assert found.min() > 25


def test_a_penalty_chooses_before_it_cuts():
    x, y = task(inputs=40)
    plan = Plan(33, direct=True, l1=True, lr=1e-2)
    left = []
    stack = SparseStack([plan], [0], 40, 3, 120, CPU)
    for done in range(60):
        stack.train(x[None], F.one_hot(y).mT[None].float())
        tick(stack, (done + 1) / 120, done / 120)
        left.append((int(torch.count_nonzero(stack.weights["direct"])), float(stack.penalty)))
    assert stack.masks["direct"].sum() <= 30
    weights, penalties = zip(*left, strict=True)
    assert weights[0] > 90
    assert weights[-2] < 60  # nobody has cut yet
    assert penalties[-2] > 0
    assert penalties[-1] == 0


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("direct", [False, True])
def test_masks_move_and_every_layer_keeps_its_number(grow, direct):
    moving = Plan(70, 9, direct=direct, start="erdos-renyi", rewire=Rewire(0.5, grow))
    still = Plan(70, 9, direct=direct, start="erdos-renyi")
    start = SparseStack([moving, still], [0, 1], INPUTS, CLASSES, 9, CPU)
    stack = only(trained([moving, still], [0, 1]))
    for name, mask in stack.masks.items():
        assert torch.equal(mask.sum((-2, -1)), start.masks[name].sum((-2, -1)))
        moved = (mask != start.masks[name]).any(-1).any(-1)
        assert moved.tolist() == [True, False, True, False]
    assert_zero_outside(stack)


def test_masks_grow_where_the_gradient_is_largest():
    plan = Plan(15, direct=True, start="uniform", rewire=Rewire(0.5, "gradient"))
    stack, (x, y) = SparseStack([plan], [0], INPUTS, CLASSES, 10, CPU), task()
    gradients = {}
    before, update = stack.masks["direct"].clone(), stack._update
    stack._update = lambda found: (gradients.update(found), update(found))
    step(stack, x, y)
    size = gradients["direct"].abs()
    tick(stack, 0.1, 0.0)
    new, absent = stack.masks["direct"] & ~before, ~stack.masks["direct"] & ~before
    assert new.sum() == 5  # of 12 weights, a little less than a half
    assert size[new].min() > size[absent].max()
    assert not stack.weights["direct"][new].any()


@pytest.mark.parametrize("budget", [20, 90])
def test_the_recipe_stays_within_its_budget(budget):
    for stack, _ in trained(recipe(budget, INPUTS, CLASSES), [0, 1]):
        assert (stack.nonzeros() <= budget).all()
        assert max(strict_count(stack, number) for number in range(stack.networks)) <= budget
