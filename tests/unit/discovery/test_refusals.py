"""What discover refuses, and that it says why."""

import pytest
import torch
from discovery_models import Net, Unreadable, filters, halved, pair, places, why
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from fissile import MLP, FissileError, expand, nonzeros
from fissile.discovery import discover


@torch.no_grad()
def frozen_call(layer, x):
    return layer(x)


def frozen(m, x):
    return m.fc2(frozen_call(m.fc1, x).relu())


def two_names():
    norm = nn.LayerNorm(6, elementwise_affine=False)
    return pair(lambda m, x: m.fc2(m.norm(m.fc1(x)).relu()), norm=norm, again=norm)


# Every reason to refuse: a model, the refused layer, a part of the reason.
REFUSED = {
    "returned": (MLP([4, 3, 2]), "layers.2", "what the model returns"),
    "returned beside": (pair(lambda m, x: ((h := m.fc1(x).relu()), m.fc2(h))), "fc1", "returns"),
    "two readers": (
        pair(lambda m, x: m.fc2(h := m.fc1(x).relu()) + m.fc3(h), fc3=nn.Linear(6, 3)),
        "fc1", "read more than once, by 'fc2' and 'fc3'",
    ),
    "added": (
        Net(lambda m, x: m.fc2(m.fc1(x).relu() + x), fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3)),
        "fc1", "added to something that does not widen",
    ),
    "multiplied": (
        pair(lambda m, x: m.fc2(m.fc1(x).relu() * m.scale), scale=nn.Parameter(torch.ones(6))),
        "fc1", "multiplied with something that does not widen",
    ),
    "neurons of two layers added": (
        pair(lambda m, x: m.fc2((m.fc1(x) + m.fc3(x)).relu()), fc3=nn.Linear(4, 6)),
        "fc3", "combined with other neurons by add",
    ),
    "softmax": (pair(lambda m, x: m.fc2(m.fc1(x).softmax(-1))), "fc1", ".softmax(), which may mix"),
    "mean": (
        pair(lambda m, x: m.fc2((h := m.fc1(x).relu()) - h.mean(-1, keepdim=True))),
        "fc1", ".mean(), which may mix",
    ),
    "layer_norm": (
        pair(lambda m, x: m.fc2(functional.layer_norm(m.fc1(x), (6,)).relu())),
        "fc1", "layer_norm",
    ),
    "transposed": (pair(lambda m, x: m.fc2(m.fc1(x).relu().mT.mT)), "fc1", ".mT"),
    "concatenated": (
        Net(
            lambda m, x: m.fc2(torch.cat([m.fc1(x).relu(), x], -1)),
            fc1=nn.Linear(4, 6), fc2=nn.Linear(10, 3),
        ),
        "fc1", "goes through cat",
    ),
    "matmul": (pair(lambda m, x: m.fc2(m.fc1(x).relu() @ torch.eye(6))), "fc1", "matmul"),
    "detached": (pair(lambda m, x: m.fc2(m.fc1(x).relu().detach())), "fc1", "detached"),
    "indexed": (pair(lambda m, x: m.fc2(m.fc1(x)[:, [5, 4, 3, 2, 1, 0]])), "fc1", "indexing"),
    "width read": (
        pair(lambda m, x: m.fc2((h := m.fc1(x).relu()) / h.shape[-1])),
        "fc1", "combined with something that does not widen",
    ),
    "half unread": (
        Net(
            lambda m, x: m.fc2(m.fc1(x).relu().chunk(2, -1)[0]),
            fc1=nn.Linear(4, 12), fc2=nn.Linear(6, 3),
        ),
        "fc1", "only a part",
    ),
    "interleaved": (halved(lambda h: (h[..., ::2], h[..., 1::2])), "fc1", "goes through indexing"),
    "gate elsewhere": (
        Net(
            lambda m, x: m.d(m.a(x + 1).relu() * m.b(x)),
            a=nn.Linear(4, 6), b=nn.Linear(4, 6), d=nn.Linear(6, 3),
        ),
        "a", "reads a different input",
    ),
    "gate of two uses": (
        Net(
            lambda m, x: m.d((g := m.a(x).relu()) * m.b(x)) + m.e(g),
            a=nn.Linear(4, 6), b=nn.Linear(4, 6), d=nn.Linear(6, 3), e=nn.Linear(6, 3),
        ),
        "b", "'a', its partner, is used elsewhere",
    ),
    "kept": (
        pair(lambda m, x: (h := m.fc1(x).relu(), setattr(m, "last", h), m.fc2(h))[2]),
        "fc1", "kept in an attribute",
    ),
    "kept in a dictionary": (
        pair(lambda m, x: (h := m.fc1(x).relu(), setattr(m, "last", {"a": [h]}), m.fc2(h))[2]),
        "fc1", "kept in an attribute",
    ),
    "without gradients": (pair(frozen), "fc1", "under torch.no_grad()"),
    "read without gradients": (
        pair(lambda m, x: frozen_call(m.fc2, m.fc1(x).relu())), "fc1", "under torch.no_grad()",
    ),
    "no activation": (
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(), nn.Linear(6, 3)),
        "0", "nothing but linear layers",
    ),
    "identity is no activation": (
        nn.Sequential(nn.Linear(4, 6), nn.Sequential(), nn.Linear(6, 3)), "0", "nothing but linear",
    ),
    "scaling is no activation": (pair(lambda m, x: m.fc2(m.fc1(x) * 2)), "fc1", "nothing but"),
    "called twice": (
        Net(
            lambda m, x: m.fc2(m.fc1(m.fc1(x).relu()).relu()),
            fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3),
        ),
        "fc1", "it is called 2 times",
    ),
    "called twice, read twice": (
        pair(lambda m, x: m.fc2(m.fc1(x).relu()) + m.fc2(m.fc1(-x).relu())),
        "fc1", "it is called 2 times",
    ),
    "norm shared": (
        Net(
            lambda m, x: m.fc2(m.norm(m.fc1(m.norm(x))).relu()),
            fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3), norm=nn.LayerNorm(4),
        ),
        "fc1", "'norm' is called 2 times",
    ),
    "norm without parameters shared": (
        Net(
            lambda m, x: m.c2(m.norm(m.c1(m.norm(x))).relu()),
            c1=nn.Conv2d(8, 8, 1), c2=nn.Conv2d(8, 8, 1), norm=nn.BatchNorm2d(8, affine=False),
        ),
        "c1", "'norm' is called 2 times",
    ),
    "norm of two names": (two_names(), "fc1", "norm and again are one module"),
    "weight read": (
        pair(lambda m, x: m.fc2(m.fc1(x).relu()) + m.fc1.weight.norm()),
        "fc1", "fc1.weight is read directly",
    ),
    "softmax module": (
        nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 3)),
        "0", "'1' (Softmax), which is not elementwise",
    ),
    "flatten": (
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)),
        "0", "reshaped by '2' (Flatten)",
    ),
    "norm of something else": (
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm((5, 6)), nn.ReLU(), nn.Linear(6, 3)),
        "0", "'1' (LayerNorm) normalises something else",
    ),
    "slopes": (
        nn.Sequential(nn.Linear(4, 6), nn.PReLU(5), nn.Linear(6, 3)), "0", "slopes that fit no",
    ),
    "grouped": (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        "0", "grouped (groups=4)",
    ),
    "read by a depthwise one": (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)),
        "0", "'2' reads it and cannot widen",
    ),
    "one dimension": (
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)), "0", "only Conv2d",
    ),
    "up again": (
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        "0", "transposed convolution",
    ),
    "channels flattened": (
        filters(lambda m, x: m.fc(m.c1(x).relu().flatten(1)), fc=nn.Linear(8, 2)),
        "c1", ".flatten(), which may mix",
    ),
    "filters read by a linear layer": (
        filters(lambda m, x: m.fc(m.c1(x).relu()), fc=nn.Linear(8, 2)), "c1", "of another kind",
    ),
    "norm of images": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        "0", "normalises something else",
    ),
    "attention": (
        Net(
            lambda m, x: m.fc2(m.att(m.fc1(x), x, x)[0]),
            fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 4), att=nn.MultiheadAttention(4, 2),
        ),
        "fc1", "goes through 'att' (MultiheadAttention)",
    ),
    "inside attention": (
        Net(lambda m, x: m.att(x, x, x)[0], att=nn.MultiheadAttention(4, 2)),
        "att.out_proj", "inside attention",
    ),
    "unread": (pair(lambda m, x: (m.fc1(x), m.fc2(m.fc1.bias))[1]), "fc1", "nothing reads"),
    "uncalled": (pair(lambda m, x: m.fc2(x)), "fc1", "nothing that could be traced calls it"),
    "wired by mode": (
        pair(lambda m, x: m.fc2(m.fc1(x).relu() if m.training else m.fc1(x).softmax(-1))),
        "fc1", "wired differently in training and in evaluation",
    ),
    "untraceable": (
        pair(lambda m, x: m.fc2(m.fc1(x).relu()) if x.sum() > 0 else x),
        "fc1", "forward of Net could not be traced (symbolically traced variables",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_why(case):
    model, name, reason = REFUSED[case]
    found = discover(model)
    assert name not in [first for one in found for first in one.firsts]
    assert reason in why(model, name)


def expanded():
    return expand(MLP([8, 4, 2]), 2)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    return model


def pruned():
    model = MLP([4, 6, 3])
    prune.l1_unstructured(model.layers[0], "weight", 0.5)
    return model


def parametrised():
    model = MLP([4, 6, 3])
    parametrizations.weight_norm(model.layers[0])
    return model


def hooked(name):
    model = MLP([4, 6, 3])
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


def replaced():
    model = MLP([4, 6, 3])
    model.layers[0].forward = lambda x: x
    return model


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    pass


def sequence(first):
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, 3))


