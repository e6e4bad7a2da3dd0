"""Diagnosing models: the measures themselves on the Boolean task, one clear error for bad input."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fissile
from fissile import measure


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp(*sizes, seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fissile.MLP(list(sizes), **options)


def labelled(samples=90, inputs=6, classes=3):
    y = torch.arange(samples) % classes
    return normal(samples, inputs) + normal(classes, inputs, seed=1)[y], y


# --- against the measures


@pytest.mark.parametrize("clauses", [2, 8, 16])
@pytest.mark.parametrize("jitter", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_boolean_task_gives_the_measures_themselves(clauses, jitter, dtype):
    task = fissile.data.Formula(clauses, 4)
    samples = fissile.data.dnf(clauses, 4, samples=700, others="arbitrary", jitter=jitter)
    model = mlp(task.literals, 8, 1).to(dtype)
    for one in (model, fissile.expand(model, 2, fissile.Blocks(4))):
        [row] = fissile.diagnose(one, samples, groups=task.groups)
        layer, x = one.layers[0], samples.x.to(dtype)
        weight = layer.weight if one is model else layer.dense_weight()
        satisfied = task.satisfied(samples.bits)
        assert row.capacity == tuple(measure.capacity(layer, task.groups).tolist())
        assert row.total == float(measure.total_capacity(layer, task.groups))
        assert row.cosine == float(measure.cosine(layer, absolute=True))
        assert row.collisions == float(
            measure.collisions(weight.detach(), layer.bias.detach(), x, samples.bits, satisfied)
        )
        assert math.isnan(row.total_error)
        assert row.collisions_error >= 0


def test_class_means_are_the_centred_means():
    x, y = labelled()
    model = mlp(6, 4, 3)
    [row] = fissile.diagnose(model, (x, y))
    means = torch.stack([x[y == k].mean(0) for k in range(3)])
    vectors = model.layers[0].weight.detach() @ (means - means.mean(0)).T
    torch.testing.assert_close(row.vectors, vectors)
    assert row.capacity == pytest.approx(measure.capacity(vectors).tolist(), abs=1e-5)
    assert (row.features, row.most, row.load) == (3, 2, 3 / 4)
    assert row.total <= row.most + 1e-5
    assert 0 < row.total_error < 0.5


def test_the_error_is_about_what_new_samples_would_change():
    model = mlp(6, 4, 5)
    totals, errors = [], []
    for seed in range(20):
        y = torch.arange(100) % 5
        x = normal(100, 6, seed=100 + seed) + normal(5, 6, seed=1)[y]
        [row] = fissile.diagnose(model, (x, y))
        totals.append(row.total)
        errors.append(row.total_error)
    assert np.std(totals) / 2 < np.mean(errors) < np.std(totals) * 2


def test_given_directions_need_no_labels_and_may_name_places():
    x, _ = labelled()
    model, directions = mlp(6, 4, 5, 3), normal(7, 6, seed=2)
    [row] = (found := fissile.diagnose(model, x, features=directions))
    vectors = model.layers[0].weight.detach() @ directions.T
    assert row.capacity == tuple(measure.capacity(vectors).tolist())
    assert found.left_out == ("layers.2",)
    assert "Not measured: layers.2" in str(found)
    second = normal(3, 4, seed=3).numpy()
    [row] = fissile.diagnose(model, x.numpy(), features={"layers.2": second})
    assert (row.place, row.features) == ("layers.2", 3)


def test_every_way_to_give_data_comes_to_the_same():
    x, y = labelled()
    model = mlp(6, 4, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    wanted = fissile.diagnose(model, (x, y))
    ways = [
        (x.numpy().astype(np.float64), y.tolist()),
        (x, y.double().unsqueeze(1)),
        TensorDataset(x, y),
        loader,
        list(loader),
    ]
    for data in ways:
        [row] = fissile.diagnose(model, data)
        assert row.capacity == pytest.approx(wanted[0].capacity, abs=1e-5)
        assert row.collisions == wanted[0].collisions


def test_of_many_samples_some_are_drawn_from_all_classes():
    y = torch.arange(3).repeat_interleave(200)
    x = normal(600, 6) + normal(3, 6, seed=1)[y]
    found = fissile.diagnose(mlp(6, 4, 3), (x, y), samples=50)
    assert found.samples == 50
    assert found[0].features == 3


# --- places of every kind


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)).mean(1))


@pytest.mark.parametrize("split", [False, True])
def test_gated_pairs_count_both_rows_and_average_positions(split):
    y = torch.arange(60) % 3
    x = normal(60, 4, 6) + normal(3, 1, 6, seed=1)[y]
    torch.manual_seed(0)
    model = Gated()
    model = fissile.expand(model, 2) if split else model
    [row] = fissile.diagnose(model, (x, y))
    assert (row.place, row.kind, row.neurons) == ("gate", "gated", 10 if split else 5)
    assert row.vectors.shape == (20 if split else 10, 3)


@pytest.mark.parametrize("split", [False, True])
def test_a_filter_sees_the_mean_of_its_positions(split):
    y = torch.arange(60) % 3
    x = normal(60, 2, 6, 6) + normal(3, 2, 1, 1, seed=1)[y]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    weight = model[0].weight.detach()
    model = fissile.expand(model, 2) if split else model
    weight = model[0].dense_weight().detach() if split else weight
    [row] = fissile.diagnose(model, (x, y))
    means = torch.stack([x[y == k].mean((0, 2, 3)) for k in range(3)])
    vectors = weight.sum((-2, -1)) @ (means - means.mean(0)).T
    torch.testing.assert_close(row.vectors, vectors)
    assert row.cosine == float(measure.cosine(model, absolute=True, place="0"))
    assert (row.duplicates, row.most) == ((), 2)


def test_the_model_and_random_numbers_stay_as_they_were():
    x, y = labelled()
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    before = torch.get_rng_state()
    fissile.diagnose(model, DataLoader(TensorDataset(x, y), 16, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert [one.training for one in model] == [True, True, False, True]
    assert not any(one._forward_pre_hooks for one in model)


def test_dead_and_duplicate_neurons_are_found():
    x, y = labelled()
    model = mlp(6, 5, 3)
    with torch.no_grad():
        model.layers[0].bias[1] = -1e3
        model.layers[0].weight[3] = 2 * model.layers[0].weight[0]
        model.layers[0].bias[3] = 2 * model.layers[0].bias[0]
    [row] = fissile.diagnose(model, (x, y))
    assert (row.dead, row.duplicates) == ((1,), (3,))
    assert "1 dead, 1 alike another" in row.sentence


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_where_nothing_varies_there_is_nothing_to_measure():
    x, y = labelled()
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    for given, data in ((None, (torch.ones_like(x), y)), (torch.zeros(4, 6), (x, y))):
        changed = copy.deepcopy(model)
        if given is not None:
            changed[0].weight.data = given
        sentence = fissile.diagnose(changed, data).rows[0].sentence
        assert (
            sentence == "Every neuron says the same for all samples: there is nothing to measure."
        )
    directions = fissile.diagnose(model, torch.ones_like(x), features=torch.eye(6)).rows[0]
    assert "6 features share 4 neurons" in directions.sentence  # which their weights tell alone
    empty = torch.nn.Sequential(torch.nn.Linear(6, 0), torch.nn.ReLU(), torch.nn.Linear(0, 3))
    with pytest.raises(fissile.FissileError, match="'0' has no neurons"):
        fissile.diagnose(empty, (x, y))


def test_effective_ranks_and_load():
    x, y = labelled(400, 8, 5)
    [narrow] = fissile.diagnose(mlp(8, 1, 5), (x, y))
    [wide] = fissile.diagnose(mlp(8, 200, 5), (x, y))
    assert narrow.rank == pytest.approx(1)
    assert narrow.total == pytest.approx(1, abs=1e-5)
    assert 1 < wide.rank <= wide.demand + 0.5 <= 4.5
    assert (narrow.load, wide.load) == (5, 5 / 200)


# --- what is shown


def test_what_is_shown(tmp_path):
    model, data = mlp(6, 4, 3), labelled()
    found = fissile.diagnose(model, data)
    text = str(found)
    assert text.splitlines()[1].split()[:3] == ["layers.0", "3", "4"]
    assert "3 features share 4 neurons" in text
    assert "means of 3 classes; 90 samples" in text
    assert repr(found) == "Diagnosis(places: 1, features: means of 3 classes)"
    assert "<td>layers.0</td>" in found._repr_html_()
    loaded = json.loads(json.dumps(found.to_dict()))
    assert loaded["rows"][0]["neurons"] == 4
    directions = fissile.diagnose(model, data[0], features=torch.eye(6))
    assert directions.to_dict()["rows"][0]["total_error"] is None
    figure = found.plot()
    assert len(figure.axes) == 3  # capacities, cosines and their colours
    figure.savefig(tmp_path / "found.png")


def test_two_classes_are_one_feature():
    [row] = fissile.diagnose(mlp(6, 4, 2), labelled(classes=2))
    assert (row.features, row.total) == (1, 1)
    assert "One feature cannot interfere" in row.sentence


# --- bad input


X, Y = labelled()
BAD = X.clone()
BAD[3, 1] = math.nan


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (X, {}, "data has no labels"),
        (TensorDataset(X), {}, "data has no labels"),
        ((X, torch.zeros(90).long()), {}, "all samples are of one class, 0"),
        ((X, Y[:-1]), {}, "one row for each sample"),
        ((X, Y + 0.5), {}, "labels are torch.float32"),
        ((X, normal(90, 3)), {}, r"labels are torch.float32 of shape \[90, 3\]"),
        ((X, ["cat", "dog", "fox"] * 30), {}, "data is not all numbers"),
        ((BAD, Y), {}, r"'layers.0' reads NaN or infinity in 1 of 90"),
        ([], {}, "data holds no samples"),
        ((normal(90, 5), Y), {}, r"the model cannot read a batch of shape \[90, 5\]: mat1 and"),
        ("samples", {}, "data cannot be str"),
        (X, {"features": torch.full((2, 6), math.nan)}, "features hold NaN"),
        (X, {"features": torch.zeros(2, 6)}, "a direction of zeros"),
        (X, {"features": torch.ones(2, 5)}, "features have 5 inputs, and 'layers.0' reads 6"),
        (X, {"features": torch.ones(6)}, "a row for each direction"),
        (X, {"features": torch.ones(2, 6).long()}, "features are torch.int64"),
        (X, {"features": {"layers.9": torch.ones(2, 6)}}, "features name 'layers.9'"),
        (X, {"features": {"layers.0": torch.ones(2, 5)}}, r"features\['layers.0'\] have 5"),
        (X, {"groups": torch.arange(5)}, "groups are of 5 inputs, and 'layers.0' reads 6"),
        (X, {"groups": torch.arange(6) * 2}, "must run from 0 without gaps"),
        (X, {"groups": torch.arange(6), "features": torch.eye(6)}, "give one of them"),
        ((X, Y), {"draws": 1}, "draws=1"),
        ((X, Y), {"samples": 0}, "samples=0"),
    ],
)
def test_bad_input_is_one_clear_error(data, options, message):
    model = mlp(6, 4, 3)
    with pytest.raises(fissile.FissileError, match=message):
        fissile.diagnose(model, data, **options)
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_a_model_without_places_is_refused_with_the_reason():
    with pytest.raises(fissile.FissileError, match="it is the whole model"):
        fissile.diagnose(nn.Linear(6, 3), (X, Y))
    with pytest.raises(fissile.FissileError, match="not a function"):
        fissile.diagnose(lambda x: x, (X, Y))


class Hidden(nn.Module):
    """A module that only data can see through."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x):
        if float(x.sum()) == 0.5:
            return x
        return self.second(self.act(self.first(x)))


