"""The method itself: the budget exact, the children disjoint, the function the reference's."""

import copy

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from networks import cases
from torch import nn
from torch.nn.utils import prune

import fissile
from fissile import MLP, FissileError, Groups, Structured, expand, nonzeros, to_dense, to_masked
from fissile._common.random import drawer
from fissile.discovery import discover
from fissile.expansion import split
from fissile.expansion.expand import choose
from fissile.expansion.pattern import Pattern
from fissile.layers import MaskedLinear, PartitionedLinear


def expanded(case):
    """Expand a drawn case, or None where the strict budget truly leaves no weights."""
    try:
        return expand(case.model, case.alpha, case.split, seed=case.seed, budget=case.budget)
    except FissileError as error:
        if case.budget == "all" and "leaves no weights" in str(error):
            return None
        raise


def places_of(model):
    return choose(discover(model), None)


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def value_nonzeros(model):
    """Count by value, on the plain matrices, without any of the library's bookkeeping."""
    plain = to_dense(model)
    return sum(int((m.weight != 0).sum()) for m in plain.modules() if isinstance(m, nn.Linear))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_everything_an_expansion_promises(case):
    before = copy.deepcopy(case.model)
    wide = expanded(case)
    assert equal(before, case.model), "the given model was touched"
    if wide is None:
        return
    assert nonzeros(wide).under(case.budget) == nonzeros(case.model).under(case.budget)
    if case.budget == "weights":
        assert value_nonzeros(wide) == value_nonzeros(case.model)
    for place in places_of(case.model):
        first, second = wide.get_submodule(place.name), wide.get_submodule(place.second)
        mask = first.pattern().unflatten(0, (-1, case.alpha))  # (parents, alpha, inputs)
        assert second.weight.shape[1] == first.out_features
        if case.split.disjoint:
            assert isinstance(first, PartitionedLinear)
            assert mask.sum(1).max() <= 1, "children share an input"
            complete = mask.any(1) == (first.owner >= 0)
            assert complete.all(), "an input that was not pruned has no child"
        if isinstance(case.split, Structured):
            blocks = mask.unflatten(-1, (-1, case.split.m)).sum(-1)
            assert blocks.max() <= case.split.n
    again = expanded(case)
    assert equal(wide, again), "the same seed gave another model"


@settings(max_examples=40, deadline=None)
@given(cases())
def test_weights_are_the_references(case):
    wide = expanded(case)
    if wide is None or not case.split.disjoint:
        return
    dense, draw = case.model, drawer(torch.Generator().manual_seed(case.seed))
    for place in places_of(dense):
        first, second = dense.get_submodule(place.name), dense.get_submodule(place.second)
        owner = case.split.deal(first.weight.detach(), case.alpha, draw)
        w1, w2 = (m.weight.detach().double().numpy() for m in (first, second))
        bias = np.zeros(len(w1)) if first.bias is None else first.bias.detach().double().numpy()
        extra = 0
        if case.budget == "all":
            between = [dense.get_submodule(name) for name in place.between]
            per_neuron = sum(m.weight.numel() * 2 for m in between if isinstance(m, nn.LayerNorm))
            extra = (case.alpha - 1) * (per_neuron + (0 if first.bias is None else len(bias)))
        expected = reference.expand(w1, bias, w2, owner.tolist(), case.alpha, extra)
        new1, new2 = wide.get_submodule(place.name), wide.get_submodule(place.second)
        np.testing.assert_array_equal(new1.dense_weight().detach().double().numpy(), expected[0])
        np.testing.assert_array_equal(new2.dense_weight().detach().double().numpy(), expected[2])
        if new1.bias is not None:
            np.testing.assert_array_equal(new1.bias.detach().double().numpy(), expected[1])


