import copy

import pytest
import torch
from torch import nn

import fissile
from fissile.integrations.scheduled_expansion import ScheduledExpansion, describe
from fissile.layers import (
    MaskedConv2d,
    MaskedLinear,
    Pair,
    PartitionedConv2d,
    PartitionedLinear,
)


def partitioned(*rows):
    owner = torch.tensor(rows)
    return PartitionedLinear(torch.ones(owner.shape), owner, alpha=2)


def masked(*rows):
    mask = torch.tensor(rows).bool()
    return MaskedLinear(torch.ones(mask.shape), mask)


def paired(second, *firsts):
    second.pair = Pair(firsts[:-1], (), firsts[-1])
    return second


def test_describe_an_expanded_network():
    wide = fissile.expand(fissile.MLP([32, 8, 8, 8, 10]), 4)
    there = {i: wide.layers[i].dense_weight() != 0 for i in (0, 2, 4, 6)}
    alive = [there[0].any(1) & there[2].any(0), there[4].any(1) & there[6].any(0)]
    dead = 64 - sum(int(children.sum()) for children in alive)
    assert dead > 0
    assert describe(wide) == {
        "nonzeros": 32 * 8 + 8 * 8 + 8 * 8 + 8 * 10,
        "neurons": 64,
        "dead": dead / 64,
    } | {f"density/layers.{i}": int(rows.sum()) / rows.numel() for i, rows in there.items()}


def test_describe_a_dense_network():
    assert describe(fissile.MLP([32, 8, 1])) == {"nonzeros": 264}


def test_children_without_inputs_or_outputs_are_dead():
    # Children: 0 is whole, 1 has no output, 2 has neither, 3 has no input.
    first = partitioned([0, 1, 1], [-1, -1, -1])
    second = masked([1, 0, 0, 1], [1, 0, 0, 0])
    found = describe(nn.Sequential(first, nn.ReLU(), paired(second, "0", "2")))
    assert found["neurons"] == 4
    assert found["dead"] == 0.75
    assert found["density/0"] == 3 / 12
    assert found["density/2"] == 3 / 8


def test_a_gated_child_lives_through_gate_or_up():
    gate, up = partitioned([0, 0, -1]), partitioned([-1, 1, -1])
    down = paired(masked([1, 1]), "gate", "up", "down")
    model = nn.ModuleDict({"gate": gate, "up": up, "down": down})
    assert describe(model)["neurons"] == 2
    assert describe(model)["dead"] == 0
    model["up"] = partitioned([-1, -1, -1])
    assert describe(model)["dead"] == 0.5


def test_halves_of_one_layer_make_one_child():
    fused = partitioned([0, 0, 0], [0, 0, 1])  # gates of two children, then their ups
    model = nn.Sequential(fused, paired(masked([1, 1]), "0", "1"))
    assert describe(model)["neurons"] == 2
    assert describe(model)["dead"] == 0


def test_filters_are_children_too():
    owner = torch.zeros(1, 2, 3, 3, dtype=torch.int8)
    owner[0, 1] = 1
    mask = torch.zeros(3, 2, 3, 3, dtype=torch.bool)
    mask[2, 0, 1, 1] = True  # one weight of the whole kernel reads the first child
    first = PartitionedConv2d(torch.ones(1, 2, 3, 3), owner, 2)
    second = paired(MaskedConv2d(torch.ones(3, 2, 3, 3), mask), "0", "2")
    found = describe(nn.Sequential(first, nn.ReLU(), second))
    assert (found["neurons"], found["dead"]) == (2, 0.5)
    assert found["density/2"] == 1 / 54


class Crossed(nn.Module):
    """Two pairs of layers of equal widths, registered in an order that is not that of the data."""

    def __init__(self, *order):
        super().__init__()
        layers = {"a": (8, 6), "b": (6, 6), "c": (6, 6), "d": (6, 3)}
        for name in order:
            self.add_module(name, nn.Linear(*layers[name]))

    def forward(self, x):
        x = self.b(torch.relu(self.a(x)))
        return self.d(torch.relu(self.c(torch.tanh(x))))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.mark.parametrize("split", ["random", "overlapping"])
@pytest.mark.parametrize(
    "model", [Crossed("a", "c", "b", "d"), Crossed("d", "c", "b", "a"), Lists()]
)
def test_the_order_in_which_layers_are_registered_does_not_matter(model, split):
    wide = fissile.expand(model, 2, split)
    for one in (wide, fissile.to_masked(wide), copy.deepcopy(wide)):
        found = describe(one)
        assert found["neurons"] == 2 * 6 + 2 * 6
        assert 0 <= found["dead"] < 0.5


def test_layers_of_which_the_pairs_are_not_known_are_not_guessed_at():
    found = describe(nn.Sequential(partitioned([0, 1, 1]), masked([1, 1])))
    assert found == {"nonzeros": 5, "density/0": 0.5, "density/1": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either epoch= or step="),
        ({"epoch": 1, "step": 2}, "either epoch= or step="),
        ({"epoch": -1}, "epoch=-1"),
        ({"step": 1.5}, "step=1.5"),
        ({"alpha": 0, "step": 1}, "alpha=0"),
        ({"step": 1, "budget": "some"}, "unknown budget"),
        ({"step": 1, "split": "no such split"}, "no such split"),
    ],
)
def test_settings_that_cannot_be_meant(settings, message):
    with pytest.raises(fissile.FissileError, match=message):
        ScheduledExpansion(**{"alpha": 2} | settings)