def test_the_data_show_places_that_the_code_hides():
    assert not fissile.discover(Hidden())
    [row] = fissile.diagnose(Hidden(), (X, Y))
    assert row.place == "first"


def test_rows_that_are_no_samples_are_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.net(x.flatten(0, 1)).view(len(x), -1, 6).mean(1))

    with pytest.raises(fissile.FissileError, match="saw 120 rows of a batch with 60 labels"):
        fissile.diagnose(Flat(), (normal(60, 2, 6), torch.arange(60) % 3))


# --- language models


@pytest.fixture(scope="module")
def languages():
    pytest.importorskip("transformers")
    import language_models

    return language_models


@pytest.mark.parametrize("split", [False, True])
def test_a_language_model_with_padding(languages, split):
    bert = languages.seeded()
    bert = fissile.expand(bert, 2) if split else bert
    ids = torch.randint(1, languages.WORDS, (24, 7), generator=torch.Generator().manual_seed(1))
    data = {"input_ids": ids, "attention_mask": torch.ones(24, 7), "labels": ids[:, 0] % 3}
    found = fissile.diagnose(bert, data)
    assert found[0].place == "bert.encoder.layer.0.intermediate.dense"
    assert len(found) == 2
    pad = nn.functional.pad
    longer = {"input_ids": pad(ids, (0, 3)), "attention_mask": pad(torch.ones(24, 7), (0, 3))}
    for row, other in zip(found, fissile.diagnose(bert, data | longer), strict=True):
        assert row.capacity == pytest.approx(other.capacity, abs=1e-4)
    each = [{key: value[i] for key, value in data.items()} for i in range(24)]
    batches = fissile.diagnose(bert, DataLoader(each, 8))
    assert batches[0].total == pytest.approx(found[0].total, abs=1e-4)
    with pytest.raises(fissile.FissileError, match="for 24 samples; give each sample the number"):
        fissile.diagnose(bert, {**data, "labels": ids})


