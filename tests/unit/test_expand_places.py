"""Every kind of place: the reference's weights, the exact budget, and nothing that revives."""

import copy
import io
from dataclasses import dataclass

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import SORTS, Deep, Filters, Plain, roughened
from torch import nn

import fissile
from fissile import MLP, FissileError, Rewire, expand, nonzeros, summary, to_dense, to_masked
from fissile.assemble import Replacement, assemble
from fissile.draw import drawer, seeded
from fissile.layers import MaskedConv2d, MaskedLinear, PartitionedConv2d, PartitionedLinear
from fissile.pattern import Form, split_pair
from fissile.split import resolve_split

EVERY = pytest.mark.parametrize("sort", SORTS.values(), ids=SORTS)


def trained(sort, steps=2, **sizes):
    """A model and an AdamW that have seen a few steps."""
    torch.manual_seed(0)
    model = sort.make(**sizes)
    adam = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.3)
    train(model, adam, sort, steps)
    return model, adam


def train(model, optimizer, sort, steps=2):
    for _ in range(steps):
        (model(sort.inputs()) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def blocks(layer):
    """A dense layer's weight as numbers (neurons, inputs, positions of the kernel)."""
    weight = layer.weight.detach().double()
    weight = weight.T if type(layer).__name__ == "Conv1D" else weight
    return weight.flatten(2).numpy() if weight.ndim == 4 else weight.unsqueeze(-1).numpy()


def expected(model, sort, alpha, split, seed, extra=0):
    """The slow reference's weights, with owners dealt as the documentation says."""
    firsts = [blocks(model.get_submodule(name)) for name in sort.firsts]
    if sort.kind == "fused":
        firsts = np.split(firsts[0], 2)
    parents = len(firsts[0])
    rows = [torch.tensor(f[:, :, p]) for f in firsts for p in range(f.shape[2])]
    draw = drawer(torch.Generator().manual_seed(seed))
    owner = resolve_split(split).deal(torch.cat(rows), alpha, draw)[:parents]
    second = blocks(model.get_submodule(sort.second))
    wides, wide2 = reference.expand_many(firsts, second, owner.tolist(), alpha, extra)
    return ([np.concatenate(wides)] if sort.kind == "fused" else wides), wide2


def existing(wide, sort):
    """Which weights of the place's layers have a value, by name."""
    plain = to_dense(wide)
    return {n: plain.get_submodule(n).weight != 0 for n in (*sort.firsts, sort.second)}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SORTS)),
    alpha=st.integers(1, 4),
    inputs=st.integers(4, 9),
    neurons=st.integers(1, 5),
    outputs=st.integers(1, 4),
    kernels=st.sampled_from([(1, 1), (3, 1), (2, 3), ((1, 3), 2)]),
    split=st.sampled_from(["random", "gram"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    decimals=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 99),
)
def test_weights_are_the_references(
    name, alpha, inputs, neurons, outputs, kernels, split, dtype, decimals, seed
):
    sort = SORTS[name]
    torch.manual_seed(seed)
    dense = sort.make(inputs, neurons, outputs, kernels=kernels)
    dense = roughened(dense, decimals).to(dtype)
    wide = expand(dense, alpha, split, seed=seed)
    firsts, second = expected(dense, sort, alpha, split, seed)
    plain = to_dense(wide)
    for first, weight in zip(sort.firsts, firsts, strict=True):
        np.testing.assert_array_equal(blocks(plain.get_submodule(first)), weight)
        bias = dense.get_submodule(first).bias
        if bias is not None:
            assert torch.equal(wide.get_submodule(first).bias, bias.repeat_interleave(alpha))
    np.testing.assert_array_equal(blocks(plain.get_submodule(sort.second)), second)


@EVERY
@pytest.mark.parametrize("split", ["random", "gram", "overlapping", "2:4"])
@pytest.mark.parametrize("budget", ["weights", "all"])
def test_the_budget_is_exact(sort, split, budget):
    torch.manual_seed(0)
    dense = roughened(sort.make(neurons=10))
    if sort.kind == "conv" and split == "overlapping":
        with pytest.raises(FissileError, match="filters cannot"):
            expand(dense, 2, split)
        return
    wide = expand(dense, 2, split, budget=budget)
    assert nonzeros(wide).under(budget) == nonzeros(dense).under(budget)
    values = sum(int(mask.sum()) for mask in existing(wide, sort).values())
    assert values == nonzeros(wide).weights
    torch.testing.assert_close(wide(x := sort.inputs()), to_dense(wide)(x))
    torch.testing.assert_close(wide(x), to_masked(wide)(x))
    assert nonzeros(to_masked(wide)).counts == nonzeros(wide).counts


