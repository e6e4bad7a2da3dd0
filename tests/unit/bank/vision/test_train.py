"""The CNN of the paper, its data, and its training against a loop written out by hand."""

import copy
import importlib
import math

import numpy as np
import pytest
import torch
from torch import nn

import fissile
from fissile import FissileError, nonzeros
from fissile.bank import Dense, DropConnect, Expand
from fissile.bank.loop import Recipe, batches, penalty
from fissile.bank.vision import ConvNet, Images, Network, train
from fissile.bank.vision.convnet import image_order, scaled
from fissile.bank.vision.train import Job, make_adam
from fissile.layers import REMOVED

#: The module, whose name the function of the package hides.
TRAIN = importlib.import_module("fissile.bank.vision.train")
ARMS = {"dense": Dense(), "split": Expand(2)}
RECIPE = Recipe(batch=8, l1=1e-3, l2=1e-3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On a busy machine threads wait for each other, and so little work needs one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_images(samples=12, tests=6, classes=3, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples + tests, size, size, 3)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.arange(samples + tests) % classes
    return Images(x[:samples], y[:samples], x[samples:], y[samples:])


IMAGES = make_images()
NETWORK = Network(projection=6, neurons=4, seed=3)


def same(a, b):
    """Tell whether two models are equal to the bit."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# The network.


@pytest.mark.parametrize("projection", [256, 512])
def test_the_layers_are_the_papers(projection):
    model = ConvNet(projection, neurons=20, classes=100)
    kinds = [type(module).__name__ for module in model.backbone]
    block = ["Conv2d", "BatchNorm2d", "ReLU"] * 3 + ["MaxPool2d"]
    tail = ["Conv2d", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten"]
    assert kinds == block * 3 + tail
    convolutions = [m for m in model.backbone if isinstance(m, nn.Conv2d)]
    shapes = [(m.in_channels, m.out_channels, m.kernel_size[0]) for m in convolutions]
    blocks = [(3, 64), (64, 64), (64, 64), (64, 128), (128, 128), (128, 128), (128, 256)]
    blocks += [(256, 256), (256, 256)]
    assert shapes == [(*pair, 3) for pair in blocks] + [(256, projection, 1)]
    assert all(m.bias is None and m.stride == (1, 1) for m in convolutions)
    kernels = sum(9 * a * b for a, b in blocks) + 256 * projection
    norms = 2 * (3 * 64 + 3 * 128 + 3 * 256 + projection)
    head = projection * 20 + 20 + 20 * 100 + 100
    assert sum(p.numel() for p in model.parameters()) == kernels + norms + head


def test_the_images_shrink_as_the_paper_says():
    model, shapes = ConvNet(256, 20, 100), []
    for module in model.backbone:
        if isinstance(module, nn.MaxPool2d | nn.Flatten):
            module.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    assert shapes == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (256,)]


def test_the_seed_decides_the_weights_and_leaves_other_chance_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models = [ConvNet(6, 4, 3, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)
    assert same(models[0], models[1])
    assert not same(models[0], models[2])


# The data.


def test_colours_may_come_first_or_last_as_tensors_or_arrays():
    x = IMAGES.x.permute(0, 3, 1, 2)
    other = Images(x.numpy(), IMAGES.y.numpy().astype(np.int32), IMAGES.x_test, IMAGES.y_test)
    assert torch.equal(other.x, IMAGES.x)
    assert torch.equal(other.y, IMAGES.y)
    assert other.classes == 3


def test_images_are_scaled_by_the_training_set():
    x = scaled(IMAGES.x, *IMAGES.scale())
    assert x.shape == (12, 3, 8, 8)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))
    flat = Images(torch.full((2, 8, 8, 3), 7, dtype=torch.uint8), [0, 1], IMAGES.x, IMAGES.y)
    assert not scaled(flat.x, *flat.scale()).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": IMAGES.x.float()}, "bytes"),
        ({"x": IMAGES.x[..., :2]}, "colour images"),
        ({"x": torch.zeros(12, 12, 12, 3, dtype=torch.uint8)}, "multiple of 8"),
        ({"x": torch.zeros(12, 16, 16, 3, dtype=torch.uint8)}, "one size"),
        ({"y": IMAGES.y[:3]}, "one for each"),
        ({"y": IMAGES.y.float()}, "whole numbers"),
        ({"y": IMAGES.y - 1}, "from 0 on"),
    ],
)
def test_odd_data_is_refused(changes, message):
    parts = {name: getattr(IMAGES, name) for name in ("x", "y", "x_test", "y_test")}
    with pytest.raises(FissileError, match=message):
        Images(**(parts | changes))


# The training.


def by_hand(network, arm, warm_up, fine_tune):
    """Everything `train` does for one arm, written out."""
    model = ConvNet(network.projection, network.neurons, IMAGES.classes, seed=network.seed)
    adam = torch.optim.Adam(model.parameters(), RECIPE.lr, weight_decay=2 * RECIPE.l2)
    x, x_test = (scaled(part, *IMAGES.scale()) for part in (IMAGES.x, IMAGES.x_test))
    curve = []
    for epoch in range(warm_up + fine_tune):
        if epoch == warm_up and isinstance(arm, Expand):
            model.head = fissile.expand(
                model.head, arm.alpha, arm.split, seed=network.seed, optimizer=adam
            )
        model.train()
        for rows in batches(len(x), RECIPE.batch, network.seed, epoch):
            loss = nn.functional.cross_entropy(model(x[rows]), IMAGES.y[rows])
            loss = loss + RECIPE.l1 * model.head.layers[0].weight.abs().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            right = model.eval()(x_test).argmax(1) == IMAGES.y_test
        curve.append(right.double().mean().item())
    return model, curve


@pytest.fixture(scope="module")
def trained():
    return train([NETWORK], IMAGES, ARMS, recipe=RECIPE, warm_up=1, fine_tune=1)[0]


@pytest.mark.parametrize("name", ARMS)
def test_training_is_the_loop_by_hand_to_the_bit(name, trained):
    model, curve = by_hand(NETWORK, ARMS[name], warm_up=1, fine_tune=1)
    assert same(trained[name].model, model)
    assert trained[name].accuracy == curve
    assert len(trained[name].loss) == 2
    assert not trained[name].diverged


def test_the_split_keeps_the_number_of_weights(trained):
    dense, split = trained["dense"], trained["split"]
    assert dense.nonzeros == split.nonzeros == 4 * 6 + 3 * 4
    assert nonzeros(split.model.head).weights == split.nonzeros
    assert split.model.head.layers[0].out_features == 8
    assert split.accuracy[0] == dense.accuracy[0]  # the warm-up is one
    assert split.loss[1] != dense.loss[1]


def test_weight_decay_is_the_l2_of_the_recipe():
    model = ConvNet(6, 4, 3, seed=3)
    x = scaled(IMAGES.x, *IMAGES.scale())
    adam = torch.optim.Adam(model.parameters(), RECIPE.lr)
    for rows in batches(len(x), RECIPE.batch, 3, 0):
        loss = nn.functional.cross_entropy(model(x[rows]), IMAGES.y[rows])
        loss = loss + penalty(model.head, RECIPE)
        loss = loss + RECIPE.l2 * sum(p.square().sum() for p in model.backbone.parameters())
        adam.zero_grad()
        loss.backward()
        adam.step()
    found = train([NETWORK], IMAGES, {"dense": Dense()}, recipe=RECIPE, warm_up=1, fine_tune=0)
    for p, q in zip(found[0]["dense"].model.parameters(), model.parameters(), strict=True):
        assert (p - q).norm() < 0.02 * q.norm() + 1e-3  # Adam turns rounding into steps


def test_company_does_not_matter(trained):
    company = [Network(7, 5, seed=8), NETWORK]
    found = train(company, IMAGES, ARMS, recipe=RECIPE, warm_up=1, fine_tune=1, side_by_side=2)[1]
    for name in ARMS:
        assert same(found[name].model, trained[name].model)
        assert found[name].loss == trained[name].loss


def stepped(model, adam):
    """Make a step of Adam with gradients out of the air, which are returned."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    before = [p.grad + 2 * RECIPE.l2 * p.detach() for p in model.parameters()]
    adam.step()
    return before


def test_moments_are_carried_over_or_start_afresh():
    model = ConvNet(6, 4, 3, seed=3)
    job = Job(0, None, 3, model, make_adam(model, RECIPE), epoch=1, until=1)
    stepped(model, job.adam)
    old = {name: job.adam.state[p] for name, p in model.named_parameters()}
    carried = job.branch("carry", Expand(2), 2, RECIPE)
    new = {name: carried.adam.state[p] for name, p in carried.model.named_parameters()}
    assert new.keys() == old.keys()
    first, last = carried.model.head.layers[0], carried.model.head.layers[2]
    for key in ("exp_avg", "exp_avg_sq"):
        for name in old:
            if name.startswith("backbone"):
                assert torch.equal(new[name][key], old[name][key])
        kept, weight = first.owner != REMOVED, "head.layers.0.weight"
        assert kept.sum() + last.mask.sum() == 4 * 6 + 3 * 4
        assert torch.equal(new[weight][key][kept], old[weight][key][kept])
        wide = old["head.layers.2.weight"][key].repeat_interleave(2, dim=1)
        assert torch.equal(new["head.layers.2.weight"][key][last.mask], wide[last.mask])
    fresh = job.branch("fresh", Expand(2, moments="fresh"), 2, RECIPE)
    assert not fresh.adam.state
    grads = stepped(fresh.model, fresh.adam)
    for p, grad in zip(fresh.model.parameters(), grads, strict=True):  # from zero on
        assert fresh.adam.state[p]["step"] == 1
        torch.testing.assert_close(fresh.adam.state[p]["exp_avg"], 0.1 * grad)


def test_a_network_that_diverges_is_frozen_and_the_others_go_on(monkeypatch, trained):
    class Fragile(ConvNet):
        def __init__(self, *sizes, seed):
            super().__init__(*sizes, seed=seed)
            if seed == 1:
                with torch.no_grad():
                    self.head.layers[0].weight.fill_(3e38)

    monkeypatch.setattr(TRAIN, "ConvNet", Fragile)
    networks = [Network(6, 4, seed=1), NETWORK]
    seen = []
    settings = {"recipe": RECIPE, "warm_up": 1, "fine_tune": 1}
    bad, good = train(networks, IMAGES, ARMS, **settings, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1
    for name in ARMS:
        assert same(good[name].model, trained[name].model)
        assert bad[name].diverged
        assert len(bad[name].accuracy) == len(bad[name].loss) == 2
        assert all(math.isnan(value) for value in bad[name].accuracy)
        assert same(bad[name].model, Fragile(6, 4, 3, seed=1))


def test_divergence_in_an_arm_keeps_the_epochs_before(monkeypatch, trained):
    def explode(head, *_, **__):
        new = copy.deepcopy(head)
        new.layers[0].weight.data.fill_(3e38)
        return new

    monkeypatch.setattr(TRAIN, "expand", explode)
    settings = {"recipe": RECIPE, "warm_up": 1, "fine_tune": 1}
    found = train([NETWORK], IMAGES, ARMS, **settings)[0]
    assert same(found["dense"].model, trained["dense"].model)
    assert found["split"].diverged
    assert found["split"].accuracy[0] == trained["split"].accuracy[0]
    assert math.isnan(found["split"].accuracy[1])


def test_an_interruption_comes_through():
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([NETWORK], IMAGES, ARMS, recipe=RECIPE, warm_up=1, progress=interrupt)


def test_no_epochs_and_no_networks_are_little_work():
    assert train([], IMAGES, ARMS) == []
    found = train([NETWORK], IMAGES, ARMS, warm_up=0, fine_tune=0)[0]
    assert found["dense"].accuracy == []
    assert same(found["dense"].model, ConvNet(6, 4, 3, seed=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": DropConnect(2)}}, "use Dense or Expand"),
        ({"precision": "half"}, "unknown precision"),
        ({"precision": "bfloat16"}, "needs device='cuda'"),
        ({"warm_up": -1}, "warm_up"),
        ({"fine_tune": 1.5}, "fine_tune"),
        ({"side_by_side": -1}, "side_by_side"),
        ({"recipe": Recipe(batch=0)}, "batch"),
        ({"recipe": Recipe(batch=11)}, "another batch size"),
        ({"networks": [(6, 4, 0)]}, "Network"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    settings = {"networks": [NETWORK], "data": IMAGES, "arms": ARMS, "recipe": RECIPE} | changes
    with pytest.raises(FissileError, match=message):
        train(**settings)


@pytest.mark.parametrize("sizes", [(0, 4, 0), (6, 0, 0), (6, 4, -1), (6, 4, 2**63)])
def test_odd_networks_are_refused(sizes):
    with pytest.raises(FissileError):
        Network(*sizes)


# Mirrored images.


def test_half_of_the_images_are_mirrored_anew_in_each_epoch():
    plain = image_order(3, 1, 1000, mirror=False)
    orders = [image_order(3, epoch, 1000, mirror=True) for epoch in (1, 2)]
    assert torch.equal(torch.where(orders[0] < 0, ~orders[0], orders[0]), plain)
    assert torch.equal(plain, torch.cat(list(batches(1000, 8, 3, 1))))
    by_image = [torch.zeros(1000, dtype=torch.bool) for _ in orders]
    for flags, order in zip(by_image, orders, strict=True):
        flags[~order[order < 0]] = True
        assert 400 < int(flags.sum()) < 600
    assert 400 < int((by_image[0] != by_image[1]).sum()) < 600


def test_training_on_mirrored_images_is_the_loop_by_hand_to_the_bit():
    found = train(
        [NETWORK], IMAGES, {"": Dense()}, recipe=RECIPE, warm_up=1, fine_tune=0, mirror=True
    )
    model = ConvNet(NETWORK.projection, NETWORK.neurons, IMAGES.classes, seed=NETWORK.seed)
    adam = make_adam(model, RECIPE)
    model.train()
    for rows in image_order(NETWORK.seed, 0, len(IMAGES.y), mirror=True).split(RECIPE.batch):
        x = torch.stack([IMAGES.x[~r].flip(1) if r < 0 else IMAGES.x[r] for r in rows.tolist()])
        y = torch.tensor([int(IMAGES.y[~r if r < 0 else r]) for r in rows.tolist()])
        loss = nn.functional.cross_entropy(model(scaled(x, *IMAGES.scale())), y)
        loss = loss + RECIPE.l1 * model.head.layers[0].weight.abs().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert same(found[0][""].model, model.eval())


def test_an_arm_ends_where_it_has_enough():
    curves = []

    def enough(curve):
        curves.append(len(curve))
        return len(curve) == 3

    found = train(
        [NETWORK], IMAGES, {"": Dense()}, recipe=RECIPE, warm_up=1, fine_tune=9, enough=enough
    )
    assert len(found[0][""].accuracy) == 3
    assert curves == [2, 3]  # the warm-up is never cut short