@pytest.mark.parametrize("split", ["random", "gram", "2:4"])
def test_function_is_the_references(split):
    torch.manual_seed(0)
    dense = MLP([16, 8, 5]).double()
    wide = expand(dense, 2, split, seed=3)
    w1, b1, w2, b2 = (p.detach().numpy() for p in dense.parameters())
    owner = fissile.expansion.split.resolve_split(split).deal(
        torch.tensor(w1), 2, drawer(torch.Generator().manual_seed(3))
    )
    wide1, bias1, wide2 = reference.expand(w1, b1, w2, owner.tolist(), 2)
    x = np.random.default_rng(0).normal(size=(7, 16))
    expected = reference.forward(x, [(wide1, bias1), (wide2, b2)])
    np.testing.assert_allclose(wide(torch.tensor(x)).detach().numpy(), expected, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(cases(dtype=torch.float64))
def test_partitioned_masked_and_dense_are_one_function(case):
    wide = expanded(case)
    if wide is None:
        return
    wide.eval()
    inputs = next(m for m in case.model.modules() if isinstance(m, nn.Linear)).in_features
    x = torch.randn(5, inputs, dtype=torch.float64)
    assert torch.equal(wide(x), to_masked(wide)(x))
    torch.testing.assert_close(wide(x), to_dense(wide)(x))
    assert nonzeros(to_masked(wide)).counts == nonzeros(wide).counts


def test_alpha_one_is_the_same_network():
    dense = MLP([6, 4, 3])
    x = torch.randn(5, 6)
    assert torch.equal(expand(dense, 1)(x), dense(x))


def test_hidden_layers_one_three_five_widen_and_the_head_never():
    dense = MLP([8, 8, 8, 8, 8, 8, 5])
    wide = expand(dense, 2)
    kinds = [type(m).__name__ for m in wide.layers if hasattr(m, "in_features")]
    assert kinds == ["PartitionedLinear", "MaskedLinear"] * 3
    shapes = [(m.in_features, m.out_features) for m in wide.layers if hasattr(m, "in_features")]
    assert shapes == [(8, 16), (16, 8), (8, 16), (16, 8), (8, 16), (16, 5)]
    even = expand(MLP([8, 8, 8, 5]), 2)  # two hidden layers: the head stays dense
    assert type(even.layers[-1]) is nn.Linear


def test_a_shared_activation_is_every_time_one():
    shared = nn.ReLU()
    layers = [nn.Linear(8, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 8), shared]
    wide = expand(nn.Sequential(*layers, nn.Linear(8, 3)), 2)
    kinds = [type(m).__name__ for m in wide if not isinstance(m, nn.ReLU)]
    assert kinds == ["PartitionedLinear", "MaskedLinear"] * 2


def test_an_mlp_within_a_sequential():
    inner = MLP([6, 4, 1], embedding=5)
    dense = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), inner)
    wide = expand(dense, 2)
    assert wide(torch.randn(2, 8)).shape == (2, 1)
    assert isinstance(wide[2].embedding, MaskedLinear)
    assert nonzeros(wide).weights == nonzeros(dense).weights


def test_embedding_is_left_alone():
    dense = MLP([8, 4, 1], embedding=6)
    wide = expand(dense, 2)
    assert torch.equal(wide.embedding.weight, dense.embedding.weight)
    plain = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    assert type(expand(plain, 2)[0]) is nn.Linear, "a linear layer without activation is no hidden"


def test_norms_slopes_and_statistics_go_to_the_children():
    dense = nn.Sequential(
        nn.Linear(6, 3), nn.BatchNorm1d(3), nn.PReLU(3), nn.Dropout(0.1), nn.Linear(3, 2)
    )
    dense(torch.randn(32, 6))
    wide = expand(dense, 2)
    for key in ("weight", "bias", "running_mean", "running_var"):
        old, new = getattr(dense[1], key), getattr(wide[1], key)
        assert torch.equal(new, old.repeat_interleave(2))
    assert wide[2].weight.shape == (6,)
    assert wide(torch.randn(4, 6)).shape == (4, 2)