@EVERY
def test_children_are_disjoint_and_share_inputs_through_gate_and_up(sort):
    torch.manual_seed(0)
    wide = expand(sort.make(), 2)
    masks = [wide.get_submodule(name).pattern() for name in sort.firsts]
    if sort.kind == "fused":
        masks = list(masks[0].chunk(2))
    sees = torch.zeros(2, len(masks[0]) // 2, 8, dtype=torch.bool)  # (child, parent, input)
    for mask in masks:
        sees |= (
            mask.flatten(2).any(-1).unflatten(0, (-1, 2)).transpose(0, 1)
            if mask.ndim == 4
            else mask.unflatten(0, (-1, 2)).transpose(0, 1)
        )
    assert not (sees[0] & sees[1]).any()
    assert sees.any(0).sum() > 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EVERY
def test_a_gpu_makes_the_same_expansion(sort):
    dense, _ = trained(sort)
    here, there = expand(dense, 2, "gram"), expand(copy.deepcopy(dense).cuda(), 2, "gram")
    for one, other in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert torch.equal(one, other.cpu())
    x = sort.inputs()
    with torch.autocast("cuda", torch.bfloat16):
        there(x.cuda()).float().square().mean().backward()
    torch.testing.assert_close(here(x), there(x.cuda()).cpu(), rtol=1e-3, atol=1e-3)


@EVERY
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("convert", [lambda wide, _: wide, to_masked], ids=["as it is", "masked"])
def test_nothing_revives_and_the_optimizer_goes_on(sort, name, convert):
    dense, optimizer = trained(sort)
    if name == "sgd":
        optimizer = torch.optim.SGD(dense.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        train(dense, optimizer, sort)
    old = copy.deepcopy({k: optimizer.state[p] for k, p in dense.named_parameters()})
    wide = expand(dense, 2, optimizer=optimizer)
    if convert is to_masked:
        wide = to_masked(wide, optimizer=optimizer)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in wide.parameters()} == {id(p) for p in optimizer.state}
    key = "momentum_buffer" if name == "sgd" else "exp_avg"
    for layer, mask in existing(wide, sort).items():
        moments = old[f"{layer}.weight"][key]
        if type(dense.get_submodule(layer)).__name__ == "Conv1D":
            moments, mask = moments.T, mask.T
        wider = moments.repeat_interleave(2, 1 if layer == sort.second else 0)
        mine = copy.deepcopy(wide.get_submodule(layer))
        mine.weight.data = optimizer.state[wide.get_submodule(layer).weight][key]
        assert torch.equal(mine.dense_weight(), torch.where(mask, wider, 0))
    before, count = existing(wide, sort), nonzeros(wide)
    train(wide, optimizer, sort, 3)
    after = existing(wide, sort)
    assert nonzeros(wide) == count
    assert all(not (after[n] & ~before[n]).any() for n in before)


@pytest.mark.parametrize(
    "how",
    [
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": "same", "dilation": 2},
        {"padding": (2, 1), "stride": (2, 1), "bias": False},
        {"padding": "valid", "padding_mode": "replicate"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d,
        lambda c: nn.GroupNorm(3, c),
        lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
        nn.PReLU,
    ],
    ids=["batch", "group", "instance", "slopes"],
)
def test_filters_keep_their_geometry_and_norms_widen(how, norm):
    torch.manual_seed(0)
    dense = Filters(norm=norm, **how)
    dense(torch.randn(4, 8, 5, 5))
    wide, x = expand(dense, 2), torch.randn(2, 8, 5, 5)
    assert isinstance(wide.one, PartitionedConv2d)
    assert isinstance(wide.two, MaskedConv2d)
    for key, value in dense.norm.state_dict().items():
        if value.ndim:
            assert torch.equal(wide.norm.state_dict()[key], value.repeat_interleave(2))
    for mode in (True, False):
        plain = to_dense(wide.train(mode))
        assert type(plain.one) is nn.Conv2d
        torch.testing.assert_close(wide(x), plain(x))
        wide.load_state_dict(wide.state_dict())
    single = plain.one.weight.flatten(2).ne(0).any(-1).unflatten(0, (-1, 2))
    assert single.sum(1).max() == 1, "two children read one channel"


def test_a_filter_deals_whole_channels():
    owner = expand(Filters(), 2).one.owner.flatten(2)
    for channel in owner.flatten(0, 1):
        assert len(set(channel.tolist()) - {-1}) <= 1


GATES = [f"blocks.{i}.mlp.gate" for i in range(3)]
HEADS = ["head.layers.0", "head.layers.4"]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (None, GATES + HEADS),
        ("blocks.*", GATES),
        ("blocks.1", GATES[1:2]),
        ("*.mlp", GATES),
        ("blocks.2.mlp.up", GATES[2:]),
        (["head.layers.2", "blocks.[02]"], [GATES[0], GATES[2], "head.layers.2"]),
        (["head.layers.0", "head.layers.2"], HEADS[:1]),
        (lambda place: place.kind == "mlp", HEADS),
        (lambda place: place.outputs == 2, HEADS[1:]),
    ],
)
def test_where_says_which_places(where, names):
    torch.manual_seed(0)
    dense = Deep()
    wide = expand(dense, 2, where=where)
    first = [n for n, m in wide.named_modules() if isinstance(m, PartitionedLinear)]
    assert sorted(n for n in first if not n.endswith("up")) == sorted(names)
    assert nonzeros(wide).weights == nonzeros(dense).weights
    assert wide(torch.randn(3, 6)).shape == (3, 2)