def whole_numbers():
    model = MLP([4, 6, 3])
    model.layers[0].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.int8), requires_grad=False)
    return model


def complex_numbers():
    model = MLP([4, 6, 3])
    model.layers[0].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.complex64))
    return model


def changed(change):
    model = MLP([4, 6, 3])
    change(model.layers[0])
    return model


def hook_weight(layer):
    layer.weight.register_hook(lambda grad: grad)


def hook_norm():
    model = MLP([4, 6, 3], layer_norm=True)
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


UNFIT = {
    "complex": (complex_numbers, "layers.0", "complex numbers"),
    "parameter besides": (
        lambda: changed(lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(1)))),
        "layers.0",
        "it has 'gain' besides weight and bias",
    ),
    "buffer besides": (
        lambda: changed(lambda m: m.register_buffer("seen", torch.ones(1))),
        "layers.0",
        "'seen'",
    ),
    "object besides": (
        lambda: changed(lambda m: setattr(m, "gain", [2.0])),
        "layers.0",
        "'gain' besides weight",
    ),
    "width besides": (
        lambda: changed(lambda m: setattr(m, "width", m.out_features)),
        "layers.0",
        "'width' besides weight",
    ),
    "weight hooked": (lambda: changed(hook_weight), "layers.0", "it has hooks"),
    "norm's weight hooked": (hook_norm, "layers.0", "'layers.1' (LayerNorm), which has hooks"),
    "expanded": (expanded, "layers.0", "expanded already"),
    "tied": (tied, "0", "0.weight and 3.weight are one tied parameter"),
    "pruned": (pruned, "layers.0", "computed, not a parameter"),
    "parametrised": (parametrised, "layers.0", "computed, not a parameter"),
    "first hooked": (lambda: hooked("layers.0"), "layers.0", "it has hooks"),
    "between hooked": (
        lambda: hooked("layers.1"),
        "layers.0",
        "'layers.1' (ReLU), which has hooks",
    ),
    "second hooked": (
        lambda: hooked("layers.2"),
        "layers.0",
        "'layers.2' reads it and cannot widen",
    ),
    "replaced": (replaced, "layers.0", "forward was replaced"),
    "subclass": (lambda: sequence(Doubling(4, 6)), "0", "Doubling has a forward of its own"),
    "lazy": (lambda: sequence(nn.LazyLinear(6)), "0", "lazy"),
    "meta": (lambda: MLP([4, 6, 3], device="meta"), "layers.0", "meta device"),
    "quantized": (whole_numbers, "layers.0", "quantized (torch.int8)"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_layers_that_cannot_take_part(case):
    make, name, reason = UNFIT[case]
    model = make()
    assert reason in why(model, name)
    assert not discover(model).places


def test_a_transformer_whose_dropout_is_something_else():
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    layer.dropout = nn.Softmax(-1)
    assert "'dropout' (Softmax), which is not elementwise" in why(layer, "linear1")
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    layer.linear2 = nn.Linear(11, 8)
    assert "reads it but has another number of inputs" in why(layer, "linear1")


def test_gradients_left_out_in_evaluation_do_no_harm():
    def run(m, x):
        with torch.set_grad_enabled(m.training):
            return m.fc2(m.fc1(x).relu())

    with torch.no_grad():
        assert places(pair(run)) == [("mlp", ("fc1",), "fc2")]


def test_a_norm_over_sequences_is_found_out_by_trying():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    assert len(places(model, torch.randn(5, 4))) == 1
    assert "changes what" in why(model, "0", torch.randn(5, 6, 4))


def test_a_subclass_that_changes_nothing_is_fine():
    assert places(sequence(Renamed(4, 6))) == [("mlp", ("0",), "2")]


def test_wrapped_models_come_too_late():
    model = nn.DataParallel(MLP([4, 6, 3]))
    assert not discover(model).places
    assert "wrapped in DataParallel; expand before wrapping" in why(model, "module.layers.0")


def test_compiled_models_come_too_late():
    class OptimizedModule(nn.Sequential):  # as torch.compile names its wrapper
        pass

    assert "wrapped in OptimizedModule" in why(OptimizedModule(MLP([4, 6, 3])), "0.layers.0")


def test_sharded_parameters_come_too_late():
    class DTensor(torch.Tensor):
        pass

    model = MLP([4, 6, 3])
    model.layers[0].weight = nn.Parameter(torch.ones(6, 4).as_subclass(DTensor))
    assert "DTensor); expand before wrapping" in why(model, "layers.2")


def test_a_foreign_norm_is_refused_by_name():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

    model = pair(lambda m, x: m.fc2(m.norm(m.fc1(x)).relu()), norm=Norm())
    assert "in 'norm' (Norm)" in why(model, "fc1")


def test_modules_under_two_names():
    class Odd(nn.Module):
        def __init__(self, *parts):
            super().__init__()
            self.parts, self.again = nn.ModuleList(parts), nn.ModuleList(reversed(parts))

        def forward(self, x):
            if x.sum() > 0:
                return x
            for part in (*self.parts, *self.again):
                x = part(x)
            return x

    model = Odd(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Unreadable(), MLP([4, 6, 4]))
    for inputs in (None, torch.randn(3, 4)):
        found = discover(model, inputs)
        assert not found.places
        assert len(found.refusals) == 6
    assert "parts.4.layers.0.weight and again.0" in why(model, "parts.4.layers.0")


def test_floats_of_eight_bits_are_refused_and_counted():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).to(torch.float8_e4m3fn)
    with pytest.raises(FissileError, match=r"float8_e4m3fn.*before quantizing it"):
        expand(model, 2)
    counted = int(model[0].weight.float().count_nonzero() + model[2].weight.float().count_nonzero())
    assert nonzeros(model).weights == counted