def test_nested_sequentials_and_modes_are_kept():
    inner = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    dense = nn.Sequential(nn.Flatten(), inner, nn.Linear(4, 3), nn.LogSoftmax(-1)).eval()
    dense[1][0].bias.requires_grad_(False)
    wide = expand(dense, 2)
    assert wide(torch.randn(2, 2, 4)).shape == (2, 3)
    assert not any(m.training for m in wide.modules())
    assert not wide[1][0].bias.requires_grad
    assert wide[1][0].weight.requires_grad


def test_overlapping_children_keep_their_degree_and_may_share():
    torch.manual_seed(0)
    dense = MLP([32, 8, 4])
    disjoint, overlapping = expand(dense, 4, "random"), expand(dense, 4, "overlapping")
    degree = disjoint.layers[0].pattern().sum(1)
    assert isinstance(overlapping.layers[0], MaskedLinear)
    assert torch.equal(overlapping.layers[0].pattern().sum(1), degree)
    assert torch.equal(overlapping.layers[2].mask, disjoint.layers[2].mask)
    shared = overlapping.layers[0].pattern().unflatten(0, (8, 4)).sum(1)
    assert shared.max() > 1


def test_one_split_per_widened_layer():
    dense = MLP([8, 6, 6, 6, 2])
    groups = Groups([0, 0, 1, 1, 2, 2, 3, 3])
    wide = expand(dense, 2, [groups, "random"])
    assert nonzeros(wide).weights == nonzeros(dense).weights
    with pytest.raises(FissileError, match="one split per widened layer"):
        expand(dense, 2, groups)
    with pytest.raises(FissileError, match="3 splits were given for 2 widened layers"):
        expand(dense, 2, ["random"] * 3)


def test_any_elementwise_activation_is_found_out_by_trying():
    class Squared(nn.Module):
        def forward(self, x):
            return x.relu().square()

    class Cumulative(nn.Module):
        def forward(self, x):
            return x.cumsum(-1)

    dense = MLP([6, 4, 2], activation=Squared())
    assert expand(dense, 2)(torch.randn(3, 6)).shape == (3, 2)
    for stranger in (Cumulative(), nn.Softmax(-1), nn.GLU()):
        with pytest.raises(FissileError, match="not an elementwise activation"):
            MLP([6, 4, 2], activation=stranger)


class Odd(MLP):
    def forward(self, x):
        return self.layers(x) + x.sum()


def test_code_around_the_layers_stays():
    dense, x = Odd([6, 4, 2]), torch.randn(3, 6)
    wide = expand(dense, 2)
    assert isinstance(wide.layers[0], PartitionedLinear)
    torch.testing.assert_close(wide(x), to_dense(wide).layers(x) + x.sum())


def pruned():
    model = MLP([6, 4, 2])
    prune.l1_unstructured(model.layers[0], "weight", 0.5)
    return model


def hooked():
    model = MLP([6, 4, 2])
    model.layers[2].register_forward_hook(lambda *_: None)
    return model