def test_the_rule_is_every_other_layer_from_the_first_chosen():
    wide = expand(MLP([6, 5, 5, 5, 5, 2]), 2, where=["layers.2", "layers.4", "layers.6"])
    kinds = [type(m).__name__ for m in wide.layers if hasattr(m, "in_features")]
    assert kinds == ["Linear", "PartitionedLinear", "MaskedLinear", "PartitionedLinear",
                     "MaskedLinear"]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", r"'nowhere' matches no place.*'blocks.0.mlp.gate'"),
        ("head.layers.6", r"matches no place.*'head.layers.6': its output is what"),
        (["blocks.0", "block.1"], r"where='block.1' matches no"),
        (lambda place: False, "where chose none of"),
        ([], "neither a name"),
        ([3], "neither a name"),
        (3, "neither a name"),
    ],
)
def test_a_where_that_finds_nothing_is_refused(where, message):
    with pytest.raises(FissileError, match=message):
        expand(Deep(), 2, where=where)


@EVERY
def test_in_place_is_the_same_expansion(sort):
    dense, adam = trained(sort)
    twin, twin_adam = copy.deepcopy((dense, adam))
    untouched = dense.get_submodule(sort.second).bias
    wide = expand(dense, 2, optimizer=adam)
    again = expand(twin, 2, optimizer=twin_adam, inplace=True)
    assert again is twin
    assert dense.get_submodule(sort.second).bias is untouched
    for one, other in zip(wide.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(1)
    train(wide, adam, sort)
    torch.manual_seed(1)
    train(twin, twin_adam, sort)
    assert all(
        torch.equal(*both) for both in zip(wide.parameters(), twin.parameters(), strict=True)
    )


def test_in_place_changes_nothing_before_everything_is_checked():
    model = Deep()
    adam = torch.optim.Adam(model.parameters())
    before = copy.deepcopy(model.state_dict())
    held = list(adam.param_groups[0]["params"])
    with pytest.raises(FissileError, match=r"layer 'head.layers.0'.*fan-in of 6"):
        expand(model, 7, optimizer=adam, inplace=True, where="head")
    with pytest.raises(FissileError, match="unknown budget"):
        expand(model, 2, optimizer=adam, inplace=True, budget="none")
    model.head.layers[4].weight.data[0, 0] = torch.nan
    with pytest.raises(FissileError, match="holds NaN"):
        expand(model, 2, optimizer=adam, inplace=True)
    assert model.state_dict().keys() == before.keys()
    assert all(p is q for p, q in zip(adam.param_groups[0]["params"], held, strict=True))


@EVERY
def test_gradients_come_along_in_place(sort):
    dense, adam = trained(sort)
    dense(sort.inputs()).square().mean().backward()
    grads = {name: p.grad.clone() for name, p in dense.named_parameters()}
    twin = copy.deepcopy(dense)
    for name, parameter in twin.named_parameters():
        parameter.data.copy_(grads[name])
    wide = expand(dense, 2, optimizer=adam, inplace=True)
    # A gradient goes where a weight of the same place would: the owners are the dense model's.
    for name, parameter in wide.named_parameters():
        assert parameter.grad.shape == parameter.shape
        layer, _, key = name.rpartition(".")
        if key == "bias" or layer == "norm":
            copies = 1 if layer == sort.second else 2
            assert torch.equal(parameter.grad, grads[name].repeat_interleave(copies))
            continue
        old = twin.get_submodule(layer).weight
        old = old.T if type(twin.get_submodule(layer)).__name__ == "Conv1D" else old
        mine = copy.deepcopy(wide.get_submodule(layer))
        mine.weight.data = parameter.grad
        wider = old.repeat_interleave(2, 1 if layer == sort.second else 0)
        assert torch.equal(mine.dense_weight(), torch.where(mine.pattern(), wider, 0))
    assert all(p.grad is None for p in expand(sort.make(), 2).parameters())


@pytest.mark.parametrize("how", ["the layer", "the optimizer"])
def test_what_cannot_be_carried_leaves_everything_as_it_was(how):
    dense, adam = trained(SORTS["mlp"])
    held, state = list(adam.param_groups[0]["params"]), copy.deepcopy(adam.state_dict())

    def fail(tensor):
        raise FissileError("cannot be carried")

    new = nn.Linear(8, 12)
    if how == "the layer":
        dense.one.register_parameter("gain", nn.Parameter(torch.ones(6)))
    carry = {"weight": fail} if how == "the optimizer" else {}
    layer, before = dense.one, repr(dense)
    with pytest.raises(FissileError, match=r"'one.gain' has no place|cannot be carried"):
        assemble(dense, [Replacement("one", new, carry)], adam, inplace=True)
    assert repr(dense) == before
    assert dense.one is layer
    assert all(p is q for p, q in zip(adam.param_groups[0]["params"], held, strict=True))
    for key, moments in adam.state_dict()["state"].items():
        assert all(torch.equal(moments[k], v) for k, v in state["state"][key].items())


@pytest.mark.parametrize(
    "how", [{"padding": "same", "dilation": 2}, {"padding": (2, 1), "stride": (2, 1)}], ids=str
)
def test_filters_say_how_they_move(how):
    dense = Filters(**how)
    wide = expand(dense, 2)
    for key in ("stride", "padding", "dilation", "groups", "padding_mode", "kernel_size"):
        for old, new in zip((dense.one, dense.two), (wide.one, wide.two), strict=True):
            assert getattr(new, key) == getattr(old, key)


def test_turned_layers_say_their_sizes_as_before():
    wide = expand(SORTS["turned"].make(), 2)
    assert (wide.one.nx, wide.one.nf, wide.two.nx, wide.two.nf) == (8, 12, 12, 5)
    assert not hasattr(expand(Plain(), 2).one, "nf"), "a linear layer has no such name"


HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_hook",
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("convert", [to_dense, to_masked])
def test_hooks_are_not_lost_without_a_word(register, convert):
    wide = expand(Plain(), 2)
    part = wide.one.weight if register == "register_hook" else wide.one
    handle = getattr(part, register)(lambda *_: None)
    with pytest.raises(FissileError, match="'one' has hooks"):
        convert(wide)
    handle.remove()
    convert(wide)


def test_hooks_on_what_stays_stay():
    wide, calls = expand(Plain(), 2), []
    wide.two.register_forward_hook(lambda *_: calls.append("two"))
    to_masked(wide)(torch.randn(2, 8))
    assert calls == ["two"]


def test_wrapped_models_are_refused():
    compiled = torch.compile(MLP([6, 4, 2]), backend="eager")
    with pytest.raises(FissileError, match=r"wrapped in OptimizedModule.*expand before wrapping"):
        expand(compiled, 2)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(MLP([6, 4, 2]))
        with pytest.raises(FissileError, match="expand before wrapping"):
            expand(nn.Sequential(wrapped), 2)
        sharded = MLP([6, 4, 2])
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
        with pytest.raises(FissileError, match=r"FSDPModule.*expand before wrapping"):
            expand(sharded, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_model_is_refused():
    with pytest.raises(FissileError, match=r"an nn.Module, not a NoneType"):
        expand(None, 2)


def test_a_norm_that_serves_others_too_is_refused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Plain(6, 4, 6), Plain(6, 4, 6)
            self.one.norm = self.two.norm = nn.Identity()
            self.norm = nn.LayerNorm(4, elementwise_affine=False)

        def forward(self, x):
            for part in (self.one, self.two):
                x = part.two(self.norm(part.one(x)).relu())
            return x

    with pytest.raises(FissileError, match=r"'norm' is called 2 times"):
        expand(Shared(), 2)


FORMS = [Form(2), Form(1, 3, 2), Form(2, 3, 1)]
STACKS = [(form, split) for form in FORMS for split in ("random", "gram")]


@pytest.mark.parametrize(("form", "split"), [*STACKS, (Form(2), "overlapping")], ids=str)
def test_a_stack_of_pairs_is_each_alone(form, split):
    torch.manual_seed(0)
    first = torch.randn(3, form.parts * 4, 6 * form.first_kernel).round(decimals=1)
    second = torch.randn(3, 5, 4 * form.second_kernel).round(decimals=1)
    how = resolve_split(split)
    together = split_pair(first, second, 2, how, seeded(torch.arange(3)), form=form)
    for i in range(3):
        alone = split_pair(first[i], second[i], 2, how, seeded(i), form=form)
        assert torch.equal(together.first_mask()[i], alone.first_mask())
        assert torch.equal(together.second[i], alone.second)


def test_an_optimizer_within_another_object_is_found():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    dense = MLP([6, 4, 2])
    adam = torch.optim.Adam(dense.parameters())
    wide = expand(dense, 2, optimizer=Wrapper(adam))
    assert {id(p) for p in adam.param_groups[0]["params"]} == {id(p) for p in wide.parameters()}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_torchs_fused_inference_does_not_read_past_the_layers(masked, activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, activation=activation, batch_first=True)
    dense = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval()
    wide, x = expand(dense, 2).eval(), torch.randn(3, 5, 16)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [2]]) if masked else None
    with torch.no_grad():
        fast = wide[0](x, src_key_padding_mask=mask)
    expected = to_dense(wide)[0](x, src_key_padding_mask=mask)  # with gradients nothing is fused
    keep = slice(None) if mask is None else ~mask
    torch.testing.assert_close(fast[keep], expected[keep])
    assert dense[0].layers[0].activation_relu_or_gelu, "the given model was touched"


