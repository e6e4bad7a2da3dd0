import pytest
import torch
from discovery_models import Net, filters, halved, pair, places, why
from torch import nn

import fissile
from fissile import MLP


def own_parameter():
    class Own(nn.Parameter):
        pass

    model = MLP([4, 6, 3])
    model.layers[0].weight = Own(torch.ones(6, 4))
    return model


def quantized():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.ones(6, 4, dtype=torch.int8)

        def forward(self, x):
            return x @ self.weight.T.float()

    Linear.__module__ = "torch.ao.nn.quantized.modules.linear"  # what torch's own ones are known by
    return nn.Sequential(Linear(), nn.ReLU(), nn.Linear(6, 3))


def hooked_transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    layer.dropout.register_forward_hook(lambda *_: None)
    return layer


CASES = {
    "parameter of another class": (own_parameter, "layers.0", "not plain ones but Own"),
    "quantized module": (quantized, "0", "it is quantized; expand"),
    "two streams into one module": (
        lambda: pair(
            lambda m, x: m.both(m.fc1(x).relu(), m.fc3(x)),
            fc3=nn.Linear(4, 6),
            both=nn.Bilinear(6, 6, 2),
        ),
        "fc1",
        "its output is used by 'both' (Bilinear)",
    ),
    "a reader of another width": (
        lambda: Net(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(4, 6), b=nn.Linear(5, 3)),
        "a",
        "'b' reads it but has another number of inputs",
    ),
    "filters that gate filters": (
        lambda: filters(lambda m, x: m.c2(m.c1(x).relu() * m.c3(x)), c3=nn.Conv2d(3, 8, 3)),
        "c1",
        "they are not gate and up",
    ),
    "half of one layer times another": (
        lambda: Net(
            lambda m, x: m.fc2(m.fc1(x).chunk(2, -1)[0].relu() * m.fc3(x)),
            fc1=nn.Linear(4, 12), fc3=nn.Linear(4, 6), fc2=nn.Linear(6, 3),
        ),
        "fc3",
        "they are not gate and up",
    ),
    "cut along another dimension": (lambda: halved(lambda h: h.chunk(2, 1)), "fc1", "chunk"),
    "sliced along another dimension, too": (
        lambda: halved(lambda h: (h[0:1, :6], h[0:1, 6:])), "fc1", "indexing",
    ),
    "a third of it": (lambda: halved(lambda h: (h[..., :4], h[..., 4:8])), "fc1", "indexing"),
    "dropout of a transformer hooked": (hooked_transformer, "linear1", "(Dropout), which has hook"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_misfits_are_refused(case):
    make, name, reason = CASES[case]
    model = make()
    assert reason in why(model, name)
    assert all(name not in firsts for _, firsts, _ in places(model))


def test_a_gated_unit_as_a_module():
    model = nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 3))
    assert places(model) == [("fused", ("0",), "2")]
    assert fissile.expand(model, 2)(torch.randn(5, 4)).shape == (5, 3)


def test_a_transformer_with_a_module_for_its_activation():
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=nn.GELU())
    assert places(layer) == [("mlp", ("linear1",), "linear2")]