BAD = {
    "alpha zero": (lambda: expand(MLP([6, 4, 2]), 0), "alpha=0 is not a whole number"),
    "alpha negative": (lambda: expand(MLP([6, 4, 2]), -2), "alpha=-2 is not a whole number"),
    "alpha fractional": (lambda: expand(MLP([6, 4, 2]), 2.0), "alpha=2.0 is not a whole number"),
    "alpha a bool": (lambda: expand(MLP([6, 4, 2]), True), "alpha=True is not"),
    "alpha too large": (lambda: expand(MLP([6, 4, 2]), 7), "larger than the fan-in of 6"),
    "alpha too large deeper": (
        lambda: expand(MLP([9, 4, 4, 4, 2]), 5),
        r"layer 'layers.4'.*larger than the fan-in of 4",
    ),
    "groups too short": (lambda: expand(MLP([6, 4, 2]), 2, Groups([0, 1])), "has 2 entries"),
    "groups too few": (lambda: expand(MLP([6, 4, 2]), 3, Groups([0, 1] * 3)), "2 groups cannot"),
    "groups of floats": (lambda: Groups([0.5, 1.0]), "one list of integers"),
    "groups without groups": (lambda: expand(MLP([6, 4, 2]), 2, "groups"), "fissile.Groups"),
    "unknown split": (lambda: expand(MLP([6, 4, 2]), 2, "rnadom"), "unknown split 'rnadom'"),
    "no split": (lambda: expand(MLP([6, 4, 2]), 2, None), "a split is a name"),
    "N:M uneven": (lambda: Structured(3, 4), "needs N to divide M"),
    "N:M against alpha": (lambda: expand(MLP([8, 4, 2]), 4, "2:4"), "makes 2 children"),
    "N:M against inputs": (lambda: expand(MLP([6, 4, 2]), 2, "2:4"), "divisible by 4, not 6"),
    "groups of words": (lambda: Groups(["a", "b"]), "one list of integers"),
    "groups of groups": (lambda: Groups([[0], [1, 2]]), "one list of integers"),
    "no groups at all": (lambda: Groups(None), "one list of integers"),
    "half a cluster": (lambda: fissile.Gram(2.5), "clusters=2.5 is not a whole number"),
    "N a word": (lambda: Structured("2", 4), "n='2' is not a whole number"),
    "seed a word": (lambda: expand(MLP([6, 4, 2]), 2, seed="a"), "seed='a' is not"),
    "seed negative": (lambda: expand(MLP([6, 4, 2]), 2, seed=-1), "seed=-1 is not"),
    "seed huge": (lambda: expand(MLP([6, 4, 2]), 2, seed=2**70), "more than 63 bits"),
    "split instance": (lambda: fissile.register_split("x", fissile.Random()), "a class or a fun"),
    "split number": (lambda: fissile.register_split(3, fissile.Random), "by a name"),
    "pruned": (lambda: expand(pruned(), 2), "prune.remove"),
    "hooked": (lambda: expand(hooked(), 2), "has hooks"),
    "meta": (lambda: expand(MLP([6, 4, 2], device="meta"), 2), "no values"),
    "sizes a number": (lambda: MLP(5), "sizes must be a list"),
    "dropout a word": (lambda: MLP([6, 4, 2], dropout="a"), "dropout must be in"),
    "clusters": (lambda: expand(MLP([6, 4, 2]), 2, fissile.Gram(7)), "to 6 clusters, not 7"),
    "unknown budget": (lambda: expand(MLP([6, 4, 2]), 2, budget="some"), "unknown budget 'some'"),
    "nothing left": (
        lambda: expand(MLP([4, 4, 1], layer_norm=True), 4, budget="all"),
        "budget leaves no weights",
    ),
    "nothing to expand": (lambda: expand(nn.Sequential(nn.Linear(4, 2)), 2), "nothing to expand"),
    "not an MLP": (lambda: expand(nn.Conv2d(3, 3, 3), 2), "nothing to expand"),
    "expanded twice": (lambda: expand(expand(MLP([6, 4, 2]), 2), 2), "expanded already"),
    "no activation": (
        lambda: expand(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), 2),
        r"nothing to expand.*'0'.*'1' \(Softmax\)",
    ),
    "one size": (lambda: MLP([4, 2]), "at least one hidden width"),
    "odd size": (lambda: MLP([4, 0, 2]), "size=0 is not a whole number"),
    "odd dropout": (lambda: MLP([4, 2, 2], dropout=1.5), "dropout must be in"),
    "odd activation": (lambda: MLP([4, 2, 2], activation="rule"), "unknown activation 'rule'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    act, message = BAD[name]
    with pytest.raises(FissileError, match=message):
        act()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("parameter", ["layers.0.weight", "layers.2.weight", "layers.0.bias"])
def test_weights_that_cannot_be_ranked_are_refused(value, parameter):
    dense = MLP([6, 4, 2])
    dense.get_parameter(parameter).data.view(-1)[1] = value
    with pytest.raises(FissileError, match=rf"{parameter} .*holds NaN, infinite"):
        expand(dense, 2)


def test_a_layer_of_zeros_is_refused():
    dense = MLP([6, 4, 2])
    dense.layers[2].weight.data.zero_()
    with pytest.raises(FissileError, match=r"every weight of 'layers.2' is zero"):
        expand(dense, 2)


def test_tied_layers_are_refused():
    shared = nn.Linear(4, 4)
    with pytest.raises(FissileError, match="tied"):
        expand(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2)), 2)


