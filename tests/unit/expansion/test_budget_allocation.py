"""Sharing the budget: every rule exact to the weight, the paper's the default, each as stated."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import DTYPES, cases
from place_models import EVERY, SORTS, roughened, train, trained
from torch import nn

import fissile
from fissile import MLP, Allocation, FissileError, expand, nonzeros, to_dense
from fissile._common.random import drawer, seeded
from fissile.bank.stack import stacked_modules
from fissile.expansion.budget import register_allocation, resolve_allocation
from fissile.expansion.pattern import Form, split_pair
from fissile.expansion.split import Random

RULES = ["magnitude", "layer", "erdos-renyi", "saliency"]
MENDED = RULES[1:]


def test_the_rules_are_all_listed():
    with pytest.raises(FissileError, match=", ".join(sorted(RULES))):
        resolve_allocation("other")


def numbers(weight):
    return weight.double().numpy()


def wide_numbers(tensors, alpha):
    """Both layers as plain arrays in double, the second with its copies."""
    return numbers(tensors[0]), np.repeat(numbers(tensors[1]), alpha, axis=1)


def ranked(first, second, scores, count):
    """Keep the best scores: zero weights last, ties in order of storage, the first layer first."""
    weights = np.concatenate([first.ravel(), second.ravel()])
    scores = np.concatenate([score.ravel() for score in scores])
    order = sorted(range(len(weights)), key=lambda i: (weights[i] == 0, -scores[i], i))
    kept = np.zeros(len(weights), bool)
    kept[order[:count]] = True
    return kept[: first.size].reshape(first.shape), kept[first.size :].reshape(second.shape)


def shared(first, second, share, count):
    def largest(weight, some):
        kept = np.zeros(weight.size, bool)
        kept[np.argsort(-np.abs(weight).ravel(), kind="stable")[:some]] = True
        return kept.reshape(weight.shape)

    return largest(first, share), largest(second, count - share)


def single(score, dtype):
    """Round to what the scores of this dtype are held in, so that ties are the same."""
    return score if dtype == torch.float64 else score.astype(np.float32)


def expected(rule, tensors, squares, alpha, count):
    """What a rule keeps, in plain NumPy."""
    dtype = tensors[0].dtype
    first, second = wide_numbers(tensors, alpha)
    have = np.count_nonzero(first), np.count_nonzero(second)
    if rule == "magnitude":
        return ranked(first, second, [abs(first), abs(second)], count)
    if rule == "layer":
        before = have[0] + have[1] // alpha
        return shared(first, second, int(count * have[0] / before + 0.5), count)
    if rule == "erdos-renyi":
        sizes = len(first) * alpha + first.shape[1], sum(second.shape)
        share = min(int(count * sizes[0] / sum(sizes) + 0.5), have[0])
        return shared(first, second, count - min(count - share, have[1]), count)
    layers = zip((first, second), wide_numbers(squares, alpha), strict=True)
    roots = [single(abs(w), dtype) * np.sqrt(single(v, dtype)) for w, v in layers]
    return ranked(first, second, roots, count)


@st.composite
def pairs(draw, networks=None):
    """Two matrices with ties and zeros as often as not, gradients for them, alpha, and extra."""
    alpha = draw(st.integers(1, 5))
    parents, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    inputs = alpha + draw(st.integers(0, 6))
    batch = () if networks is None else (networks,)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    # Binary fractions: their squares add up exactly, in whatever order.
    dtype, grain = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 8, 2**20]))
    scales = draw(st.sampled_from([1.0, 0.3])), draw(st.sampled_from([1.0, 5.0]))
    tensors = []
    for shape, scale in zip(((parents, inputs), (outputs, parents)), scales, strict=True):
        weight = torch.randn(*batch, *shape, generator=generator)
        weight = weight.mul(scale * grain).round() / grain
        weight[..., 0, 0] = 1.0
        tensors.append(weight.to(dtype))
    squares = [
        (torch.randn(w.shape, generator=generator).mul(grain).round() / grain).square().to(dtype)
        for w in tensors
    ]
    squares[0][..., 0, 0] = 1.0
    least = min(
        int(torch.count_nonzero(a) + torch.count_nonzero(b))
        for a, b in zip(*(w.reshape(-1, *w.shape[-2:]) for w in tensors), strict=True)
    )
    return tensors, tuple(squares), alpha, draw(st.integers(0, least - 1))


def patterns(rule, case, seed=0, form=Form()):  # noqa: B008
    tensors, squares, alpha, extra = case
    how = resolve_allocation(rule)
    return split_pair(
        *tensors, alpha, Random(), seeded(seed), form=form, extra=extra, allocation=how,
        squares=squares,
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=50, deadline=None)
@given(case=pairs())
def test_a_rule_keeps_what_plain_numpy_keeps(rule, case):
    tensors, squares, alpha, extra = case
    count = sum(int(torch.count_nonzero(w)) for w in tensors) - extra
    made = patterns(rule, case)
    first, second = expected(rule, tensors, squares, alpha, count)
    np.testing.assert_array_equal(made.owner.numpy() >= 0, first)
    np.testing.assert_array_equal(made.second.numpy(), second)
    assert int((made.owner >= 0).sum() + made.second.sum()) == count
    assert not (made.second & (tensors[1].repeat_interleave(alpha, 1) == 0)).any()
    assert not ((made.owner >= 0) & (tensors[0] == 0)).any()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None)
@given(case=pairs(networks=3))
def test_a_stack_is_each_alone(rule, case):
    tensors, squares, alpha, extra = case
    together = patterns(rule, case, torch.arange(3))
    for i in range(3):
        one = [w[i] for w in tensors], tuple(v[i] for v in squares), alpha, extra
        alone = patterns(rule, one, i)
        assert torch.equal(together.owner[i], alone.owner)
        assert torch.equal(together.second[i], alone.second)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_default_is_the_papers_rule(case):
    wide = expand(case.model, case.alpha, case.split, seed=case.seed)
    named = expand(case.model, case.alpha, case.split, seed=case.seed, allocation="magnitude")
    for one, other in zip(wide.state_dict().values(), named.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_the_papers_rule_is_the_reference():
    torch.manual_seed(0)
    dense = roughened(MLP([12, 4, 9]))
    wide = expand(dense, 3, seed=5, allocation="magnitude")
    w1, b1, w2, _ = (p.detach().double().numpy() for p in dense.parameters())
    owner = Random().deal(torch.tensor(w1), 3, drawer(torch.Generator().manual_seed(5)))
    first, _, second = reference.expand(w1, b1, w2, owner.tolist(), 3)
    np.testing.assert_array_equal(wide.layers[0].dense_weight().detach().double(), first)
    np.testing.assert_array_equal(wide.layers[2].dense_weight().detach().double(), second)


def test_the_papers_rule_is_what_it_was():
    weight = torch.arange(1.0, 9).view(2, 4)
    pair = [weight, torch.tensor([[3.0, -5.0], [0.5, 7.0]])], None, 2, 0
    made = patterns("magnitude", pair)
    assert (made.owner >= 0).tolist() == [[False, False, True, True], [True] * 4]
    assert made.second.int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@EVERY
@pytest.mark.parametrize("rule", RULES)
def test_every_kind_of_place_keeps_its_budget(sort, rule):
    torch.manual_seed(0)
    dense = roughened(sort.make(neurons=10))
    dense(sort.inputs()).square().mean().backward()
    for budget in ("weights", "all"):
        wide = expand(dense, 2, budget=budget, allocation=rule)
        assert nonzeros(wide).under(budget) == nonzeros(dense).under(budget)
        plain = to_dense(wide)
        values = [plain.get_submodule(n).weight for n in (*sort.firsts, sort.second)]
        assert sum(int((w != 0).sum()) for w in values) == nonzeros(wide).weights
    if rule == "layer":
        wide = expand(dense, 2, allocation=rule)
        for name in sort.firsts:
            assert wide.get_submodule(name).nonzeros() == torch.count_nonzero(
                dense.get_submodule(name).weight
            )


def matrix(layer, tensor):
    tensor = tensor.detach()
    tensor = tensor.T if type(layer).__name__ == "Conv1D" else tensor
    return tensor.flatten(1)


@EVERY
@pytest.mark.parametrize("source", ["adam", "gradient", "sgd"])
def test_saliency_reads_the_gradients_of_every_place(sort, source):
    dense, optimizer = trained(sort, steps=3)
    if source != "adam":
        (dense(sort.inputs()) - 1).square().mean().backward()
    layers = [dense.get_submodule(name) for name in (*sort.firsts, sort.second)]
    squares = [
        optimizer.state[m.weight]["exp_avg_sq"] if source == "adam" else m.weight.grad.square()
        for m in layers
    ]
    squares = [matrix(m, square) for m, square in zip(layers, squares, strict=True)]
    weights = [matrix(m, m.weight) for m in layers]
    kernels = [m.weight[0, 0].numel() if sort.image else 1 for m in (layers[0], layers[-1])]
    form = Form(2 if sort.kind in ("gated", "fused") else 1, *kernels)
    pair = [torch.cat(weights[:-1]), weights[-1]], (torch.cat(squares[:-1]), squares[-1]), 2, 0
    wanted = patterns("saliency", pair, form=form)
    given = {"adam": optimizer, "gradient": None, "sgd": torch.optim.SGD(dense.parameters(), 0.1)}
    wide = expand(dense, 2, allocation="saliency", optimizer=given[source])
    firsts = [wide.get_submodule(name) for name in sort.firsts]
    owners = torch.cat([m.rows(m.owner) for m in firsts])
    assert torch.equal(owners.long(), wanted.owner)
    second = wide.get_submodule(sort.second)
    assert torch.equal(second.rows(second.pattern()), wanted.second)
    assert not torch.equal(wanted.owner, patterns("magnitude", pair, form=form).owner)


def test_adam_counts_before_the_last_gradient():
    dense, adam = trained(SORTS["mlp"])
    plain = expand(dense, 2, allocation="saliency", optimizer=copy_of(adam, dense))
    for parameter in dense.parameters():
        parameter.grad = torch.rand_like(parameter)
    again = expand(dense, 2, allocation="saliency", optimizer=copy_of(adam, dense))
    other = expand(dense, 2, allocation="saliency")
    assert torch.equal(plain.two.mask, again.two.mask)
    assert not torch.equal(plain.two.mask, other.two.mask)


def copy_of(adam, model):
    new = torch.optim.AdamW(model.parameters())
    new.load_state_dict(adam.state_dict())
    return new


def test_a_layer_without_moments_lets_the_gradients_speak_for_all():
    dense, adam = trained(SORTS["mlp"])
    del adam.state[dense.one.weight]
    with pytest.raises(FissileError, match="run backward"):
        expand(dense, 2, allocation="saliency", optimizer=adam)
    (dense(SORTS["mlp"].inputs()) - 1).square().mean().backward()
    mixed = expand(dense, 2, allocation="saliency", optimizer=copy_of(adam, dense))
    assert torch.equal(mixed.two.mask, expand(dense, 2, allocation="saliency").two.mask)


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_of_networks_is_each_alone_with_its_own_moments(rule):
    torch.manual_seed(0)
    nets = [MLP([6, 3, 4]) for _ in range(3)]
    adams = [torch.optim.Adam(net.parameters(), 0.1) for net in nets]
    for net, adam in zip(nets, adams, strict=True):
        net(torch.randn(8, 6)).square().mean().backward()
        adam.step()
    stack = stacked_modules(nets)
    one = torch.optim.Adam(stack.parameters())
    for new, *olds in zip(stack.parameters(), *(net.parameters() for net in nets), strict=True):
        states = [adam.state[old] for adam, old in zip(adams, olds, strict=True)]
        one.state[new] = {key: torch.stack([s[key] for s in states]) for key in states[0]}
    how = {"allocation": rule}
    together = expand(stack, 2, seed=torch.arange(3), optimizer=one, **how).state_dict()
    for i, (net, adam) in enumerate(zip(nets, adams, strict=True)):
        alone = expand(net, 2, seed=i, optimizer=adam, **how).state_dict()
        assert all(torch.equal(together[key][i], alone[key]) for key in alone)


@pytest.mark.parametrize("rule", RULES)
def test_in_place_and_trained_on_the_budget_stays(rule):
    sort = SORTS["gated"]
    dense, adam = trained(sort)
    before = nonzeros(dense).weights
    apart = expand(dense, 2, allocation=rule, optimizer=copy_of(adam, dense))
    wide = expand(dense, 2, allocation=rule, optimizer=adam, inplace=True)
    assert wide is dense
    assert torch.equal(wide.down.mask, apart.down.mask)
    assert torch.equal(wide.gate.owner, apart.gate.owner)
    train(wide, adam, sort)
    assert nonzeros(wide).weights == before


def wide_output():
    """64 inputs, 4 parents, 100 outputs, and the larger weights in the second layer."""
    torch.manual_seed(0)
    model = MLP([64, 4, 100])
    with torch.no_grad():
        model.layers[0].weight.uniform_(-0.1, 0.1)
        model.layers[2].weight.uniform_(0.5, 1.0)
    model(torch.randn(32, 64)).square().mean().backward()
    return model


@pytest.mark.parametrize("rule", MENDED)
def test_copies_of_a_wide_output_cannot_take_the_whole_budget(rule):
    dense = wide_output()
    empty = expand(dense, 16).layers
    assert (empty[0].nonzeros(), empty[2].nonzeros()) == (0, 656)
    mended = expand(dense, 16, allocation=rule).layers
    assert mended[0].nonzeros() > 0
    assert mended[0].nonzeros() + mended[2].nonzeros() == 656


def test_shares_of_a_wide_output():
    dense = wide_output()
    kept = {rule: expand(dense, 16, allocation=rule).layers[0].nonzeros() for rule in MENDED}
    assert kept["layer"] == kept["erdos-renyi"] == 256  # the latter has room for 288
    paid = expand(dense, 16, allocation="layer", budget="all").layers
    assert paid[0].nonzeros() == round(256 - 60 * 256 / 656)  # fifteen more biases for each parent
    assert paid[0].nonzeros() + paid[2].nonzeros() == 656 - 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_ranked_in_thirty_two(dtype):
    step = torch.finfo(dtype).eps
    for k in range(1, 30):  # neighbours, whose scores would often be one number in 16 bits
        first = torch.tensor([[2 - (k + 1) * step, 2 - k * step, 0.1]], dtype=dtype)
        second = torch.full((2, 1), 0.1, dtype=dtype)
        squares = torch.full((1, 3), 1.5625, dtype=dtype), torch.full((2, 1), 1.0, dtype=dtype)
        made = patterns("saliency", ([first, second], squares, 2, 4))
        assert (made.owner >= 0).tolist() == [[False, True, False]]


class Fixed(Allocation):
    def __init__(self, change):
        self.change = change

    def keep(self, pair):
        return self.change(*resolve_allocation("layer").keep(pair))

    def __repr__(self):
        return "Fixed()"


def one_less(first, second):
    first = first.clone()
    first.view(-1)[0] = False
    return first, second


WRONG = {
    "one too few": (one_less, r"Fixed\(\) must keep exactly 32 weights.*kept 31, 0 of them zero"),
    "turned": (lambda a, b: (a.T, b), r"two masks, boolean tensors of the shapes \(4, 6\)"),
    "numbers": (lambda a, b: (a.float(), b), "two masks, boolean"),
    "one mask": (lambda a, b: (a,), "two masks, boolean"),
    "nothing": (lambda a, b: None, "two masks, boolean"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_foreign_rule_is_checked(name):
    change, message = WRONG[name]
    with pytest.raises(FissileError, match=f"layer 'layers.0': .*{message}"):
        expand(MLP([6, 4, 2]), 2, allocation=Fixed(change))


def test_a_foreign_rule_may_not_keep_zeros():
    dense = MLP([6, 4, 2])
    dense.layers[0].weight.data[0, :2] = 0

    def all_of_the_first(first, second):
        six = torch.arange(second.numel()).view(second.shape) < 6
        return torch.ones_like(first), six

    with pytest.raises(FissileError, match=r"exactly 30 weights.* kept 30, 2 of them zero"):
        expand(dense, 2, allocation=Fixed(all_of_the_first))


def test_a_foreign_rule_by_name(monkeypatch):
    known = dict(fissile.expansion.budget._ALLOCATIONS)
    monkeypatch.setattr(fissile.expansion.budget, "_ALLOCATIONS", known)
    fissile.register_allocation("same", lambda: Fixed(lambda a, b: (a, b)))
    dense = MLP([6, 4, 2])
    same, layer = (expand(dense, 2, allocation=rule) for rule in ("same", "layer"))
    assert torch.equal(same.layers[2].mask, layer.layers[2].mask)
    register_allocation("layer", known["layer"])  # the same again is no conflict
    with pytest.raises(FissileError, match="named 'saliency' is registered already"):
        register_allocation("saliency", Fixed)


def broken_gradients(value):
    dense = MLP([6, 4, 2])
    for parameter in dense.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return dense


SALIENCY = "layer 'layers.0': allocation=\"saliency\""
BAD = {
    "unknown": (
        lambda: expand(MLP([6, 4, 2]), 2, allocation="layers"),
        "unknown allocation 'layers'; known are erdos-renyi, layer",
    ),
    "a number": (lambda: expand(MLP([6, 4, 2]), 2, allocation=3), "fissile.Allocation, not int"),
    "instance": (lambda: register_allocation("x", Fixed(None)), "a class or a function"),
    "number": (lambda: register_allocation(3, Fixed), "by a name"),
    "no gradients": (
        lambda: expand(MLP([6, 4, 2]), 2, allocation="saliency"),
        SALIENCY + r" needs gradients.* optimizer= the Adam .* run backward\(\)",
    ),
    "fresh adam": (
        lambda: expand(
            (dense := MLP([6, 4, 2])), 2, allocation="saliency",
            optimizer=torch.optim.Adam(dense.parameters()),
        ),
        SALIENCY + " needs gradients",
    ),
    "gradients of zero": (
        lambda: expand(broken_gradients(0.0), 2, allocation="saliency"),
        SALIENCY + " found gradients of zero only",
    ),
    "gradients of NaN": (
        lambda: expand(broken_gradients(float("nan")), 2, allocation="saliency"),
        SALIENCY + " found gradients that are NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    act, message = BAD[name]
    with pytest.raises(FissileError, match=message):
        act()


def test_a_refused_expansion_leaves_the_optimizer_alone():
    dense = MLP([6, 4, 2])
    adam = torch.optim.Adam(dense.parameters())
    with pytest.raises(FissileError, match="needs gradients"):
        expand(dense, 2, allocation="saliency", optimizer=adam, inplace=True)
    assert isinstance(dense.layers[0], nn.Linear)
    assert adam.param_groups[0]["params"] == list(dense.parameters())