@pytest.mark.parametrize("name", [n for n in SORTS if n not in ("mlp", "turned")])
def test_dropconnect_is_for_plain_pairs(name):
    with pytest.raises(FissileError, match=f"is of the kind '{SORTS[name].kind}'"):
        fissile.dropconnect(SORTS[name].make(), 2)


def test_dropconnect_of_turned_layers():
    control = fissile.dropconnect(SORTS["turned"].make(), 2).eval()
    x = torch.randn(3, 8)
    torch.testing.assert_close(control(x), to_dense(control)(x))


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_filters_are_rewired_too(grow):
    sort = SORTS["conv"]
    dense, adam = trained(sort)
    wide = to_masked(expand(dense, 2, optimizer=adam), optimizer=adam)
    count, start = nonzeros(wide), wide.one.mask.clone()
    rewire = Rewire(wide, adam, every=2, fraction=0.2, grow=grow)
    for _ in range(4):
        (wide(sort.inputs()) - 1).square().mean().backward()
        adam.step()
        rewire.step()
        adam.zero_grad()
        assert nonzeros(wide) == count
    assert not torch.equal(start, wide.one.mask)


def test_summary_shows_before_and_after():
    torch.manual_seed(0)
    dense = MLP([32, 8, 1])
    out = io.StringIO()
    summary(dense, expand(dense, 2), file=out)
    table = [line.strip() for line in summary.__doc__.splitlines()]
    assert len(out.getvalue().splitlines()) == 4
    for line in out.getvalue().splitlines():
        assert line in table