def test_a_split_from_outside_the_package(monkeypatch):
    monkeypatch.setattr(split, "_SPLITS", dict(split._SPLITS))

    class Halves(fissile.Split):
        def deal(self, weight, alpha, draw):
            child = torch.arange(weight.shape[-1]) * alpha // weight.shape[-1]
            return child.expand(weight.shape)

    fissile.register_split("from-outside", Halves)
    wide = expand(MLP([6, 4, 2]), 2, "from-outside")
    owner = wide.layers[0].owner
    assert set(owner[:, :3].unique().tolist()) <= {0, -1}
    assert set(owner[:, 3:].unique().tolist()) <= {1, -1}
    with pytest.raises(FissileError, match="registered already"):
        fissile.register_split("random", Halves)


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (lambda w, a: torch.full(w.shape, a), "outside 0 .. 1"),
        (lambda w, a: torch.zeros(w.shape), "one integer owner per weight"),
        (lambda w, a: torch.zeros(3, dtype=torch.long), "one integer owner per weight"),
    ],
)
def test_a_wrong_split_from_outside_is_refused(owner, message):
    class Wrong(fissile.Split):
        def deal(self, weight, alpha, draw):
            return owner(weight, alpha)

    with pytest.raises(FissileError, match=message):
        expand(MLP([6, 4, 2]), 2, Wrong())


class AllToTheFirst(fissile.Split):
    def deal(self, weight, alpha, draw):
        return torch.zeros(weight.shape, dtype=torch.long)


def test_children_without_input_are_counted_in_a_warning():
    torch.manual_seed(0)
    deep = fissile.MLP([64, 6, 6, 6, 10])
    with pytest.warns(
        UserWarning, match=r"left for 18 of 24 children of 'layers\.0', 18 of 24"
    ) as w:
        fissile.expand(deep, 4, AllToTheFirst())
    assert len(w) == 1
    assert w[0].filename == __file__
    with pytest.warns(
        UserWarning, match="'layers.4': they are constant; use a smaller alpha, or a"
    ):
        fissile.expand(deep, 4, ["random", AllToTheFirst()])


def test_children_that_pruning_leaves_without_input_are_counted_too():
    wide = fissile.MLP([4, 3, 30])
    with pytest.warns(UserWarning, match="no input is left for") as caught:
        expanded = fissile.expand(wide, 4, "overlapping")
    idle = int((~expanded.layers[0].pattern().any(-1)).sum())
    assert f"for {idle} of 12 children of 'layers.0'" in str(caught[0].message)


def test_a_gated_neuron_with_either_input_is_not_idle():
    owner = torch.tensor([[0, 0], [1, -1], [1, 1], [-1, -1]])  # gates, then ups, of two parents
    pattern = Pattern(2, owner, torch.ones(1, 4, dtype=torch.bool))
    assert pattern.idle(2).tolist() == [False, False, True, False]
    assert pattern.idle().tolist() == [False, True, True, False, True, False, True, True]


@pytest.mark.filterwarnings("error")
def test_where_every_child_has_input_nothing_is_said():
    fissile.expand(fissile.MLP([64, 6, 10]), 4)
    stack = torch.tensor([0, 1])  # of single networks of a stack nothing is said either
    stacked = fissile.MLP([4, 3, 30])
    for parameter in stacked.parameters():
        parameter.data = parameter.data.expand(2, *parameter.shape).clone()
    fissile.expand(stacked, 4, seed=stack)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(8, 4), r"the whole model.*two layers, such as nn\.Sequential\(nn\.Linear"),
        (nn.ReLU(), "nothing to expand: the model has no linear layer and no convolution"),
    ],
)
def test_a_lone_layer_is_told_what_a_place_takes(model, message):
    with pytest.raises(fissile.FissileError, match=message):
        fissile.expand(model, 2)
