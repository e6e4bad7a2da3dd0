"""Packed models as modules: how they are called, copied, cast, compiled and refused."""

import copy
import io

import pytest
import torch
from packed_models import DTYPES, KINDS, LAYOUTS, LINES, TOLERANCE, close, layers_of, same, wide_mlp
from place_models import Deep
from torch import nn
from torch.nn import functional

import fissile
from fissile import (
    MLP,
    FissileError,
    PackedMaskedLinear,
    PackedPartitionedLinear,
    expand,
    nonzeros,
    pack,
    summary,
    to_dense,
    to_masked,
    unpack,
)
from fissile.layers import Partitioned
from fissile.packed.layers import Packed, PackedPartitioned
from fissile.packed.sequence import PackedSequential

pytestmark = pytest.mark.usefixtures("way")


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


@pytest.mark.slow
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
        assert isinstance(layer, PackedPartitioned) == hasattr(layer, "alpha")
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
