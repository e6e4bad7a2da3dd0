"""The bank's kernel on a processor: it trains as the plain loop does, and leaves others alone."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fissile import MLP, expand
from fissile._common.random import order, order_keys, order_shape
from fissile.bank.cpu.kernel import Hyper, train_networks
from fissile.bank.cpu.layout import Architecture, Samples, Wiring
from fissile.bank.cpu.ops import fill_order
from fissile.bank.loop import Recipe, accuracy, fit
from fissile.layers import PartitionedLinear, SparseLinear, spread, weight_of


class Alone(NamedTuple):
    epochs: int
    step: int
    accuracy: np.ndarray
    loss: np.ndarray


def mlp_layers(sizes, embedding=None):
    """Return the layers of ``fissile.MLP(sizes, embedding=embedding)``."""
    front = () if embedding is None else (False,)  # an embedding has neither ReLU nor bias
    widths = (sizes[0], *(() if embedding is None else (embedding,)), *sizes[1:])
    hidden = [True] * (len(sizes) - 2)
    relu, biased = np.array([*front, *hidden, False]), np.array([*front, *hidden, True])
    return Architecture(np.array(widths), relu, biased, len(front), np.zeros(len(relu)))


@dataclass
class Flat:
    """A model and its Adam as the kernel holds them."""

    layers: Architecture
    wiring: Wiring
    state: tuple
    step: int

    @classmethod
    def of(cls, model, adam):
        linear = [k for k in model.modules() if isinstance(k, nn.Linear | SparseLinear)]
        wiring = Wiring.of([_pattern(layer)[None] for layer in linear])
        biases = [None if k.bias is None else k.bias.detach()[None] for k in linear]
        theta = wiring.pack([weight_of(k).detach()[None] for k in linear], biases)
        moments = [np.zeros_like(theta), np.zeros_like(theta)]
        step = 0
        if adam.state:
            step = int(adam.state[linear[0].weight]["step"])
            moments = [_moments(wiring, linear, adam, key) for key in ("exp_avg", "exp_avg_sq")]
        embedding = model.embedding_width
        hidden = linear if embedding is None else linear[1:]
        sizes = [linear[0].in_features, *[k.out_features for k in hidden]]
        layers = mlp_layers(sizes, embedding)
        return cls(layers, wiring, (theta, *moments), step)

    def train(self, train, test, keys, recipe):
        seed, epochs = keys
        steps = np.array([self.step])
        done = train_networks(
            self.layers, self.wiring, self.state, steps, np.arange(1), np.array([seed]), epochs,
            train, test, hyper_of([recipe]), recipe.batch,
        )  # fmt: skip
        self.step = int(steps[0])
        return Alone(int(done.epochs[0]), self.step, *(c[0, : done.epochs[0]] for c in done[1:]))


def _pattern(layer):
    if isinstance(layer, SparseLinear):
        return layer.pattern()
    return torch.ones_like(layer.weight, dtype=torch.bool)


def _moments(wiring, linear, adam, key):
    def written_out(layer):
        moment = adam.state[layer.weight][key]
        if isinstance(layer, PartitionedLinear):
            return spread(moment, layer.owner, layer.alpha)
        return moment

    biases = [None if k.bias is None else adam.state[k.bias][key][None] for k in linear]
    return wiring.pack([written_out(k)[None] for k in linear], biases)


def data(inputs, outputs, samples, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(max(2, outputs), (samples,), generator=generator)
    x[:, 0] += y  # something to learn
    return x.to(dtype), y


def keys_of(seed, epochs):
    """What decides the order of samples: a seed and the numbers of the epochs."""
    return seed, range(epochs[0], epochs[-1] + 1)


def hyper_of(recipes):
    return Hyper(*(np.array([getattr(r, name) for r in recipes]) for name in Hyper._fields))


CASES = {
    "dense": ([32, 8, 1], {}, None, 64, 0.0),
    "random": ([32, 8, 1], {}, ("random", 2), 64, 0.0),
    "2:4": ([32, 8, 3], {}, ("2:4", 2), 64, 0.0),
    "overlapping": ([19, 5, 1], {}, ("overlapping", 4), 7, 0.0),
    "gram": ([32, 8, 4], {}, ("gram", 3), 64, 0.0),
    "deeper": ([20, 6, 9, 7, 3], {}, None, 64, 0.0),
    "deeper and expanded": ([20, 6, 9, 7, 3], {}, ("random", 2), 64, 0.0),
    "embedding": ([24, 8, 1], {"embedding": 12}, ("random", 2), 64, 0.0),
    "wide": ([150, 6, 10], {}, ("random", 2), 64, 0.0),
    "neurons side by side": ([130, 10, 9], {}, None, 64, 0.0),
    "orthogonal": ([32, 8, 1], {}, None, 64, 0.1),
    "orthogonal and embedded": ([24, 8, 3], {"embedding": 12}, ("random", 2), 64, 0.1),
    "batches of one": ([8, 4, 1], {}, ("random", 2), 1, 0.0),
    "large batches": ([32, 8, 5], {}, None, 150, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_plain_loop_does(name, dtype):
    sizes, options, split, batch, orthogonal = CASES[name]
    torch.manual_seed(0)
    model = MLP(sizes, dtype=dtype, **options)
    recipe = Recipe(lr=1e-2, batch=batch, l1=1e-4, l2=1e-3, orthogonal=orthogonal)
    adam = torch.optim.Adam(model.parameters(), recipe.lr)
    x, y = data(sizes[0], sizes[-1], 200, dtype)
    x_test, y_test = data(sizes[0], sizes[-1], 90, dtype, seed=1)
    if split is not None:  # and Adam goes on across the split
        fit(model, adam, x, y, epochs=1, seed=5, recipe=recipe)
        model = expand(model, split[1], split[0], optimizer=adam)
    flat = Flat.of(model, adam)
    done = flat.train(Samples.of(x, y), Samples.of(x_test, y_test), keys_of(5, [1, 2]), recipe)

    curve = []
    fit(
        model, adam, x, y, epochs=2, seed=5, start=1, recipe=recipe,
        after_epoch=lambda: curve.append(accuracy(model, x_test, y_test)),
    )  # fmt: skip
    expected = Flat.of(model, adam)
    close = {"rtol": 0, "atol": 1e-9 if dtype == torch.float64 else 1e-4}
    np.testing.assert_allclose(np.stack(flat.state), np.stack(expected.state), **close)
    assert done.epochs == 2
    assert flat.step == expected.step
    assert done.accuracy.tolist() == curve


def test_the_loss_is_the_mean_over_the_samples():
    for outputs in (1, 3):
        model = MLP([8, 4, outputs], dtype=torch.float64)
        x, y = data(8, outputs, 100, torch.float64)
        adam = torch.optim.Adam(model.parameters())
        samples = Samples.of(x, y)
        recipe = Recipe(lr=0.0, batch=64, l1=0.0, l2=0.0)
        done = Flat.of(model, adam).train(samples, samples, keys_of(0, [0]), recipe)
        logits = model(x) if outputs > 1 else torch.cat([torch.zeros(len(x), 1), model(x)], 1)
        expected = nn.functional.cross_entropy(logits, y).detach()
        assert done.loss[0] == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("samples", [1, 2, 5, 64, 65, 1000])
def test_samples_come_in_the_order_of_the_epoch(samples):
    keys = order_keys(2**40 + 3, 7).numpy().astype(np.uint32)
    bits, shift = order_shape(samples)
    places, outside = np.empty((2, samples), np.uint32)
    fill_order(places, outside, keys, (1 << bits) - 1, shift)
    assert places.tolist() == order(2**40 + 3, 7, samples).tolist()


def explode(outputs, samples, lr, epochs):
    torch.manual_seed(0)
    model = MLP([8, 4, outputs])
    flat = Flat.of(model, torch.optim.Adam(model.parameters()))
    train = Samples.of(*data(8, outputs, samples, torch.float32))
    return flat, flat.train(train, train, keys_of(0, range(epochs)), Recipe(lr=lr))


@pytest.mark.parametrize("case", [(1, 40, 5e18), (3, 130, 3e18)])
def test_a_network_that_explodes_is_left_at_its_last_finite_epoch(case):
    flat, done = explode(*case, 60)
    assert 0 < done.epochs < 60
    assert done.step == -(-case[1] // 64) * done.epochs
    assert len(done.accuracy) == len(done.loss) == done.epochs
    assert np.isfinite(flat.state[0]).all()
    shorter, again = explode(*case, done.epochs)
    assert again.epochs == done.epochs
    assert np.stack(flat.state).tobytes() == np.stack(shorter.state).tobytes()


@pytest.mark.parametrize("where", ["parameter", "sample"])
def test_no_epoch_is_finished_with_a_nan(where):
    model = MLP([8, 4, 1])
    flat = Flat.of(model, torch.optim.Adam(model.parameters()))
    x, y = data(8, 1, 130, torch.float32)
    if where == "parameter":
        flat.state[0][0, -1] = np.nan
    else:
        x[129, 3] = np.inf
    before = np.stack(flat.state)
    samples = Samples.of(x, y)
    done = flat.train(samples, samples, keys_of(0, range(2)), Recipe())
    assert (done.epochs, done.step) == (0, 0)
    np.testing.assert_array_equal(np.stack(flat.state), before)


def stack(networks, sizes=(20, 6, 9, 3), seed=0):
    """Random networks with a different number of weights each."""
    rng = np.random.default_rng(seed)
    shapes = [(networks, o, i) for i, o in pairwise(sizes)]
    masks = [rng.random(shape) < rng.random((networks, 1, 1)) for shape in shapes]
    weights = [np.where(k, rng.normal(size=k.shape), 0).astype(np.float32) for k in masks]
    biases = [rng.normal(size=shape[:2]).astype(np.float32) for shape in shapes]
    return masks, weights, biases


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_packing_and_unpacking_give_the_networks_back(kind):
    masks, weights, biases = stack(50)
    wiring = Wiring.of([kind(mask) for mask in masks])
    theta = wiring.pack([kind(k) for k in weights], [kind(k) for k in biases])
    assert theta.dtype == np.float32
    back, back_biases = wiring.unpack(theta)
    for old, new in zip([*weights, *biases], [*back, *back_biases], strict=True):
        np.testing.assert_array_equal(old, new)
    counts = sum(mask.sum((1, 2)) for mask in masks)
    assert (wiring.ptr[:, -1] == counts).all()
    assert (np.diff(wiring.ptr) >= 0).all()


def test_weights_that_do_not_exist_are_not_packed():
    full = np.ones((1, 2, 3), np.float32)
    wiring = Wiring.of(
        [np.array([[[True, False, True], [False, False, True]]]), np.ones((1, 1, 2))]
    )
    theta = wiring.pack([full, full[:, :1, :2]], [None, None])
    assert theta.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert wiring.col.tolist() == [[0, 2, 2, 0, 1]]
    assert wiring.ptr.tolist() == [[0, 2, 3, 5]]


def train_stack(mapper, parts=12):
    masks, weights, biases = stack(12)
    wiring = Wiring.of(masks)
    theta = wiring.pack(weights, biases)
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    layers = mlp_layers(wiring.sizes)
    samples = Samples.of(*data(20, 3, 300, torch.float32))

    steps, hyper = np.zeros(12, np.int64), hyper_of([Recipe(lr=1e-2)] * 12)

    def train(rows):
        return train_networks(
            layers, wiring, (theta, m, v), steps, rows, np.arange(12), range(3),
            samples, samples, hyper, 64,
        )  # fmt: skip

    blocks = np.array_split(np.arange(12), parts)
    curves = [np.stack([done.accuracy, done.loss], 1) for done in mapper(train, blocks)]
    return theta, m, v, steps, np.concatenate(curves)


def test_networks_train_the_same_alone_again_and_in_threads():
    alone, again = train_stack(map), train_stack(map, parts=3)
    backwards = train_stack(lambda train, blocks: [train(rows) for rows in blocks[::-1]][::-1])
    with ThreadPoolExecutor(2) as pool:
        together = train_stack(pool.map)
    for one, *others in zip(alone, again, backwards, together, strict=True):
        assert all(one.tobytes() == other.tobytes() for other in others)


def test_samples_may_be_a_read_only_memory_map(tmp_path):
    x, y = data(8, 1, 100, torch.float32)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    states = []
    model = MLP([8, 4, 1])
    for given in (x, x.numpy(), mapped):
        flat = Flat.of(copy.deepcopy(model), torch.optim.Adam(model.parameters()))
        samples = Samples.of(given, y)
        flat.train(samples, samples, keys_of(0, range(2)), Recipe())
        states.append(np.stack(flat.state).tobytes())
    assert np.shares_memory(Samples.of(mapped, y).x, mapped)
    assert states[0] == states[1] == states[2]
