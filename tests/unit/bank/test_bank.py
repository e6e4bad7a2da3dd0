"""The bank against a plain PyTorch loop, and a network against its company."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from bank_data import assert_same, blobs
from torch import nn

import fissile
from fissile import FissileError, Gram, Groups, Overlapping, Rewire, Structured
from fissile.bank import (
    Bank,
    Data,
    Dense,
    DropConnect,
    Dynamic,
    Expand,
    Spec,
)
from fissile.bank.loop import Recipe, accuracy, fit
from fissile.data import dnf_task

ARMS = {
    "dense": Dense(),
    "random": Expand(2),
    "groups": Expand(2, Groups([0, 1, 2, 3] * 2)),
    "gram": Expand(2, Gram(4)),
    "2:4": Expand(2, Structured(2, 4)),
    "overlapping": Expand(2, Overlapping()),
    "three, strict": Expand(3, budget="all"),
    "fresh": Expand(2, moments="fresh"),
    "dropconnect": DropConnect(2),
    "dynamic": Dynamic(2, every=3, fraction=0.2),
    "by gradient": Dynamic(2, every=4, fraction=0.1, grow="gradient"),
}
SHAPES = {
    "binary": {"sizes": [8, 6, 1]},
    "classes": {"sizes": [8, 6, 3]},
    "deep": {"sizes": [8, 6, 8, 5, 3]},
    "normed": {"sizes": [8, 6, 8, 5, 3], "layer_norm": True},
    "embedded": {"sizes": [8, 6, 1], "embedding": 8},
    "tanh": {"sizes": [8, 6, 3], "activation": "tanh"},
}


def loop(spec, arm, warm_up, fine_tune, dtype):
    """What a user would write: one network, a DataLoader's worth of steps, Adam."""
    torch.manual_seed(spec.seed)
    model = fissile.MLP(
        spec.sizes,
        embedding=spec.embedding,
        layer_norm=spec.layer_norm,
        activation=spec.activation,
    ).to(dtype)
    adam = torch.optim.Adam(model.parameters(), spec.recipe.lr)
    x, y = spec.data.x.to(dtype), spec.data.y
    fit(model, adam, x, y, epochs=warm_up, seed=spec.seed, recipe=spec.recipe)
    after_step = None
    if isinstance(arm, Expand):
        model = fissile.expand(
            model, arm.alpha, arm.split, seed=spec.seed, budget=arm.budget, optimizer=adam
        )
        if arm.moments == "fresh":
            adam = torch.optim.Adam(model.parameters(), spec.recipe.lr)
    elif isinstance(arm, DropConnect):
        model = fissile.dropconnect(model, arm.alpha, seed=spec.seed, optimizer=adam)
    elif isinstance(arm, Dynamic):
        model = fissile.expand(model, arm.alpha, arm.split, seed=spec.seed, optimizer=adam)
        model = fissile.to_masked(model, optimizer=adam)
        settings = {"every": arm.every, "fraction": arm.fraction, "grow": arm.grow}
        after_step = Rewire(model, adam, seed=spec.seed, **settings).step
    curve, test = [], (spec.data.x_test.to(dtype), spec.data.y_test)
    fit(
        model, adam, x, y, epochs=fine_tune, seed=spec.seed, start=warm_up, recipe=spec.recipe,
        after_step=after_step, after_epoch=lambda: curve.append(accuracy(model, *test)),
    )  # fmt: skip
    return model, curve


def trained(specs, arms, dtype=torch.float64, engine="auto"):
    bank = Bank(specs, dtype=dtype, engine=engine)
    bank.train(until=1)
    bank = bank.branch(arms)
    bank.train(until=3)
    return bank


RECIPES = [
    Recipe(lr=1e-2, batch=16),
    Recipe(lr=3e-3, batch=16, l1=1e-3, l2=1e-2),
    Recipe(lr=1e-2, batch=16, orthogonal=1e-2),
]


