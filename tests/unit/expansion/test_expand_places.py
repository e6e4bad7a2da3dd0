"""Every kind of place: the reference's weights, the exact budget, and nothing that revives."""

import copy

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from place_models import EVERY, SORTS, Filters, Plain, roughened, train, trained
from torch import nn

import fissile
from fissile import FissileError, Rewire, expand, nonzeros, to_dense, to_masked
from fissile._common.random import drawer, seeded
from fissile.expansion.pattern import Form, split_pair
from fissile.expansion.split import resolve_split
from fissile.layers import MaskedConv2d, MaskedLinear, PartitionedConv2d


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


@settings(max_examples=30, deadline=None)
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


def test_masked_second_layers_of_every_kind():
    kinds = {name: type(expand(s.make(), 2).get_submodule(s.second)) for name, s in SORTS.items()}
    assert kinds.pop("conv") is MaskedConv2d
    assert set(kinds.values()) == {MaskedLinear}
    assert to_dense(expand(SORTS["turned"].make(), 2)).one.nf == 12
