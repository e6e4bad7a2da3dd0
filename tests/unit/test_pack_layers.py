"""Packed models: what they compute, what they are made of, and how they behave."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import EVERY, Deep
from networks import cases
from torch import nn
from torch.nn import functional

import fissile
from fissile import (
    MLP,
    FissileError,
    MaskedLinear,
    PackedMaskedLinear,
    PackedPartitionedLinear,
    PartitionedLinear,
    dropconnect,
    expand,
    nonzeros,
    pack,
    summary,
    to_dense,
    to_masked,
    unpack,
)
from fissile.bank.stack import stacked_modules
from fissile.layers import Partitioned, SparseLayer
from fissile.packed import run
from fissile.packed.bits import MANTISSA, exists, low_bits, owner_bits
from fissile.packed.inline import inline_layers, stream_of
from fissile.packed.layers import Owned, Packed
from fissile.packed.sequence import PackedSequential
from fissile.packed.stream import Carrier, _planes

DTYPES = list(MANTISSA)
LAYOUTS = ["inline", "plane"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LINES = pytest.mark.parametrize("layout", LAYOUTS)
KINDS = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True, params=["plain", "kernels"])
def way(request, monkeypatch):
    """Every test runs in plain PyTorch, and in the kernels where there are some."""
    if request.param == "plain":
        monkeypatch.setattr(run, "_kernels", lambda kind: None)
    else:
        cpu = pytest.importorskip("fissile.packed.cpu", exc_type=ImportError)
        if not cpu.can_run():
            pytest.skip("the kernels do not run here")
    return request.param


def wide_mlp(sizes=(32, 8, 5), alpha=4, **how):
    torch.manual_seed(0)
    return expand(MLP(list(sizes), **how), alpha).eval()


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype is other[k].dtype for k in one
    )


def layers_of(model, kind=SparseLayer):
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def close(one, other, dtype):
    how = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(one.double(), other.double(), **how)


# --- what they compute


def by_hand(layer, x):
    """One layer in float64, with the size of the terms to judge errors by."""
    weight = layer.dense_weight().double()
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.double()
    x = x.double()
    return x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs()


@settings(max_examples=25, deadline=None)
@given(
    case=cases(dtype=torch.float32),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 2, 5, 17]),
)
def test_every_layer_agrees_with_float64(case, layout, dtype, rows):
    wide = expand(case.model, case.alpha, case.split, seed=case.seed).eval()
    packed = pack(wide, dtype=dtype, layout=layout)
    for layer in layers_of(packed, Packed).values():
        x = torch.randn(rows, layer.inputs).to(dtype)
        wanted, size = by_hand(layer, x)
        found = layer(x)
        assert found.dtype is dtype
        step = torch.finfo(dtype).eps
        assert ((found.double() - wanted).abs() <= (step + 1e-6) * size + 1e-7).all()
        for name, by_name in {"relu": functional.relu, "silu": functional.silu}.items():
            close(layer.activated(x, name), by_name(wanted), dtype)
        close(layer.activated(x, "gelu"), functional.gelu(wanted), dtype)
        close(layer.activated(x, "gelu_tanh"), functional.gelu(wanted, approximate="tanh"), dtype)
    x = torch.randn(rows, next(iter(layers_of(case.model, nn.Linear).values())).in_features)
    x = x.to(dtype)
    with torch.no_grad():
        close(packed(x), to_dense(unpack(packed))(x), dtype)
        close(packed(x), unpack(packed)(x), dtype)


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


# --- how they behave


@LINES
@KINDS
def test_state_comes_back_in_another_packed_model(layout, dtype):
    one = pack(wide_mlp(), dtype=dtype, layout=layout)
    torch.manual_seed(1)
    other = expand(MLP([32, 8, 5]), 4)
    other.layers[0].owner.copy_(wide_mlp().layers[0].owner)
    other.layers[2].mask.copy_(wide_mlp().layers[2].mask)
    two = pack(other, dtype=dtype, layout=layout)
    x = torch.randn(3, 32).to(dtype)
    assert not same(one, two)
    two.load_state_dict(one.state_dict())
    assert same(one, two)
    assert torch.equal(one(x), two(x))
    copied = copy.deepcopy(two)
    assert same(copied, two)
    assert torch.equal(copied(x), two(x))
    two.layers[0].weight.zero_()
    assert torch.equal(copied(x), one(x)), "a copy is one of its own"


@LINES
@pytest.mark.parametrize("start", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
def test_owners_survive_every_cast(layout, start, to):
    packed = pack(wide_mlp(alpha=3), dtype=start, layout=layout)
    owner, x = packed.layers[0].owner(), torch.randn(3, 32)
    before = packed(x.to(start))
    names = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
    for cast in (packed.to(to), getattr(copy.deepcopy(packed), names[to])()):
        assert {p.dtype for p in cast.parameters()} == {to}
        assert torch.equal(cast.layers[0].owner(), owner)
        assert all(layer.misfit() is None for layer in layers_of(cast, Packed).values())
        close(cast(x.to(to)), before, max((start, to), key=TOLERANCE.get))
    # A state of another dtype is cast as the layer would be, owners and all.
    other = pack(wide_mlp(alpha=3), dtype=start, layout=layout)
    other.load_state_dict(packed.state_dict())
    assert torch.equal(other.layers[0].owner(), owner)
    assert next(other.parameters()).dtype is start


def test_a_state_that_no_packing_makes_is_refused():
    packed = pack(wide_mlp(alpha=3), layout="plane")
    good = {key: tensor.clone() for key, tensor in packed.state_dict().items()}

    def bad(key, change):
        state = {k: t.clone() for k, t in good.items()}
        change(state[key])
        return state

    for state, message in (
        (bad("layers.0.planes", lambda t: t.fill_(255)), "owner"),
        (bad("layers.0.weight", lambda t: t.fill_(torch.nan)), "not finite"),
        (bad("layers.2.live", lambda t: t.fill_(0)), "live marks 0 groups"),
        (bad("layers.2.weight", lambda t: t.fill_(torch.inf)), "not finite"),
    ):
        with pytest.raises(RuntimeError, match=message):
            copy.deepcopy(packed).load_state_dict(state)
    for key, cast in (("layers.0.bias", torch.half), ("layers.2.live", torch.float32)):
        with pytest.raises(RuntimeError, match=r"the bias is not|live is not a bitmap"):
            copy.deepcopy(packed).load_state_dict(good | {key: good[key].to(cast)}, assign=True)


def test_on_the_meta_device():
    packed = pack(wide_mlp()).to("meta")
    assert packed(torch.zeros(3, 32, device="meta")).shape == (3, 5)
    assert "nonzeros=unknown" in repr(packed)
    filled = packed.to_empty(device="cpu")
    with pytest.raises(FissileError, match="float64"):
        packed.double()
    source = pack(wide_mlp())
    filled.load_state_dict(source.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(filled(x), source(x))
    assert torch.equal(filled.layers[2].start, source.layers[2].start), "a kernel reads them"


@LINES
def test_any_batch(layout):
    packed, x = pack(wide_mlp(), layout=layout), torch.randn(3, 4, 32)
    rows = torch.stack([packed(row) for row in x.view(-1, 32)]).view(3, 4, 5)
    torch.testing.assert_close(packed(x), rows)
    torch.testing.assert_close(packed(x.transpose(0, 1)), rows.transpose(0, 1))
    torch.testing.assert_close(packed(torch.randn(3, 64)[:, ::2].copy_(x[:, 0])), rows[:, 0])
    torch.testing.assert_close(packed(x[:1, :1].expand(2, 3, 32)), rows[:1, :1].expand(2, 3, 5))
    assert packed(x[0, 0]).shape == (5,)
    assert packed(x[:0]).shape == (0, 4, 5)
    assert packed(x[:0, 0]).dtype is torch.float32
    assert not packed(x).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(packed(x.clone().requires_grad_()), rows)
        torch.testing.assert_close(copy.deepcopy(packed).requires_grad_(True)(x), rows)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), rows)


def test_autocast_gives_what_a_plain_layer_gives():
    wide = wide_mlp()
    x = torch.randn(3, 32)
    for packed in (pack(wide), pack(wide, layout="plane"), pack(wide, dtype=torch.float16)):
        with torch.autocast("cpu", torch.bfloat16):
            assert packed(x).dtype is wide(x).dtype is torch.bfloat16
            close(packed(x), wide(x), torch.bfloat16)
            assert {m(x[:0]).dtype for m in (packed, packed.layers[0])} == {torch.bfloat16}
            with pytest.raises(FissileError, match="float64"):
                packed(x.double())
            packed_inside = pack(wide, dtype=torch.float16)
        assert same(packed_inside, pack(wide, dtype=torch.float16))
    filters = expand(nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert pack(filters)(torch.randn(1, 8, 5, 5)).dtype is torch.bfloat16


def test_a_compiler_sees_one_graph():
    for layout in LAYOUTS:
        torch.compiler.reset()
        packed = pack(wide_mlp(), layout=layout)
        compiled = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=True)
        for shape in ((3, 32), (7, 32), (2, 3, 32)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), packed(x))


class Count(nn.Identity):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def test_members_of_a_sequence_may_be_watched_and_replaced():
    wide = wide_mlp(dropout=0.5)
    packed, x, seen = pack(wide), torch.randn(3, 32), []
    assert type(packed.layers) is PackedSequential
    assert [*packed.layers] == [*packed.layers.children()]
    y = packed(x)
    hooks = [m.register_forward_hook(lambda m, *_: seen.append(type(m))) for m in packed.layers]
    torch.testing.assert_close(packed(x), y)
    assert seen == [PackedPartitionedLinear, nn.ReLU, nn.Dropout, PackedMaskedLinear]
    for hook in hooks:
        hook.remove()
    packed.layers[1] = nn.Tanh()
    close(packed(x), functional.linear(wide.layers[0](x).tanh(), wide.layers[3].dense_weight(),
                                       wide.layers[3].bias), torch.float32)  # fmt: skip
    packed.layers[1] = nn.ReLU()
    torch.testing.assert_close(packed(x), y)
    packed.layers.insert(1, Count())
    torch.testing.assert_close(packed(x), y)
    assert packed.layers[1].calls == 1
    inner = packed.layers[0].forward
    packed.layers[0].forward = lambda x: inner(x) * 0
    assert not torch.allclose(packed(x), y), "a forward of one's own is called"
    del packed.layers[0].forward
    packed.layers[3].train()  # dropout alone, to draw several answers
    torch.manual_seed(0)
    assert not torch.allclose(packed(x), packed(x))
    packed.layers[3].eval()
    torch.testing.assert_close(packed(x), y)


ACTIVATIONS = [
    nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.LeakyReLU(0.3), nn.Identity(),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_sequences_skip_nothing(activation):
    """Every order of layers and activations in a row, also those that no kernel fuses."""
    torch.manual_seed(0)
    first, second = pack(expand(MLP([8, 6, 12]), 2)).layers[::2]
    _, third = pack(to_masked(expand(MLP([8, 6, 8]), 2))).layers[::2]
    assert first.out_features == second.out_features == third.in_features
    tails = ([third], [third, first], [activation, third], [activation, activation])
    x = torch.randn(3, 8)
    for tail in tails:
        for between in ([], [activation], [activation, nn.ReLU()], [nn.Identity(), activation]):
            modules = [first, *between, second, *tail]
            if between and between[-1] is activation and type(activation) is nn.Identity:
                modules.append(nn.Dropout(0.5).eval())
            wanted = x
            for module in modules:
                wanted = module(wanted)
            torch.testing.assert_close(PackedSequential(*modules)(x), wanted)
    fused = PackedSequential(first, activation, second)
    torch.testing.assert_close(fused[:2](x), activation(first(x)))


def test_deep_models_with_everything():
    torch.manual_seed(0)
    deep = expand(Deep(), 2).eval()
    x = torch.randn(4, 6)
    close(pack(deep)(x), deep(x), torch.float32)
    wide = wide_mlp((16, 6, 16, 6, 3), 2, embedding=16, layer_norm=True, activation=nn.PReLU())
    x = torch.randn(4, 16)
    packed = pack(wide, dtype=torch.bfloat16)
    close(packed(x.bfloat16()), wide(x), torch.bfloat16)
    bare = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    wide, x = expand(bare, 2).eval(), torch.randn(3, 8)
    close(pack(wide)(x), wide(x), torch.float32)
    whole = expand(MLP([8, 4, 2]), 1).eval()
    for layout in LAYOUTS:
        close(pack(whole, layout=layout)(x), whole(x), torch.float32)


def test_counting_and_showing():
    for layout in LAYOUTS:
        wide = wide_mlp()
        packed = pack(wide, dtype=torch.float16, layout=layout)
        assert nonzeros(packed) == nonzeros(wide)
        out = io.StringIO()
        summary(packed, file=out)
        lines = out.getvalue().splitlines()
        assert lines[1].startswith("layers.0  packed partitioned  32 → 8×4 = 32")
        assert lines[2].startswith("layers.2  packed masked       32 → 5")
        shown = repr(packed.layers[0])
        assert shown.startswith("PackedPartitionedLinear(alpha=4, in_features=32, out_features=32")
        assert f"layout={layout}, dtype=float16" in shown
        assert f"nonzeros={wide.layers[0].nonzeros()}" in shown
    filters = expand(nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), 2)
    out = io.StringIO()
    summary(pack(filters), file=out)
    assert "packed partitioned  8 → 4×2 = 8, 3×3" in out.getvalue()
    assert "PackedPartitionedConv2d(alpha=2, 8, 8, kernel_size=(3, 3)" in repr(pack(filters))


def test_layers_are_the_kinds_they_were():
    for layer in layers_of(pack(wide_mlp())).values():
        assert isinstance(layer, Packed)
        assert not isinstance(layer, Partitioned)
        assert isinstance(layer, Owned) == hasattr(layer, "alpha")
        assert layer.training is False
        assert not any(p.requires_grad for p in layer.parameters())
    assert {"pack", "unpack"} <= {*fissile.__all__}


@pytest.mark.parametrize(
    "do", [to_dense, fissile.to_masked, fissile.discover, lambda m: expand(m, 2)]
)
def test_what_rewrites_a_model_asks_for_it_unpacked(do):
    packed = pack(expand(MLP([16, 4, 3]), 2))
    with pytest.raises(FissileError, match="unpack first"):
        do(packed)


def test_a_refused_state_changes_nothing():
    packed, other = pack(wide_mlp()), pack(wide_mlp(alpha=2))
    x = torch.randn(3, 32)
    wanted, state = packed(x), copy.deepcopy(packed.state_dict())
    torn = copy.deepcopy(state)
    torn["layers.2.live"] = ~torn["layers.2.live"]
    short = {k: v[:-4] if k == "layers.2.weight" else v for k, v in state.items()}
    for wrong in (other.state_dict(), torn, short):
        with pytest.raises(RuntimeError):
            packed.load_state_dict(wrong)
        second = packed.layers[2]
        assert second.misfit() is None
        assert all(torch.equal(second.state_dict()[k], state[f"layers.2.{k}"]) for k in ("live",))
        torch.testing.assert_close(packed(x)[:, 0], wanted[:, 0])


def test_a_dropout_of_ones_own_is_called():
    class Always(nn.Dropout):
        def forward(self, x):
            return functional.dropout(x, 0.9, True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), Always(), nn.Linear(8, 3))
    packed, x = pack(expand(model, 2)), torch.randn(1, 16)
    assert not torch.equal(packed(x), packed(x))


def test_a_refused_training_leaves_the_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    packed = pack(expand(model, 2))
    for one in (packed, copy.deepcopy(packed)):
        with pytest.raises(FissileError, match="does not train"):
            one.train()
        assert not any(module.training for module in one.modules())
        assert one.eval() is one
    assert unpack(packed).train().training


def test_hooks_on_all_modules_see_what_passes():
    packed, seen = pack(wide_mlp()), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module))
    )
    try:
        packed(torch.randn(2, 32))
    finally:
        handle.remove()
    assert PackedPartitionedLinear in seen
    assert nn.ReLU in seen


def test_two_of_four_is_for_gpus():
    torch.manual_seed(0)
    wide = expand(MLP([16, 4, 3]), 2, split="2:4")
    with pytest.raises(FissileError, match="for GPUs"):
        pack(wide, layout="2:4")
    with pytest.raises(FissileError, match="no layer has a 2:4 pattern"):
        pack(expand(MLP([15, 5, 3]), 3), layout="2:4")
    with pytest.raises(FissileError, match='"2:4"'):
        pack(wide, layout="4:2")
