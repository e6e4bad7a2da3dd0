"""While it trains: nothing revives a removed weight, and the optimizer goes on."""

import contextlib
import copy
import io
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import cases
from torch import nn

import fissile
from fissile import MLP, FissileError, Rewire, expand, nonzeros, to_dense, to_masked
from fissile.layers import SparseLinear

pytestmark = pytest.mark.slow  # together: make quick leaves them out

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.5),
}
SPLITS = ["random", "overlapping"]


def train(model, optimizer, steps=3, accumulate=1, seed=0):
    """A few real steps on random targets; the gradient may be gathered over several batches."""
    generator = torch.Generator().manual_seed(seed)
    parameter = next(model.parameters())
    inputs = next(m for m in model.modules() if hasattr(m, "in_features")).in_features
    for _ in range(steps):
        for _ in range(accumulate):
            x = torch.randn(16, inputs, generator=generator).to(parameter)
            (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nonzero_values(model):
    """Where each expanded layer has a value; a dense layer may learn what it likes."""
    plain = to_dense(model)
    names = [n for n, m in model.named_modules() if isinstance(m, SparseLinear)]
    return {name: plain.get_submodule(name).weight != 0 for name in names}


def same_or_fewer(before, after):
    return all(not (after[name] & ~before[name]).any() for name in before)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(sorted(OPTIMIZERS)), st.integers(1, 3), st.booleans())
def test_no_step_of_any_optimizer_revives_a_weight(case, name, accumulate, trained_before):
    dense = case.model
    optimizer = OPTIMIZERS[name](dense.parameters())
    if trained_before:
        # Momentum on every weight, those to be removed included, is what would revive them.
        train(dense, optimizer, 2)
        if not all(p.isfinite().all() for p in dense.parameters()):  # half precision may overflow
            return
    wide = expand(dense, case.alpha, case.split, optimizer=optimizer)
    allowed, count = nonzero_values(wide), nonzeros(wide)
    assert count.weights == nonzeros(dense).weights
    train(wide, optimizer, 3, accumulate)
    assert same_or_fewer(allowed, nonzero_values(wide))
    sparse = [c for c in count.counts if c.layer in allowed]
    assert [c for c in nonzeros(wide).counts if c.layer in allowed] == sparse


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deepcopy_state_dict_and_dtype_keep_the_pattern(name):
    torch.manual_seed(0)
    dense = MLP([16, 8, 8, 8, 5], layer_norm=True)
    wide = expand(dense, 3, budget="all")
    count, allowed = nonzeros(wide), nonzero_values(wide)
    twin = copy.deepcopy(wide)
    other = expand(dense, 3, budget="all", seed=1)
    other.load_state_dict(wide.state_dict())
    for model in (twin, other, copy.deepcopy(wide).to(torch.bfloat16), wide.to("cpu").double()):
        assert nonzeros(model) == count
        train(model, OPTIMIZERS[name](model.parameters()), 5)
        assert nonzeros(model) == count
        assert same_or_fewer(allowed, nonzero_values(model))


def test_a_checkpoint_cannot_revive_a_weight():
    wide = to_masked(expand(MLP([16, 8, 5]), 2))
    allowed = nonzero_values(wide)
    state = {k: v if "mask" in k else torch.ones_like(v) for k, v in wide.state_dict().items()}
    wide.load_state_dict(state)
    assert same_or_fewer(allowed, nonzero_values(wide))


