"""What a graph does not show: layers kept elsewhere, code that reaches in, small branches."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from discovery_models import Unreadable, pair, places, why
from torch import nn
from torch.nn import functional

from fissile import MLP, expand
from fissile.discovery import discover

MLP_PLACE = [("mlp", ("fc1",), "fc2")]
X = torch.linspace(-1, 1, 20).view(5, 4)


class Helper:
    def __init__(self, *parts):
        self.parts = parts

    def run(self, x):
        for part in self.parts:
            x = part(x)
        return x


def listed(m, x):
    for part in m.kept:
        x = part(x)
    return x


def keeping(run, keep):
    model = pair(run, act=nn.ReLU())
    vars(model)["kept"] = keep(model)
    return model


# Ways to call layers past their names, where a new layer would not come.
ASIDE = {
    "list": (listed, lambda m: [m.fc1, m.act, m.fc2]),
    "tuple in a dict": (lambda m, x: m.fc2(m.kept["a"][0](x).relu()), lambda m: {"a": (m.fc1,)}),
    "bound method": (lambda m, x: m.fc2(m.kept(x).relu()), lambda m: m.fc1.forward),
    "partial": (lambda m, x: m.fc2(m.kept(input=x).relu()), lambda m: partial(m.fc1)),
    "module without a name": (
        lambda m, x: m.kept[0](x), lambda m: [nn.Sequential(m.fc1, m.act, m.fc2)],
    ),
    "object": (lambda m, x: m.kept.run(x), lambda m: Helper(m.fc1, m.act, m.fc2)),
    "direct": (lambda m, x: m.fc2(m.kept(x).relu()), lambda m: m.fc1),
}  # fmt: skip


@pytest.mark.parametrize("way", ASIDE)
@pytest.mark.parametrize("inputs", [None, X])
def test_layers_called_past_their_names_are_refused(way, inputs):
    assert places(keeping(*ASIDE[way]), inputs) == []


def test_it_says_that_the_layer_has_no_name_there():
    assert "a Linear is called past its name; use nn.ModuleList" in why(
        keeping(*ASIDE["list"]), "fc1"
    )


def test_a_list_that_holds_itself_and_blocks_does_no_harm():
    model = nn.Sequential(MLP([4, 6, 4]), MLP([4, 6, 3]))
    model.kept = [model[0], model[1]]
    model.kept.append(model.kept)
    assert len(discover(model)) == 2


def test_the_try_out_sees_that_the_old_layers_are_still_called():
    class Odd(Unreadable):
        def forward(self, x):
            return x if x.sum() > 1e9 else self.helper.run(x)

    model = Odd()
    model.helper = Helper(model.fc1, model.norm, model.act, model.fc2)
    assert "goes on calling the old layer" in why(model, "fc1", X)


class Small(Unreadable):
    """A guess that is wrong, but hardly shows in what the model returns."""

    def __init__(self, share=1.0, scale=1.0):
        super().__init__()
        self.share, self.scale = share, scale

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        h = self.act(self.norm(self.fc1(x)))
        return x + self.scale * self.fc2(h + self.share * h.cumsum(-1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Small(scale=1e-5),
        lambda: Small(scale=0.0),
        lambda: Small(share=0.01).bfloat16(),
        lambda: Small(share=1e-4),
    ],
)
def test_the_try_out_sees_small_branches(make):
    model = make()
    inputs = X.to(model.fc1.weight.dtype)
    assert "changes what the model computes" in why(model, "fc1", inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_try_out_in_16_bits(dtype):
    model = Unreadable().to(dtype)
    assert places(model, X.to(dtype)) == MLP_PLACE
    fixed = pair(lambda m, x: m.fc2(m.fc1(x.to(dtype)).relu())).to(dtype)  # 64 bits do not fit
    assert places(fixed, X.to(dtype)) == MLP_PLACE


class Parent(nn.Module):
    """Code that cannot be traced, and a part of it that can."""

    def __init__(self, run, body=None):
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.blocks = nn.ModuleList([MLP([4, 6, 4]), MLP([4, 6, 4])])
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.run = run

    def helper(self, part, x):
        return self.head(part(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, gate=None, mixed=False, mask=None):
        h = self.fc1(x).relu()
        h = h if gate is None else h * gate
        h = h.softmax(-1) if mixed else h
        return self.fc2(h if mask is None else h.relu())


class Indexed(Parent):
    def forward(self, x):
        if x.sum() > 1e9:
            return x
        h = self.body[1](self.body[0](x))
        return self.body[2](h), self.head(h)


class Reads(Parent):
    def forward(self, x):
        return self.body(x) + functional.linear(x, self.body[0].weight).sum() if x.sum() else x


class Loops(Parent):
    def forward(self, x):
        if x.sum() > 1e9:
            return x
        for part in self.body:
            x = part(x)
            if part is self.body[1]:
                x = x + self.head(x).sum()
        return x


class Named(Parent):
    def forward(self, x):
        first, *_ = list(self.body)
        return self.head(first(x)) if x.sum() else x


class Handed(Parent):
    def forward(self, x):
        return self.helper(self.body[:2], x) if x.sum() else x


class Measured(Parent):
    def forward(self, x):
        return self.body(x) / self.body[0].out_features if x.sum() else x


class Escapes(Parent):
    def forward(self, x):
        return self.run(self, x) if x.sum() else x


class Passes(Parent):
    def forward(self, x):
        return self.body(x, gate=self.scale) if x.sum() else x


class Flags(Parent):
    def forward(self, x):
        return self.body(x, None, x.ndim == 2) if x.sum() else x


SOURCELESS = {}
exec("def forward(self, x):\n    return self.body[0](x) if x.sum() else x", SOURCELESS)


class Unseen(Parent):
    forward = SOURCELESS["forward"]


PARTS = [Indexed, Reads, Loops, Named, Handed, Measured, Escapes, Unseen]


@pytest.mark.parametrize("kind", PARTS)
def test_code_that_reaches_into_a_part(kind):
    model = kind(lambda m, x: m.head(m.body[0](x)))
    reason = f"the forward of {kind.__name__}, which may use parts of it alone, could not be traced"
    assert why(model, "body.0") == f"{reason}; pass example_inputs to have it tried out"
    assert ("mlp", ("body.0",), "body.2") not in places(model, X)


@pytest.mark.parametrize("kind", [Passes, Flags])
def test_code_that_gives_a_part_other_arguments(kind):
    assert "pass example_inputs" in why(kind(None, Gated()), "body.fc1")
    assert places(kind(None, Gated()), X) == []


class Whole(Parent):
    """All the ways to use a part as a whole."""

    def forward(self, x, *, again=True):
        if x.sum() > 1e9:
            return f"{self}"
        x = self.body(x, mask=x)
        for i, block in enumerate(self.blocks[:2]):
            x = block(x).to(block.layers[0].weight.dtype) + i
        for block in (self.blocks[0], self.blocks[-1]):
            x = block(x) if isinstance(block, nn.Module) else x
        last, x = self.blocks[1], self._scaled(x, 2)
        return last(x) if again and self.body is not None else self._more(x)

    @staticmethod
    def _scaled(x, scale):
        return torch.mul(x, scale)

    def _more(self, x):
        return [block(x) for block in self.blocks]


def test_code_that_uses_parts_as_a_whole():
    model = Whole(None, Gated())
    assert places(model) == []
    assert [first for _, (first,), _ in places(model, X)] == [
        "body.fc1", "blocks.0.layers.0", "blocks.1.layers.0",
    ]  # fmt: skip


def test_doubts_are_settled_by_trying():
    class Late(Parent):
        def forward(self, x):
            return self.body[2](self.body[1](self.body[0](x))) if x.sum() < 1e9 else x

    assert places(Late(None)) == []
    assert ("mlp", ("body.0",), "body.2") in places(Late(None), X)
    assert ("mlp", ("body.0",), "body.2") not in places(Indexed(None), X)


def test_widths_that_the_code_asks_for():
    run = lambda m, x: m.fc2(m.fc1(x).relu() * m.fc1.out_features**-0.5)  # noqa: E731
    assert "asks for the width of 'fc1'" in why(pair(run), "fc1")
    assert "changes what the model computes" in why(pair(run), "fc1", X)
    asked = pair(lambda m, x: m.fc2(m.fc1(x.view(-1, m.fc1.in_features)).relu()))
    assert places(asked) == []
    assert places(asked, X) == MLP_PLACE


def test_a_doubt_in_either_mode_is_a_doubt():
    def run(m, x):
        return m.fc2(m.fc1(x).relu() * (m.fc1.out_features if m.training else 1))

    assert "asks for the width" in why(pair(run), "fc1")


class Careless(nn.Module):
    """Forward code that writes into parameters and draws numbers of all kinds."""

    def __init__(self):
        super().__init__()
        self.net = MLP([4, 6, 3])

    def forward(self, x):
        self.net.layers[0].weight.data.mul_(0.5)
        random.random()
        np.random.rand()  # noqa: NPY002
        return self.net(x)


def test_parameters_and_random_numbers_are_left_alone():
    model = Careless()
    before = copy.deepcopy(model.state_dict())
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for inputs in (None, X):
        discover(model, inputs)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # noqa: NPY002


def test_layers_skipped_by_chance_are_seen_alike_each_time():
    model = pair(lambda m, x: m.fc2(m.fc1(x).relu()) if random.random() < 0.99 else x)
    random.seed(2)
    assert all(places(model, X) == MLP_PLACE for _ in range(150))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_code_stays_closed():
    compiled = torch.jit.script(MLP([4, 6, 4]).layers)
    model = nn.Sequential(compiled, nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for inputs in (None, X):
        assert places(model, inputs) == [("mlp", ("1",), "3")]
    assert not discover(compiled).places
    between = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()), nn.Linear(4, 3))
    discover(between)


class Mode(nn.Module):
    """An activation that mixes neurons, but only in training."""

    def forward(self, x):
        if self.training:
            x = x + x.softmax(-1) @ torch.ones(6, 6)
        return x.relu()


class Opaque(Mode):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) < 1e9 else x


class Fine(nn.Module):
    def forward(self, x):
        return x.relu() if float(x.sum()) < 1e9 else x


def test_activations_are_looked_at_in_training_too():
    for act in (Mode(), Opaque()):
        assert places(nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 3))) == []
    assert len(places(nn.Sequential(nn.Linear(4, 6), Fine(), nn.Linear(6, 3)))) == 1


def test_an_expanded_model_computes_what_was_found():
    torch.manual_seed(0)
    model = Whole(None, Gated())
    wide = expand(model, 2, example_inputs=X)
    assert wide.body.fc1.out_features == 12
    assert wide(X).shape == (5, 4)