def test_summary_of_a_large_model_shows_what_changed(capsys):
    dense = nn.Sequential(Plain(), *(nn.Linear(5, 5) for _ in range(40)))
    summary(dense, expand(dense, 2))
    out = capsys.readouterr().out
    assert "and 40 layers that are as they were" in out
    assert "0.norm" in out
    assert "\n7 " not in out
    filters = Filters()
    summary(filters, expand(filters, 2))
    out = capsys.readouterr().out
    assert "8 → 6, 3×3   8 → 6×2 = 12, 3×3" in out
    summary(expand(filters, 2))
    assert "partitioned  8 → 6×2 = 12, 3×3" in capsys.readouterr().out
    with pytest.raises(FissileError, match="other layers"):
        summary(filters, dense)


class Described(nn.Module):
    """A model made from a config, as transformers' are."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Plain(6, config.d_ff, 6) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Config:
    d_ff, hidden_dim = 5, 5


def test_the_config_learns_the_new_width_if_that_describes_the_model():
    dense = Described(Config())
    wide = expand(dense, 3)
    assert (wide.config.d_ff, dense.config.d_ff) == (15, 5)
    assert wide.config.hidden_dim == 5, "a width that describes something else was changed"
    rebuilt = Described(wide.config)
    rebuilt.load_state_dict(to_dense(wide).state_dict())
    assert expand(dense, 3, where="blocks.0").config.d_ff == 5, "half the blocks are narrow"
    expand(dense, 3, inplace=True)
    assert dense.config.d_ff == 15


def test_a_config_that_cannot_build_the_model_is_left_alone():
    class Stubborn(Described):
        def __init__(self, config):
            if config.d_ff != 5:
                raise RuntimeError("only five")
            super().__init__(config)

    assert expand(Stubborn(Config()), 2).config.d_ff == 5


def test_copies_of_the_config_in_parts_of_the_model_learn_the_width_too():
    class Outer(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.inner, self.dense = Described(copy.copy(config)), nn.Linear(6, 6)
            self.dense.config = copy.copy(config)

        def forward(self, x):
            return self.dense(self.inner(x))

    wide = expand(Outer(Config()), 3)
    assert (wide.config.d_ff, wide.inner.config.d_ff) == (15, 15)
    assert wide.dense.config.d_ff == 5, "nothing is expanded there"


def test_a_config_shared_with_the_model_around_changes_for_both():
    outer = nn.ModuleDict({"inner": Described(Config())})
    outer.config = outer["inner"].config
    expand(outer["inner"], 2, inplace=True)
    assert outer.config is outer["inner"].config
    assert outer.config.d_ff == 10


def test_a_config_that_will_not_change_stays():
    @dataclass(frozen=True)
    class Frozen:
        d_ff: int = 5

        def __deepcopy__(self, memo):
            return Config()

    dense = Described(Frozen())
    expand(dense, 2, inplace=True)
    assert (dense.config.d_ff, dense.blocks[0].one.out_features) == (5, 10)


def test_masked_second_layers_of_every_kind():
    kinds = {name: type(expand(s.make(), 2).get_submodule(s.second)) for name, s in SORTS.items()}
    assert kinds.pop("conv") is MaskedConv2d
    assert set(kinds.values()) == {MaskedLinear}
    assert to_dense(expand(SORTS["turned"].make(), 2)).one.nf == 12


def test_what_was_noted_on_a_layer_comes_along():
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
            self.up.gain, self.down.SCALE_INIT = 2.0, 1

        def forward(self, x):
            return self.down(torch.relu(self.up(x) * self.up.gain))

    model, x = Noted(), torch.randn(5, 6)
    wide = expand(model, 2)
    assert (wide.up.gain, wide.down.SCALE_INIT) == (2.0, 1)
    assert not hasattr(wide.down, "gain")
    plain = to_dense(to_masked(wide))
    assert plain.up.gain == 2.0
    assert not hasattr(plain.up, "alpha")
    torch.testing.assert_close(plain(x), wide(x))