BACKENDS = [(backend, split) for backend in ("eager", "aot_eager") for split in SPLITS]
if shutil.which("g++"):  # slow, and a random split has layers of both kinds
    BACKENDS.append(("inductor", "random"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(("backend", "split"), BACKENDS)
def test_compiled_training_keeps_budget_and_function(backend, split):
    torch.manual_seed(0)
    wide = expand(MLP([16, 8, 5]), 2, split)
    twin, allowed = copy.deepcopy(wide), nonzero_values(wide)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (wide, twin)]
    x = torch.randn(16, 16)
    for model, optimizer in zip((wide, compiled), optimizers, strict=True):
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(compiled(x), wide(x))
    assert twin.state_dict().keys() == wide.state_dict().keys()
    assert same_or_fewer(allowed, nonzero_values(twin))
    torch.compiler.reset()


def test_state_dict_keys_are_the_dense_ones_plus_the_pattern():
    dense = MLP([16, 8, 5])
    keys = set(expand(dense, 2).state_dict()) - set(dense.state_dict())
    assert keys == {"layers.0.owner", "layers.2.mask"}


def moments(optimizer, parameter):
    state = optimizer.state[parameter]
    return [v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_optimizer_continues_on_the_new_model(name, split):
    torch.manual_seed(0)
    dense = MLP([8, 6, 4], layer_norm=True)
    optimizer = OPTIMIZERS[name](dense.parameters())
    train(dense, optimizer)
    old = copy.deepcopy({k: optimizer.state[p] for k, p in dense.named_parameters()})
    wide = expand(dense, 2, split, optimizer=optimizer)

    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in wide.parameters()}
    assert {id(p) for p in optimizer.state} == held, "the optimizer still knows old parameters"

    first, second = wide.layers[0], wide.layers[3]
    for key in [k for k in old["layers.0.bias"] if k != "step"]:
        old1, old2 = old["layers.0.weight"][key], old["layers.3.weight"][key]
        new1, new2 = optimizer.state[first.weight][key], optimizer.state[second.weight][key]
        if split == "random":
            assert torch.equal(new1, torch.where(first.owner >= 0, old1, 0))
        else:
            expected = torch.where(first.mask, old1.repeat_interleave(2, 0), 0)
            assert torch.equal(new1, expected)
        assert torch.equal(new2, torch.where(second.mask, old2.repeat_interleave(2, 1), 0))
        for bias in ("layers.0.bias", "layers.1.weight", "layers.1.bias"):
            state = optimizer.state[wide.get_parameter(bias)][key]
            assert torch.equal(state, old[bias][key].repeat_interleave(2))
        head = optimizer.state[wide.get_parameter("layers.3.bias")]
        assert torch.equal(head[key], old["layers.3.bias"][key])
    if name != "sgd":
        assert optimizer.state[first.weight]["step"] == old["layers.0.weight"]["step"]
    before = copy.deepcopy(wide.state_dict())
    train(wide, optimizer, 1)
    moved = [k for k, v in wide.named_parameters() if not torch.equal(v, before[k])]
    assert set(moved) == dict(wide.named_parameters()).keys()


def test_continuing_equals_training_the_masked_network_by_hand():
    """Adam across the split, against masking plain tensors and their moments by hand."""
    torch.manual_seed(0)
    dense = MLP([8, 6, 4]).double()
    optimizer = torch.optim.Adam(dense.parameters(), 1e-2)
    train(dense, optimizer)
    twin, twin_optimizer = copy.deepcopy((dense, optimizer))
    wide = expand(dense, 2, optimizer=optimizer)
    train(wide, optimizer, 4, seed=1)

    pattern = expand(twin, 2)
    masks = [pattern.layers[0].pattern(), pattern.layers[2].mask]
    plain = to_dense(pattern)
    hand = torch.optim.Adam(plain.parameters(), 1e-2)
    olds = list(twin.parameters())
    repeats = [(2, 0), (2, 0), (2, 1), (1, 0)]
    for new, old, (times, dim) in zip(plain.parameters(), olds, repeats, strict=True):
        state = twin_optimizer.state[old]
        hand.state[new] = {
            k: v.clone() if k == "step" else v.repeat_interleave(times, dim)
            for k, v in state.items()
        }
    for layer, mask in zip((plain.layers[0], plain.layers[2]), masks, strict=True):
        for value in moments(hand, layer.weight):
            value.mul_(mask)
        layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)
    train(plain, hand, 4, seed=1)
    for one, other in zip(to_dense(wide).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_groups_schedulers_and_strangers_of_the_optimizer_survive():
    dense, stranger = MLP([8, 6, 4]), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(
        [
            {"params": dense.layers[0].parameters(), "lr": 1e-3},
            {"params": [*dense.layers[2].parameters(), *stranger.parameters()], "lr": 1e-2},
        ]
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    wide = expand(dense, 2, optimizer=optimizer)
    train(wide, optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-3]
    assert any(p is stranger.weight for p in optimizer.param_groups[1]["params"])


def test_an_unknown_or_foreign_optimizer_is_refused_and_nothing_changes():
    dense = MLP([8, 6, 4])
    with pytest.raises(FissileError, match="cannot carry the state of RMSprop"):
        expand(dense, 2, optimizer=torch.optim.RMSprop(dense.parameters()))
    foreign = torch.optim.Adam(MLP([8, 6, 4]).parameters())
    with pytest.raises(FissileError, match="none of this model's parameters"):
        expand(dense, 2, optimizer=foreign)
    mine = torch.optim.Adam(dense.parameters())
    with pytest.raises(FissileError, match="unknown split"):
        expand(dense, 2, "no such", optimizer=mine)
    assert {id(p) for p in mine.param_groups[0]["params"]} == {id(p) for p in dense.parameters()}


def test_another_process_makes_the_same_pattern():
    """Data-parallel ranks expand on their own; the same seed must give them the same masks."""
    code = (
        "import torch, fissile; torch.manual_seed(0); m = fissile.MLP([24, 8, 5]);"
        "print([(fissile.expand(m, 3, s, seed=7).layers[0].pattern().flatten().int()"
        ".tolist()) for s in ('random', 'gram', 'overlapping')])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert there.stdout == here.getvalue()
    assert "1" in there.stdout


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("until", [None, 40])
def test_rewiring_keeps_the_budget_and_moves_the_pattern(grow, until):
    torch.manual_seed(0)
    dense = MLP([16, 8, 5])
    optimizer = torch.optim.AdamW(dense.parameters(), 1e-2, weight_decay=0.1)
    train(dense, optimizer)
    wide = to_masked(expand(dense, 2, optimizer=optimizer), optimizer=optimizer)
    count, start = nonzeros(wide), wide.layers[0].mask.clone()
    rewire = Rewire(wide, optimizer, every=5, fraction=0.2, grow=grow, until=until)
    changes = []
    for step in range(30):
        (wide(torch.randn(16, 16)) - 1).square().mean().backward()
        optimizer.step()
        due, before = (step + 1) % 5 == 0, wide.layers[0].mask.clone()
        assert rewire.step() is due
        changes.append(int((wide.layers[0].mask & ~before).sum()))
        if due:
            arrived = wide.layers[0].mask & ~before
            assert not wide.layers[0].weight[arrived].any(), "a returning weight starts at zero"
            for moment in moments(optimizer, wide.layers[0].weight):
                assert not moment[wide.layers[0].mask != before].any(), "stale moments"
        optimizer.zero_grad()
        assert nonzeros(wide) == count
        assert not wide.layers[0].weight[~wide.layers[0].mask].any()
    rewire.close()
    assert not torch.equal(start, wide.layers[0].mask)
    active = count.counts[0].count
    assert changes[4] > 0
    assert max(changes) <= 0.2 * active
    if until is None:
        assert set(changes) == {0, int(0.2 * active)}
    else:
        assert changes[4] > changes[29], "the fraction falls along a cosine"


def test_gradient_growth_takes_the_largest_gradients():
    torch.manual_seed(0)
    wide = to_masked(expand(MLP([16, 8, 5]).double(), 2))
    layer = wide.layers[0]
    rewire = Rewire(wide, every=1, fraction=0.1, grow="gradient")
    x, mask = torch.randn(16, 16, dtype=torch.float64), layer.mask.clone()
    for _ in range(2):  # two micro-batches, one step
        wide(x).square().mean().backward()
    plain = to_dense(wide)
    (2 * plain(x).square().mean()).backward()
    expected = plain.layers[0].weight.grad.abs().masked_fill(mask, -1)
    rewire.step()
    grown = layer.mask & ~mask
    assert grown.sum() == int(0.1 * mask.sum())
    assert expected[grown].min() >= expected[~grown & ~mask].max()
    smallest = to_dense(wide).layers[0].weight  # what left was smaller than what stayed
    assert smallest[mask & layer.mask].abs().min() > 0


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_numbers_that_cannot_be_ranked_cost_no_weight(grow):
    wide = to_masked(expand(MLP([16, 8, 5]), 2))
    count = nonzeros(wide)
    rewire = Rewire(wide, every=1, fraction=0.2, grow=grow)
    wide(torch.randn(4, 16)).sum().mul(float("inf")).backward()  # an overflow
    rewire.step()
    assert nonzeros(wide) == count
    wide.layers[0].weight.data[0, 0] = float("nan")
    wide(torch.randn(4, 16)).sum().backward()
    rewire.step()
    assert nonzeros(wide) == count


def test_growth_goes_by_the_gradient_of_its_own_step():
    """What was seen in earlier steps, or by a copy of the model, must not count."""
    torch.manual_seed(0)
    wide = to_masked(expand(MLP([16, 8, 5]), 2))
    twin = copy.deepcopy(wide)
    rewire, fresh = (Rewire(m, every=2, fraction=0.1, grow="gradient") for m in (wide, twin))
    fresh.steps = 1
    first, second = torch.randn(2, 16, 16)
    wide(first).square().mean().backward()
    rewire.step()
    wide(second).square().mean().backward()
    copy.deepcopy(wide)(first).mul(100).sum().backward()
    rewire.step()
    twin(second).square().mean().backward()
    fresh.step()
    assert torch.equal(wide.layers[0].mask, twin.layers[0].mask)
    assert pickle.loads(pickle.dumps(wide)).layers[0].observer is None


def test_rewiring_refuses_an_optimizer_of_another_model():
    wide = to_masked(expand(MLP([16, 8, 5]), 2))
    with pytest.raises(FissileError, match="none of this model's parameters"):
        Rewire(wide, torch.optim.Adam(MLP([16, 8, 5]).parameters()))


def test_rewiring_resumes_where_it_stopped():
    torch.manual_seed(0)
    one = to_masked(expand(MLP([16, 8, 5]), 2))
    rewire = Rewire(one, every=2, fraction=0.3)
    rewire.step(), rewire.step(), rewire.step()
    other = copy.deepcopy(one)
    resumed = Rewire(other, every=2, fraction=0.3, seed=99)
    resumed.load_state_dict(rewire.state_dict())
    rewire.step(), resumed.step()
    assert torch.equal(one.layers[0].mask, other.layers[0].mask)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"every": 0}, "every=0 is not"),
        ({"every": 2.5}, "every=2.5 is not"),
        ({"fraction": 0.0}, "fraction must be above 0"),
        ({"fraction": 1.5}, "at most 1, not 1.5"),
        ({"grow": "magic"}, 'must be "random" or "gradient"'),
        ({"until": 0}, "until=0 is not"),
    ],
)
def test_rewiring_refuses_bad_settings(settings_, message):
    with pytest.raises(FissileError, match=message):
        Rewire(to_masked(expand(MLP([8, 4, 2]), 2)), **settings_)


