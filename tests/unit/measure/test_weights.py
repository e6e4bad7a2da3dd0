"""What measures take for weights: arrays, layers, models and places, as well as tensors."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fissile
from fissile import measure
from fissile._common.errors import FissileError
from fissile._common.random import drawer


class Parts(nn.Module):
    """A model with a gated place, a convolution and a layer that says nothing of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 3)
        self.filters, self.norm = nn.Conv2d(2, 4, 3), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def test_arrays_layers_and_models_measure_as_their_tensors_do():
    model, groups = fissile.MLP([12, 6, 2]).double(), torch.arange(12) // 4
    layer = model.layers[0]
    weight = layer.weight.detach()
    expected = measure.capacity(weight, groups)
    for given, ids in ((weight.numpy(), groups.numpy()), (layer, groups.tolist())):
        assert torch.equal(measure.capacity(given, ids), expected)
    assert torch.equal(measure.capacity(model, groups, place="layers.0"), expected)
    assert not measure.capacity(layer).requires_grad
    assert measure.capacity(layer.weight).requires_grad
    single = weight.float().numpy()
    assert measure.codes(single, np.full(6, -1.0), np.ones(6), groups).shape == (3, 6)
    assert measure.gram_clusters(layer, 3, drawer(torch.Generator())).shape == (12,)
    labels = np.array([0, 0, 1])
    assert float(measure.adjusted_rand(labels, labels)) == 1


def test_expanded_layers_measure_as_written_out():
    dense = fissile.MLP([12, 6, 2])
    [place] = fissile.discover(dense)
    for wide in (fissile.expand(dense, 2), fissile.dropconnect(dense, 2)):
        first = wide.layers[0]
        expected = measure.gram(first.dense_weight().detach())
        assert torch.equal(measure.gram(first), expected)
        assert torch.equal(measure.gram(wide, place=place), expected)


def test_gated_pairs_and_filters_have_rows_too():
    model = Parts()
    [place] = fissile.discover(model)
    both = torch.cat([model.gate.weight, model.up.weight]).detach()
    assert torch.equal(measure.gram(model, place=place), measure.gram(both))
    filters = model.filters.weight.detach().flatten(1)
    assert torch.equal(measure.cosine(model.filters), measure.cosine(filters))
    wide = fissile.expand(nn.Sequential(model.filters, nn.ReLU(), nn.Conv2d(4, 2, 3)), 2)
    assert measure.gram(wide[0]).shape == (18, 18)


@pytest.mark.parametrize(
    ("given", "place", "message"),
    [
        (torch.ones(3), None, r"torch\.float32 \[3\]; give .*\[neurons, inputs\]"),
        (np.eye(3, dtype=int), None, r"torch\.int64 \[3, 3\]"),
        ("weights", None, "cannot be <class 'str'>"),
        (torch.eye(3), "layers.0", "leave it out for bare weights"),
        (Parts(), None, "place=None is no layer with weights; there are 'gate', 'up', 'down', 'f"),
        (Parts(), "norm", "place='norm' is no layer with weights"),
        (nn.ReLU(), None, "there are none"),
    ],
)
def test_what_holds_no_weights_is_one_clear_error(given, place, message):
    with pytest.raises(FissileError, match=message):
        measure.capacity(given, place=place)


def test_help_shows_the_place():
    for name in ("capacity", "cosine", "collisions", "codes", "recovery", "gram_clusters"):
        assert "place" in inspect.signature(getattr(measure, name)).parameters