def test_transposed_layers_are_measured_as_they_compute(languages):
    gpt2 = languages.seeded(languages.gpt2)
    directions = normal(5, 16)
    [row, _] = fissile.diagnose(gpt2, {"input_ids": languages.ids()}, features=directions)
    weight = gpt2.transformer.h[0].mlp.c_fc.weight.detach().T
    torch.testing.assert_close(row.vectors, weight @ directions.T)


def test_features_that_fill_their_space_interfere_little_however_few_they_are():
    x, y = labelled_identity()
    (row,) = fissile.diagnose(identity_network(), (x, y)).rows
    assert row.total == pytest.approx(2, abs=1e-3)
    assert row.sentence.endswith("little interference.")


@pytest.mark.parametrize(
    ("why", "keep", "label"), [("holds no samples", 0, 0), ("-100, which PyTorch", 30, -100)]
)
def test_data_without_samples_and_labels_that_pytorch_ignores_are_refused(why, keep, label):
    x, y = labelled_identity()
    y = torch.where(torch.arange(30) == 4, label, y)
    with pytest.raises(fissile.FissileError, match=why):
        fissile.diagnose(identity_network(), (x[:keep], y[:keep]))


def labelled_identity():
    y = torch.arange(30) % 3
    return 5 * torch.eye(3)[y] + 0.01 * torch.arange(90).view(30, 3) % 0.07, y


def identity_network():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
    return model