def test_rewiring_refuses_what_cannot_move():
    with pytest.raises(FissileError, match="to_masked"):
        Rewire(expand(MLP([8, 4, 2]), 2))
    with pytest.raises(FissileError, match="no masked layers"):
        Rewire(MLP([8, 4, 2]))
    wide = to_masked(expand(MLP([8, 4, 2]), 2))
    with pytest.raises(FissileError, match="run backward"):
        Rewire(wide, every=1, grow="gradient").step()


def test_dropconnect_has_the_budget_in_training_and_scales_in_evaluation():
    torch.manual_seed(0)
    dense = MLP([16, 8, 5])
    optimizer = torch.optim.Adam(dense.parameters(), 1e-2)
    train(dense, optimizer)
    split, control = expand(dense, 2), fissile.dropconnect(dense, 2, optimizer=optimizer)
    layer, second = control.layers[0], control.layers[2]
    masks = [layer.draw_mask() for _ in range(5)]
    for mask in masks:
        assert torch.equal(mask.sum(1), split.layers[0].pattern().sum(1))
        assert int(mask.sum() + second.mask.sum()) == nonzeros(dense).weights
    assert any(not torch.equal(masks[0], mask) for mask in masks[1:])
    assert torch.equal(second.mask, split.layers[2].mask)

    x = torch.randn(3, 16)
    written = to_dense(control)  # what it is in evaluation, whatever the mode
    control.eval()
    torch.testing.assert_close(written.eval()(x), control(x))
    share = layer.active() / layer.weight.numel()
    torch.testing.assert_close(layer.dense_weight(), layer.weight * share)
    assert nonzeros(control).weights > nonzeros(dense).weights, "it keeps no budget at test time"
    control.train()
    train(control, optimizer, 3)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in control.parameters()
    }


def test_dropconnect_averages_to_its_evaluation():
    torch.manual_seed(0)
    layer = fissile.dropconnect(MLP([12, 4, 3]), 2).layers[0]
    mean = torch.stack([layer.pass_weight() for _ in range(4000)]).mean(0)
    degree_share = layer.degree.unsqueeze(1) / layer.in_features
    torch.testing.assert_close(mean, layer.weight * degree_share, rtol=0, atol=0.02)
