"""The kernels of the bank against the plain loop; without a GPU, in Triton's interpreter."""

import copy
from dataclasses import dataclass, fields

import pytest
import torch

import fissile
from fissile import MLP, Overlapping
from fissile._common.random import order, order_keys
from fissile.bank import Bank, Data, Dense, Expand, Spec, engines, gpu
from fissile.bank.loop import Recipe, accuracy, fit, task_loss
from fissile.layers import SparseLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@dataclass
class Trial:
    """A network in the middle of its training, and how it goes on."""

    model: torch.nn.Module
    adam: torch.optim.Adam
    seed: int
    recipe: Recipe
    which: int = 0


def make_sets(sets, samples, tests, inputs, classes, seed=0):
    """Boolean inputs, and labels that some weights explain."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (sets, samples + tests, inputs), generator=generator).float()
    teacher = torch.randn(sets, inputs, classes, generator=generator)
    z = (x - 0.5) @ teacher
    y = (z[..., 0] > 0).int() if classes == 1 else z.argmax(-1).int()
    return x[:, :samples], y[:, :samples], x[:, samples:], y[:, samples:]


def make_trials(count, sizes, sets=1, alpha=None, orthogonal=0.0, batch=16):
    """Networks that differ in everything, a few steps into their training."""
    x, y, *_ = make_sets(sets, 40, 20, sizes[0], sizes[-1])
    trials = []
    for i in range(count):
        torch.manual_seed(i)
        model = MLP(sizes)
        recipe = Recipe(
            lr=1e-3 * (i + 1), batch=batch, l1=1e-3 * i, l2=1e-3 * (i % 2), orthogonal=orthogonal
        )
        adam = torch.optim.Adam(model.parameters(), recipe.lr)
        if i % 2 or alpha:  # steps before the launch: moments and a count that are not zero
            fit(model, adam, x[i % sets], y[i % sets].long(), epochs=1, seed=9, recipe=recipe)
        if alpha:
            model = fissile.to_masked(fissile.expand(model, alpha, optimizer=adam), optimizer=adam)
        trials.append(Trial(model, adam, 100 + i, recipe, i % sets))
    return trials


def to_device(tensors):
    stacked = torch.stack(tensors).detach()
    return stacked.clone().contiguous().to(DEVICE)


def stack(trials):
    """Write the trials as the kernel takes them."""
    names = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    parameters = [[t.model.get_parameter(name) for t in trials] for name in names]

    def moments(key):
        return tuple(
            to_device([t.adam.state.get(p, {}).get(key, torch.zeros_like(p)) for t, p in pairs])
            for pairs in (list(zip(trials, ps, strict=True)) for ps in parameters)
        )

    def hyper(name):
        return torch.tensor([getattr(t.recipe, name) for t in trials], device=DEVICE)

    steps = [
        int(t.adam.state.get(p, {}).get("step", 0))
        for t, p in zip(trials, parameters[0], strict=True)
    ]
    masks = {}
    if isinstance(trials[0].model.layers[0], SparseLinear):
        for key, at in (("mask1", 0), ("mask2", 2)):
            masks[key] = to_device([t.model.layers[at].pattern() for t in trials]).to(torch.uint8)
    return gpu.Networks(
        *(to_device(ps) for ps in parameters),
        moments("exp_avg"),
        moments("exp_avg_sq"),
        torch.tensor(steps, device=DEVICE),
        hyper("lr"),
        hyper("l1"),
        hyper("l2"),
        **masks,
        orthogonal=hyper("orthogonal") if trials[0].recipe.orthogonal else None,
    )


def data_of(sets, trials):
    which = torch.tensor([t.which for t in trials], dtype=torch.int32)
    return gpu.DataSets(*(part.contiguous().to(DEVICE) for part in sets), which.to(DEVICE))


def keys_of(trials, epochs, start=0):
    seeds = torch.tensor([t.seed for t in trials])
    keys = [order_keys(seeds, epoch) for epoch in range(start, start + epochs)]
    return torch.stack(keys, 1).to(DEVICE)


def launch(networks, sets, trials, epochs, **options):
    options = {"batch": trials[0].recipe.batch} | options
    inputs, hidden = networks.w1.shape[2], networks.w1.shape[1]
    # Sizes of whole blocks are those of networks that are walked through.
    kernel = gpu.walk if gpu.blocks(hidden, inputs) == (hidden, inputs) else gpu.train
    return kernel(networks, data_of(sets, trials), keys_of(trials, epochs), **options)


def tensors_of(networks):
    flat = {}
    for field in fields(networks):
        value = getattr(networks, field.name)
        for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            if tensor is not None:
                flat[f"{field.name}{i}"] = tensor
    return flat


def assert_same(one, other):
    for name, tensor in tensors_of(one).items():
        assert torch.equal(tensor, tensors_of(other)[name]), name


def plain(trial, sets, epochs):
    """Train a trial with the plain loop; return its losses and right guesses after each epoch."""
    x, y, xt, yt = (part[trial.which] for part in sets)
    logits, losses, right = [], [], []
    hook = trial.model.register_forward_hook(lambda *args: logits.append(args[-1].detach()))
    for epoch in range(epochs):
        logits.clear()
        fit(
            trial.model,
            trial.adam,
            x,
            y.long(),
            epochs=1,
            seed=trial.seed,
            start=epoch,
            recipe=trial.recipe,
        )
        targets = y[order(trial.seed, epoch, len(x))].long()
        losses.append(float(task_loss(torch.cat(logits), targets)))
        right.append(round(accuracy(trial.model, xt, yt.long()) * len(xt)))
    hook.remove()
    return losses, right


CASES = {
    "one output": {"sizes": [20, 8, 1]},
    "three outputs": {"sizes": [20, 8, 3]},
    "wide": {"sizes": [16, 40, 1]},
    "several data sets": {"sizes": [20, 8, 1], "sets": 3},
    "expanded": {"sizes": [20, 8, 1], "alpha": 2},
    "expanded, classes": {"sizes": [20, 6, 3], "alpha": 3},
    "orthogonal": {"sizes": [20, 8, 1], "orthogonal": 0.1},
    "orthogonal, expanded": {"sizes": [20, 8, 3], "orthogonal": 0.1, "alpha": 2},
    "batches that fill no chunk": {"sizes": [20, 8, 1], "batch": 24},
    "walked": {"sizes": [128, 16, 3]},
    "walked, two blocks of neurons, several data sets": {"sizes": [128, 64, 5], "sets": 3},
    "walked, expanded": {"sizes": [128, 16, 3], "alpha": 2},
    "walked, batches that fill no block": {"sizes": [256, 16, 3], "batch": 24},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "samples", "options"),
    [
        # The last batch is smaller.
        *((case, 45, {} if "walked" in case else {"chunk": 16}) for case in CASES),
        ("one output", 32, {}),  # no position lands beyond the samples
        ("three outputs", 32, {}),
    ],
)
def test_it_agrees_with_the_plain_loop(case, samples, options):
    settings = CASES[case]
    sizes, count = settings["sizes"], settings.get("sets", 2)
    trials = make_trials(count, **settings)
    sets = make_sets(settings.get("sets", 1), samples, 37, sizes[0], sizes[-1], seed=1)
    networks = stack(trials)
    outcome = launch(networks, sets, trials, epochs=2, **options)
    assert outcome.finished.tolist() == [2] * count

    twins = copy.deepcopy(trials)
    expected = [plain(twin, sets, 2) for twin in twins]
    for name, tensor in tensors_of(stack(twins)).items():
        torch.testing.assert_close(tensors_of(networks)[name], tensor, **TOLERANCE, msg=name)
    losses = torch.tensor([losses for losses, _ in expected], device=DEVICE)
    torch.testing.assert_close(outcome.loss, losses, **TOLERANCE)
    assert outcome.correct.tolist() == [right for _, right in expected]


def test_training_does_something():
    """The agreement above would be cheap between networks that do not move."""
    trials, sets = make_trials(2, [20, 8, 1]), make_sets(1, 45, 37, 20, 1)
    networks = stack(trials)
    before = {k: v.clone() for k, v in tensors_of(networks).items()}
    launch(networks, sets, trials, epochs=1)
    moved = [k for k, v in tensors_of(networks).items() if not torch.equal(v, before[k])]
    assert moved == [k for k in before if k[:2] not in ("lr", "l1", "l2")]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_boolean_inputs_may_be_narrow(dtype):
    trials = make_trials(2, [20, 8, 1])
    x, y, xt, yt = make_sets(1, 45, 37, 20, 1)
    one, other = stack(trials), stack(trials)
    launch(one, (x, y, xt, yt), trials, epochs=1)
    launch(other, (x.to(dtype), y, xt.to(dtype), yt), trials, epochs=1)
    for name, tensor in tensors_of(one).items():  # another kernel may sum in another order
        torch.testing.assert_close(tensor, tensors_of(other)[name], rtol=1e-5, atol=1e-6)


def test_a_launch_goes_on_where_another_stopped():
    trials, sets = make_trials(2, [20, 8, 1]), make_sets(1, 45, 37, 20, 1)
    once, twice = stack(trials), stack(trials)
    whole = launch(once, sets, trials, epochs=2)
    for epoch in range(2):
        outcome = gpu.train(twice, data_of(sets, trials), keys_of(trials, 1, epoch), batch=16)
        assert torch.equal(outcome.loss[:, 0], whole.loss[:, epoch])
        assert torch.equal(outcome.correct[:, 0], whole.correct[:, epoch])
    assert_same(once, twice)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[20, 6, 1], [20, 6, 3], [128, 16, 3]])
def test_weights_that_do_not_exist_stay_zero(sizes):
    trials = make_trials(3, sizes, alpha=2, orthogonal=0.1 if sizes[1] == 6 else 0.0)
    networks = stack(trials)
    # Even a stack that was not cleaned: nothing of it may leak in.
    for weight, mask, i in ((networks.w1, networks.mask1, 0), (networks.w2, networks.mask2, 2)):
        for tensor in (weight, networks.m[i], networks.v[i]):
            tensor[mask == 0] = 7.0
    clean = stack(trials)
    sets = make_sets(1, 45, 37, sizes[0], sizes[-1])
    launch(networks, sets, trials, epochs=2)
    launch(clean, sets, trials, epochs=2)
    for weight, mask, i in ((networks.w1, networks.mask1, 0), (networks.w2, networks.mask2, 2)):
        for tensor in (weight, networks.m[i], networks.v[i]):
            assert not tensor[mask == 0].any()
        assert (weight[mask != 0] != 0).all()
    assert_same(networks, clean)


def part(networks, rows):
    """Cut networks out of a stack, as views: their memory begins wherever it does."""
    cut = {}
    for field in fields(networks):
        value = getattr(networks, field.name)
        if isinstance(value, tuple):
            cut[field.name] = tuple(tensor[rows] for tensor in value)
        else:
            cut[field.name] = None if value is None else value[rows]
    return gpu.Networks(**cut)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[20, 7, 1], [20, 7, 3], [128, 16, 3]])
def test_a_network_is_the_same_alone_and_in_company(sizes):
    trials = make_trials(3, sizes, sets=2)
    sets = make_sets(2, 45, 37, sizes[0], sizes[-1])
    together, apart = stack(trials), stack(trials)
    outcome = launch(together, sets, trials, epochs=2)
    for i in range(3):
        alone = launch(part(apart, slice(i, i + 1)), sets, trials[i : i + 1], epochs=2)
        assert torch.equal(alone.loss[0], outcome.loss[i])
        assert torch.equal(alone.correct[0], outcome.correct[i])
    assert_same(together, apart)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, and it complains
@pytest.mark.parametrize("sizes", [[20, 8, 1], [20, 8, 3], [128, 16, 3]])
def test_a_network_that_diverges_stops_at_its_last_finished_epoch(sizes):
    trials, sets = make_trials(4, sizes), make_sets(1, 45, 37, sizes[0], sizes[-1])
    calm = stack(trials)
    calm_outcome = launch(calm, sets, trials, epochs=3)

    wild = stack(trials)
    wild.lr[1] = 2e38  # infinite within the first epoch
    wild.lr[2] = 1e18  # the logits grow until a product of two weights overflows
    started = {k: v.clone() for k, v in tensors_of(wild).items()}
    outcome = launch(wild, sets, trials, epochs=3)
    finished = outcome.finished.tolist()
    assert (finished[0], finished[3]) == (3, 3)
    assert finished[1] == 0
    for i, epochs in enumerate(finished):
        assert outcome.loss[i, :epochs].isfinite().all()
        assert outcome.loss[i, epochs:].isnan().all()
        assert (outcome.correct[i, epochs:] == -1).all()
        assert wild.step[i] == started["step0"][i] + epochs * 3
    for name, tensor in tensors_of(wild).items():
        assert tensor.isfinite().all(), name
        assert torch.equal(tensor[1], started[name][1]), f"{name} is not that of the start"
        for i in (0, 3):
            assert torch.equal(tensor[i], tensors_of(calm)[name][i]), f"{name} was harmed"
    assert torch.equal(outcome.loss[[0, 3]], calm_outcome.loss[[0, 3]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_diverges_late_keeps_the_epochs_before():
    x, y, xt, yt = make_sets(1, 45, 37, 20, 1)
    sets = x, torch.ones_like(y), xt, yt
    trials = make_trials(2, [20, 8, 1])

    def racing():
        """All parameters of the second network rest but one, which grows until it overflows."""
        networks = stack(trials)
        for tensor in (networks.w1, networks.b1, networks.w2, *networks.m, *networks.v):
            tensor[1] = 0
        networks.b2[1], networks.step[1], networks.lr[1], networks.l2[1] = 1, 1000, 2e37, -1e-30
        return networks

    wild, again = racing(), racing()
    outcome = launch(wild, sets, trials, epochs=4)
    assert outcome.finished[0] == 4
    finished = int(outcome.finished[1])
    assert 0 < finished < 4
    assert outcome.loss[1, :finished].isfinite().all()
    launch(again, sets, trials, epochs=finished)
    assert 1e37 < again.b2[1] < float("inf")
    for name, tensor in tensors_of(wild).items():
        assert torch.equal(tensor[1], tensors_of(again)[name][1]), name


def test_it_says_what_fits():
    assert gpu.fits(8, 32, 1)
    assert gpu.fits(256, 32, 1)
    assert gpu.fits(64, 128, 10)
    assert gpu.fits(16, 32, 128)
    assert not gpu.fits(256, 784, 10)
    assert not gpu.fits(16, 32, 129)


# ---- the engine of the bank --------------------------------------------------------------------


def bank_of(specs, run, monkeypatch):
    """A bank whose stacks go through one engine, on the device of these tests."""
    with monkeypatch.context() as patch:
        patch.setattr(engines, "run_torch", run)
        bank = Bank(specs, device=DEVICE, engine="plain")
        bank.train(until=1)
        arms = bank.branch({"dense": Dense(), "split": Expand(2), "over": Expand(2, Overlapping())})
        arms.train(until=4)
    return arms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_the_engine_agrees_with_the_plain_one_and_freezes_what_diverges(monkeypatch):
    x, y, xt, yt = make_sets(2, 45, 37, 8, 1)
    data = [Data(x[i].float(), y[i].long(), xt[i].float(), yt[i].long()) for i in range(2)]
    recipe = Recipe(lr=1e-2, batch=16, l1=1e-3)
    specs = [Spec([8, 6, 1], data[i % 2], seed=i, recipe=recipe) for i in range(3)]
    specs.append(Spec([8, 6, 1], data[0], seed=7, recipe=Recipe(lr=1e38, batch=16)))
    expected = bank_of(specs, engines.run_torch, monkeypatch)
    found = bank_of(specs, gpu.run, monkeypatch)
    assert all(gpu.can(stack) for stack in found._stacks)
    assert found.diverged == expected.diverged == [9, 10, 11]
    torch.testing.assert_close(found.accuracy, expected.accuracy, equal_nan=True)
    torch.testing.assert_close(found.loss, expected.loss, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.nonzeros, expected.nonzeros)
    for index in range(9):
        one, other = (bank.take(index) for bank in (found, expected))
        for key, value in one[0].state_dict().items():
            torch.testing.assert_close(value, other[0].state_dict()[key], rtol=0, atol=1e-4)
        for mine, theirs in zip(one[1].state.values(), other[1].state.values(), strict=True):
            assert mine["step"] == theirs["step"]
            torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_networks_of_several_shapes_share_a_launch_and_do_not_notice(monkeypatch):
    specs = []
    for inputs, hidden, seed in ((8, 6, 0), (12, 5, 1), (8, 7, 2), (16, 8, 3), (20, 6, 4)):
        x, y, xt, yt = (part[0] for part in make_sets(1, 45, 37, inputs, 1))
        data = Data(x.float(), y.long(), xt.float(), yt.long())
        recipe = Recipe(lr=1e-2, batch=16, l1=1e-3, orthogonal=0.0)
        specs.append(Spec([inputs, hidden, 1], data, seed=seed, recipe=recipe))
    banks = [Bank(specs, device=DEVICE), Bank(specs, device=DEVICE)]
    groups = gpu.together(banks[0]._stacks)
    assert sorted(len(group) for group in groups) == [1, 4]  # 20 inputs need a wider tile
    seen = []
    for group in groups:
        gpu.run(
            group, 2, lambda stack, *curves: seen.append((stack, *curves)), torch.device(DEVICE)
        )
    for stack in banks[1]._stacks:
        alone = []
        note = lambda _, *curves, alone=alone: alone.append(curves)  # noqa: E731
        gpu.run([stack], 2, note, torch.device(DEVICE))
        mine = next(one for one in banks[0]._stacks if torch.equal(one.members, stack.members))
        curves = [curve for one, *curve in seen if one is mine]
        for found, expected in zip(
            zip(*curves, strict=True), zip(*alone, strict=True), strict=True
        ):
            assert torch.equal(torch.cat(found, 1), torch.cat(expected, 1))
        for found, expected in zip(
            mine.module.state_dict().values(), stack.module.state_dict().values(), strict=True
        ):
            assert torch.equal(found, expected)
        assert mine.epoch == stack.epoch == 2


def test_the_engine_leaves_the_last_recorded_epoch_when_interrupted(monkeypatch):
    x, y, xt, yt = make_sets(1, 45, 37, 8, 1)
    data = Data(x[0].float(), y[0].long(), xt[0].float(), yt[0].long())
    bank = Bank([Spec([8, 6, 1], data, seed=s) for s in range(2)], device=DEVICE)
    (stack,) = bank._stacks
    real = gpu.train

    def interrupted(*arguments, **options):
        real(*arguments, **options)
        if stack.epoch == 1:
            raise KeyboardInterrupt

    gpu.run([stack], 1, lambda *_: None, torch.device(DEVICE))
    before = {k: v.clone() for k, v in stack.module.state_dict().items()}
    monkeypatch.setattr(gpu, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.run([stack], 3, lambda *_: None, torch.device(DEVICE))
    assert stack.epoch == 1
    assert all(torch.equal(before[k], v) for k, v in stack.module.state_dict().items())