@cache
def looped(shape, dtype):
    """Networks of a shape, and each of them after the loop in every arm, once for all engines."""
    settings = SHAPES[shape]
    data = [blobs(seed, settings["sizes"][-1]) for seed in (0, 1)]
    recipes = list(enumerate(RECIPES))
    if dtype == torch.float32:  # rounding is looked at with one recipe for each shape
        turn = list(SHAPES).index(shape)
        recipes = [recipes[turn % 3]]
    specs = [Spec(data=data[i % 2], seed=i, recipe=recipe, **settings) for i, recipe in recipes]
    return specs, [loop(spec, arm, 1, 2, dtype) for spec in specs for arm in ARMS.values()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bank_is_the_loop(shape, dtype, tolerance, engine):
    """Every arm and architecture, two epochs after the split, networks of all kinds mixed."""
    specs, expected = looped(shape, dtype)
    bank = trained(specs, ARMS, dtype, engine)
    for index, (model, curve) in enumerate(expected):
        assert_same(bank.take(index)[0], model, tolerance)
        assert bank.accuracy[index].tolist() == pytest.approx(curve, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_company_does_not_matter_and_the_budget_holds(engine):
    """One bank of everything at once against each network alone."""
    specs = [
        Spec(data=blobs(0, s["sizes"][-1]), seed=i, recipe=RECIPES[i % 3], **s)
        for i, s in enumerate(SHAPES.values())
    ]
    together = trained(specs, ARMS, torch.float32, engine)
    again = trained(specs, ARMS, torch.float32, engine)
    # Every fifth network: each arm and each shape is among them, if not each pair of both.
    for index in range(0, len(together), 5):
        member = together.members[index]
        alone = trained([member.spec], {"": member.arm}, torch.float32, engine)
        assert_same(together.take(index)[0], alone.take(0)[0], 1e-5)
    for index in range(len(together)):
        one, two = (b.take(index)[0].state_dict() for b in (together, again))
        assert all(torch.equal(one[k], two[k]) for k in one), "not repeatable to the bit"
    nonzeros = together.nonzeros.view(len(specs), len(ARMS))
    for row in nonzeros:
        counts = dict(zip(ARMS, row.tolist(), strict=True))
        dense = counts["dense"]
        for name in ("random", "groups", "gram", "2:4", "overlapping", "dynamic", "by gradient"):
            assert counts[name] == dense
        assert counts["dropconnect"] > dense
    for index in range(len(together)):
        module = together.take(index)[0]
        assert int(together.nonzeros[index]) == fissile.nonzeros(module).weights


def test_arms_branch_from_one_warm_up_and_leave_it_alone():
    bank = Bank([Spec([8, 6, 1], blobs(0, 1), seed=s) for s in range(3)])
    bank.train(until=2)
    before = [copy.deepcopy(bank.take(i)[0].state_dict()) for i in range(3)]
    arms = bank.branch({"a": Dense(), "b": Dense(), "c": Expand(2)})
    arms.train(until=4)
    assert [m.origin for m in arms.members] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [m.name for m in arms.members] == ["a", "b", "c"] * 3
    for i in range(3):
        assert all(torch.equal(before[i][k], v) for k, v in bank.take(i)[0].state_dict().items())
        assert torch.equal(arms.accuracy[3 * i], arms.accuracy[3 * i + 1])
    assert arms.accuracy.shape == (9, 2)
    assert torch.equal(arms.last, arms.accuracy[:, -1])
    assert torch.equal(arms.best, arms.accuracy.max(1).values)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_some_networks_go_on_without_the_others(engine):
    sizes = ([8, 6, 1], [8, 4, 1], [8, 6, 1], [8, 6, 1])
    specs = [Spec(size, blobs(0, 1), seed=s) for s, size in enumerate(sizes)]
    bank, whole = Bank(specs, engine=engine), Bank(specs, engine=engine)
    whole.train(until=4)
    bank.train(until=2)
    some = bank.select([3, 1])
    some.train(until=4)
    assert [member.spec.seed for member in some.members] == [3, 1]
    for place, number in enumerate((3, 1)):
        one, other = some.take(place)[0].state_dict(), whole.take(number)[0].state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(some.accuracy[place], whole.accuracy[number, 2:])
    assert bank.accuracy.shape == (4, 2)
    for numbers in ([], [0, 0], [-1], [4]):
        with pytest.raises(FissileError, match="select takes some of the networks 0 to 3"):
            bank.select(numbers)


def test_a_network_goes_out_trains_alone_and_comes_back():
    data = blobs(0, 1)
    spec = Spec([8, 6, 1], data, seed=3, recipe=Recipe(lr=1e-2, batch=16))
    specs = [spec, Spec([8, 6, 1], data, seed=4)]
    bank, twin = (Bank(specs, dtype=torch.float64).branch({"": Expand(2)}) for _ in range(2))
    bank.train(until=1), twin.train(until=1)
    model, adam = bank.take(0)
    fit(
        model, adam, data.x.double(), data.y,
        epochs=1, seed=spec.seed, start=1, recipe=spec.recipe,
    )  # fmt: skip
    bank.train(until=2)
    assert_same(bank.take(0)[0], model, 1e-9)
    twin.train(until=2)
    twin.put(0, model, adam)
    bank.train(until=4), twin.train(until=4)
    for i in range(2):
        assert_same(bank.take(i)[0], twin.take(i)[0], 1e-9)
    assert isinstance(bank.take(0)[0], nn.Module)
    with pytest.raises(FissileError, match="no network 2"):
        bank.take(2)


def test_measures_on_the_whole_bank_are_those_of_each_network():
    specs = [Spec([8, h, 1], blobs(0, 1), seed=h) for h in (4, 5, 4)]
    bank = Bank(specs).branch({"dense": Dense(), "split": Expand(2)})
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    together = bank.measure(lambda g: fissile.measure.total_capacity(g.weights[0], groups))
    for i in range(len(bank)):
        weight = fissile.layers.weight_of(bank.take(i)[0].layers[0])
        torch.testing.assert_close(together[i], fissile.measure.total_capacity(weight, groups))


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, "fortran"])
def test_data_on_disk_is_streamed(tmp_path, engine, dtype):
    """Two mapped files of the same shape, in one bank with data in memory."""
    in_memory, streamed = [], []
    for seed in range(2):
        data = blobs(seed, 1)
        x = data.x.numpy().astype(np.float32 if dtype == "fortran" else dtype)
        x = np.asfortranarray(x) if dtype == "fortran" else x
        np.save(tmp_path / f"{seed}.npy", x)
        mapped = np.load(tmp_path / f"{seed}.npy", mmap_mode="r")
        in_memory.append(Data(torch.tensor(x), data.y, data.x_test, data.y_test))
        streamed.append(Data(mapped, data.y, data.x_test, data.y_test))
    banks = []
    for sets in (in_memory, streamed):
        specs = [Spec([8, 6, 1], sets[s % 2], seed=s) for s in range(4)]
        banks.append(Bank(specs, engine=engine))
        banks[-1].train(until=2)
    for i in range(4):
        assert_same(banks[0].take(i)[0], banks[1].take(i)[0], 1e-6)


