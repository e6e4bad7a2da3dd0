"""Packed models: what they compute, what they are made of, and how they behave."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import cases
from packed_models import DTYPES, KINDS, LAYOUTS, LINES, close, layers_of, same, wide_mlp
from place_models import EVERY
from torch import nn
from torch.nn import functional

from fissile import (
    MLP,
    FissileError,
    MaskedLinear,
    PartitionedLinear,
    dropconnect,
    expand,
    nonzeros,
    pack,
    to_dense,
    unpack,
)
from fissile.bank.stack import stacked_modules
from fissile.packed.bits import MANTISSA, Carrier, _planes, exists, low_bits, owner_bits
from fissile.packed.convert import inline_layers, stream_of
from fissile.packed.layers import Packed
from fissile.packed.sequence import PackedSequential

pytestmark = [pytest.mark.usefixtures("way"), pytest.mark.slow]  # together


# --- what they compute


def by_hand(layer, x):
    """One layer in float64, with the size of the terms to judge errors by."""
    weight = layer.dense_weight().double()
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.double()
    x = x.double()
    return x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs()


ACTIVATIONS = {
    "none": lambda y: y,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
}


@settings(max_examples=15, deadline=None)
@given(
    case=cases(dtype=torch.float32),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 2, 5, 17]),
)
def test_every_layer_agrees_with_float64(case, layout, dtype, rows):
    wide = expand(case.model, case.alpha, case.split, seed=case.seed).eval()
    packed = pack(wide, dtype=dtype, layout=layout)
    step = torch.finfo(dtype).eps
    for layer in layers_of(packed, Packed).values():
        x = torch.randn(rows, layer.inputs).to(dtype)
        wanted, size = by_hand(layer, x)
        for name, activation in ACTIVATIONS.items():
            found = layer.activated(x, name)
            assert found.dtype is dtype
            # Rounded once before an activation in plain PyTorch, and once after; none is steeper
            # than 1.2.
            most = 2.2 * (step + 1e-6) * size + 1e-6
            assert ((found.double() - activation(wanted)).abs() <= most).all()


@settings(max_examples=15, deadline=None)
@given(case=cases(dtype=torch.float32), layout=st.sampled_from(LAYOUTS))
def test_every_network_agrees_with_its_layers_written_out(case, layout):
    """In float32: how far a network of 16 bits is off depends on what cancels in it."""
    packed = pack(expand(case.model, case.alpha, case.split, seed=case.seed), layout=layout)
    inputs = next(iter(layers_of(case.model, nn.Linear).values())).in_features
    x, wide = torch.randn(5, inputs), unpack(packed).eval()
    with torch.no_grad():
        found, wanted = packed(x), to_dense(wide).double()(x.double())
        size = wanted.abs().max().clamp(min=1)
        assert ((found - wanted).abs() <= 1e-4 * size).all()
        assert ((found - wide(x)).abs() <= 1e-4 * size).all()


@EVERY
@LINES
@KINDS
def test_every_kind_of_place_agrees(sort, layout, dtype):
    torch.manual_seed(0)
    wide = expand(sort.make(inputs=16, neurons=8), 4).eval()
    packed = pack(wide, dtype=dtype, layout=layout)
    assert {type(m) for m in layers_of(packed).values()}.isdisjoint(map(type, wide.modules()))
    x = sort.inputs(16, dtype=dtype)
    with torch.no_grad():
        close(packed(x), unpack(packed)(x), dtype)
        close(packed(x), to_dense(unpack(packed))(x), dtype)
        close(packed(x), wide(x.float()), dtype)


def stolen_bits(packed):
    """How many of their lowest bits the weights of each layer give away at most."""
    layers = inline_layers(packed)
    carriers = [Carrier(m.weight[exists(m.weight)], m.owner_bits) for m in layers.values()]
    stolen, left = [c.owner_bits for c in carriers], len(stream_of(layers))
    for plane, k in _planes(carriers):
        if left > 0:
            stolen[k] = plane + 1
        left -= len(carriers[k].weight)
    return dict(zip(layers, stolen, strict=True))


@KINDS
@pytest.mark.parametrize("alpha", [2, 3, 4, 8, 16])
def test_inline_rounds_no_more_than_the_bits_it_takes(dtype, alpha):
    wide = wide_mlp((64, 16, 2), alpha)
    packed = pack(wide, dtype=dtype)
    stolen = stolen_bits(packed)
    for name, layer in layers_of(packed, Packed).items():
        before, after = (m.dense_weight().double() for m in (wide.get_submodule(name), layer))
        assert torch.equal(layer.pattern(), wide.get_submodule(name).pattern())
        large = before.abs() > 2.0**-10
        error = ((after - before) / before).abs()[large].max()
        assert error <= 2.0 ** (stolen[name] - MANTISSA[dtype])


@KINDS
def test_the_owner_is_in_the_weight_and_nowhere_else(dtype):
    torch.manual_seed(0)
    dense = MLP([64, 16, 2]).to(dtype)
    for alpha in (2, 3, 4, 5, 8, 16):
        wide = expand(dense, alpha)
        layer = pack(wide).layers[0]
        owner = wide.layers[0].owner
        there = owner >= 0
        assert there.sum() > alpha
        assert layer.weight.nbytes == dense.layers[0].weight.nbytes
        assert dict(layer.named_buffers()) == {}
        assert torch.equal(exists(layer.weight), there), "a removed weight is zero bits"
        assert (low_bits(layer.weight, owner_bits(alpha)) == owner)[there].all()
        assert torch.equal(layer.owner(), owner.int())
        if dtype is torch.float32:
            assert (layer.weight - wide.layers[0].weight)[there].abs().max() > 0, "it is rounded"


@KINDS
@pytest.mark.parametrize("alpha", [2, 3, 8, 16, 32])
def test_planes_leave_the_weights_untouched(dtype, alpha, way):
    wide = wide_mlp((64, 16, 2), alpha, layer_norm=True, activation="gelu").to(dtype)
    assert wide.layers[0].nonzeros() > alpha
    packed = pack(wide, layout="plane")
    back = unpack(packed)
    assert same(back, wide)
    assert nonzeros(packed) == nonzeros(wide)
    x = torch.randn(6, 64).to(dtype)
    for name, layer in layers_of(packed, Packed).items():
        rows = torch.randn(6, layer.inputs).to(dtype)
        one, other = layer(rows), wide.get_submodule(name)(rows)
        assert torch.equal(one, other) if way == "plain" else True
        close(one, other, dtype)
    assert torch.equal(packed(x), wide(x)) if way == "plain" else True


def test_weights_that_are_zero_and_alive_stay_alive():
    for layout in LAYOUTS:
        wide = wide_mlp()
        for layer in layers_of(wide).values():
            layer.weight.data.zero_()
        packed = pack(wide, layout=layout)
        assert nonzeros(packed) == nonzeros(wide)
        for name, layer in layers_of(unpack(packed)).items():
            assert torch.equal(layer.pattern(), wide.get_submodule(name).pattern())


# --- what is refused


def with_value(model, name, value):
    model = copy.deepcopy(model)
    model.get_parameter(name).data.flatten()[0] = value
    owner = getattr(model.get_submodule(name.rpartition(".")[0]), "owner", None)
    if owner is not None and name.endswith("weight"):
        owner.flatten()[0] = 0
    return model


def hooked(model):
    model = copy.deepcopy(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    return model


REFUSED = {
    "dense": (lambda w: pack(MLP([8, 4, 2])), "no expanded layers to pack; call fissile.expand"),
    "twice": (lambda w: pack(pack(w)), "'layers.0': it is packed already; fissile.unpack"),
    "dropconnect": (lambda w: pack(dropconnect(MLP([8, 4, 2]), 2)), "'layers.0': DropConnect"),
    "stack": (lambda w: pack(stacked_modules([w, w])), "'layers.0': a stack .* one by one"),
    "hooks": (lambda w: pack(hooked(w)), "'layers.0' has hooks"),
    "meta": (lambda w: pack(copy.deepcopy(w).to("meta")), "'layers.0': its weights .* meta"),
    "float64": (lambda w: pack(copy.deepcopy(w).double()), "'layers.0': .*float64; use one"),
    "to float64": (lambda w: pack(w, dtype=torch.float64), "float64; use one"),
    "to bytes": (lambda w: pack(w, dtype=torch.int8), "int8; use one"),
    "layout": (lambda w: pack(w, layout="rows"), 'use "inline", "plane" or "2:4"'),
    "NaN": (lambda w: pack(with_value(w, "layers.0.weight", torch.nan)), "'layers.0': .* NaN"),
    "infinity": (lambda w: pack(with_value(w, "layers.2.weight", torch.inf)), "infinite"),
    "large": (
        lambda w: pack(with_value(w, "layers.0.weight", 1e6), dtype=torch.float16),
        "'layers.0': a weight is not finite in torch.float16; .* another dtype",
    ),
    "large bias": (
        lambda w: pack(with_value(w, "layers.0.bias", 1e6), dtype=torch.float16),
        "layers.0.bias is not finite in torch.float16; .* another dtype",
    ),
    "large alpha": (
        lambda w: pack(expand(MLP([32, 4, 2]), 17), dtype=torch.bfloat16),
        "'layers.0': alpha=17: owners take 5 bits .*bfloat16 has 4 .*use layout=\"plane\"",
    ),
    "unpacked": (unpack, "no packed layers"),
    "double": (lambda w: pack(w).double(), "float64; use one"),
    "cast": (
        lambda w: pack(expand(MLP([512, 4, 2]), 300)).half(),
        "owners take 9 bits .* unpack the model and pack it",
    ),
    "cast too large": (
        lambda w: pack(with_value(w, "layers.0.weight", 1e6)).half(),
        "not finite in torch.float16",
    ),
    "train": (lambda w: pack(w).train(), "fissile.unpack, train that, and pack it again"),
    "gradients of the input": (
        lambda w: pack(w)(torch.randn(2, 32, requires_grad=True)),
        r"no gradients: call it under torch.no_grad\(\), or fissile.unpack",
    ),
    "gradients of the weights": (
        lambda w: pack(w).requires_grad_(True)(torch.randn(2, 32)),
        r"no gradients: call it under torch.no_grad\(\), or fissile.unpack",
    ),
    "width": (lambda w: pack(w)(torch.randn(2, 5)), r"takes 32 inputs, the batch has \(2, 5\)"),
    "no width": (lambda w: pack(w)(torch.tensor(1.0)), r"takes 32 inputs, the batch has \(\)"),
    "dtype": (lambda w: pack(w)(torch.randn(2, 32).half()), "float16, .*float32; cast one"),
    "device": (lambda w: pack(w)(torch.randn(2, 32, device="meta")), "on meta, .* on cpu"),
    "moved": (lambda w: pack(w).to("meta")(torch.randn(2, 32)), "on cpu, .* on meta"),
    "half moved": (lambda w: half_moved(pack(w))(torch.randn(2, 32)), "on cpu, .* on meta"),
    "other widths": (lambda w: exchanged(pack(w))(torch.randn(2, 32)), "takes 12 inputs"),
}  # fmt: skip


def half_moved(packed):
    packed.layers[2].to("meta")
    return packed


def exchanged(packed):
    packed.layers[2] = pack(expand(MLP([6, 3, 5]), 4)).layers[2]
    return packed


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name):
    wide = wide_mlp()
    make, message = REFUSED[name]
    with pytest.raises(FissileError, match=message):
        make(wide)


@LINES
def test_the_given_model_is_never_changed(layout):
    wide = wide_mlp(layer_norm=True).train()
    wide.layers[0].weight.requires_grad_(False)
    wide.layers[0].note = "mine"
    before, marks = copy.deepcopy(wide), {n: {*vars(m)} for n, m in wide.named_modules()}
    packed = pack(wide, layout=layout)
    assert same(before, wide)
    assert {n: {*vars(m)} for n, m in wide.named_modules()} == marks
    assert all(m.training for m in wide.modules())
    assert [p.requires_grad for p in wide.parameters()][:2] == [False, True]
    inside = {p.data_ptr() for p in wide.parameters()}
    assert inside.isdisjoint(p.data_ptr() for p in packed.parameters())
    assert type(wide.layers) is nn.Sequential
    sealed = copy.deepcopy(packed)
    back = unpack(packed)
    assert same(sealed, packed)
    assert isinstance(packed.layers, PackedSequential)
    assert [p.requires_grad for p in back.parameters()][:2] == [False, True]
    assert back.layers[0].note == packed.layers[0].note == "mine"
    for name, layer in layers_of(back).items():
        assert {*vars(layer)} <= {*vars(wide.get_submodule(name)), "pair"}, "packing left a trace"
    assert type(back.layers) is nn.Sequential


def test_what_was_unpacked_trains_and_packs_again():
    back = unpack(pack(wide_mlp()))
    assert isinstance(back.layers[0], PartitionedLinear)
    assert isinstance(back.layers[2], MaskedLinear)
    adam = torch.optim.Adam(back.parameters(), 0.1)
    x = torch.randn(4, 32)
    before = back(x).detach()
    back.train()(x).square().mean().backward()
    adam.step()
    again = pack(back)
    assert nonzeros(again) == nonzeros(back)
    close(again(x), back(x), torch.float32)
    assert not torch.allclose(again(x), before)