def test_the_same_tensors_are_one_data_set():
    data = blobs(0, 1)
    again = [Data(data.x, data.y, data.x_test, data.y_test) for _ in range(5)]
    (stack,) = Bank([Spec([8, 6, 1], one, seed=s) for s, one in enumerate(again)])._stacks
    assert len(stack.data) == 1


def test_anything_that_is_numbers_is_taken():
    data = blobs(0, 3)
    expected = Bank([Spec([8, 6, 3], data, layer_norm=norm) for norm in (False, True)])
    expected.train(until=2)
    kinds = {
        "int32 labels": (data.x, data.y.int(), data.x_test, data.y_test.int()),
        "numpy": [t.numpy() for t in (data.x, data.y, data.x_test, data.y_test)],
        "a graph": (data.x.clone().requires_grad_(), data.y, data.x_test, data.y_test),
        "float64": (data.x.double(), data.y, data.x_test.double(), data.y_test),
        "turned": (data.x.T.contiguous().T, data.y, data.x_test, data.y_test),
    }
    for parts in kinds.values():
        given = Data(*parts)
        bank = Bank([Spec([8, 6, 3], given, seed=np.int64(0), layer_norm=n) for n in (False, True)])
        bank.train(until=2)
        for i in range(2):
            assert_same(bank.take(i)[0], expected.take(i)[0], 1e-6)


def test_activations_with_other_settings_are_not_thrown_together():
    data = blobs(0, 1)
    slopes = [Spec([8, 6, 1], data, seed=1, activation=nn.LeakyReLU(s)) for s in (0.0, 0.9)]
    together, alone = Bank(slopes), Bank(slopes[1:])
    together.train(until=2), alone.train(until=2)
    assert_same(together.take(1)[0], alone.take(0)[0], 1e-6)
    assert not torch.equal(together.loss[0], together.loss[1])


def test_dense_goes_on_as_it_is_moving_masks_included():
    bank = Bank([Spec([8, 6, 1], blobs(0, 1))]).branch({"": Dynamic(2, every=2, fraction=0.5)})
    bank.train(until=1)
    again = bank.branch({"": Dense()})
    bank.train(until=3), again.train(until=3)
    assert_same(bank.take(0)[0], again.take(0)[0], 0)


def test_real_boolean_data_is_learned():
    train, test = dnf_task(clauses=2, train=2000, test=500)
    data = Data(train.x, train.y, test.x, test.y)
    bank = Bank([Spec([8, 8, 1], data, seed=s, recipe=Recipe(lr=1e-2)) for s in range(4)])
    bank.train(until=10)
    assert bank.last.min() > 0.8
    assert (bank.loss[:, -1] < bank.loss[:, 0]).all()


BAD = {
    "no network": (lambda d: Bank([]), "at least one network"),
    "engine": (lambda d: Bank([Spec([8, 4, 1], d)], engine="warp"), "unknown engine 'warp'"),
    "device": (lambda d: Bank([Spec([8, 4, 1], d)], device="warp"), "cannot train on 'warp' here"),
    "inputs": (lambda d: Spec([7, 4, 1], d), "takes 7 inputs, its data has 8"),
    "classes": (lambda d: Spec([8, 4, 1], blobs(0, 3)), "tell 2 classes apart, the data has 3"),
    "seed": (lambda d: Spec([8, 4, 1], d, seed=-1), "seed=-1 is not a whole number"),
    "batch": (lambda d: Spec([8, 4, 1], d, recipe=Recipe(batch=0)), "batch=0 is not"),
    "labels": (lambda d: Data(d.x, d.y.float(), d.x, d.y), "labels y must be whole"),
    "lengths": (lambda d: Data(d.x, d.y[:3], d.x, d.y), "one label for each"),
    "columns": (lambda d: Data(d.x, d.y, d.x[:, :3], d.y), "different numbers of inputs"),
    "no arms": (lambda d: Bank([Spec([8, 4, 1], d)]).branch({}), "at least one arm"),
    "rrelu": (lambda d: Spec([8, 4, 1], d, activation="rrelu"), "chance of its own"),
    "prelu": (lambda d: Spec([8, 4, 1], d, activation=nn.PReLU()), "parameters or chance"),
    "negative": (lambda d: Spec([8, 4, 1], d, recipe=Recipe(orthogonal=-1)), "must be 0 or more"),
    "rate": (lambda d: Spec([8, 4, 1], d, recipe=Recipe(lr=float("nan"))), "lr=nan must be"),
    "long seed": (lambda d: Spec([8, 4, 1], d, seed=2**63), "more than 63 bits"),
    "half an epoch": (lambda d: Bank([Spec([8, 4, 1], d)]).train(2.5), "until=2.5 is not"),
    "put another": (
        lambda d: Bank([Spec([8, 4, 1], d)]).put(0, nn.Sequential(nn.Linear(8, 1))),
        "holds fissile.MLP networks",
    ),
    "put a wider": (
        lambda d: Bank([Spec([8, 4, 1], d)]).put(0, fissile.MLP([7, 4, 1])),
        "maps 7 inputs to 1 outputs",
    ),
    "put a frozen": (
        lambda d: Bank([Spec([8, 4, 1], d)]).put(0, fissile.MLP([8, 4, 1]).requires_grad_(False)),
        "frozen parameters",
    ),
    "put with SGD": (
        lambda d: Bank([Spec([8, 4, 1], d)]).put(
            0, m := fissile.MLP([8, 4, 1]), torch.optim.SGD(m.parameters())
        ),
        "goes on with Adam, not SGD",
    ),
    "alpha": (lambda d: Bank([Spec([8, 4, 1], d)]).branch({"": Expand(9)}), "fan-in of 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    act, message = BAD[name]
    with pytest.raises(FissileError, match=message):
        act(blobs(0, 1))
