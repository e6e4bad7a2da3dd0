"""Expanding in place, and what comes along: gradients, optimizers, hooks and notes."""

import copy

import pytest
import torch
from place_models import EVERY, SORTS, Deep, Plain, train, trained
from torch import nn

from fissile import MLP, FissileError, expand, to_dense, to_masked
from fissile.expansion.replace import Replacement, assemble


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


def test_an_optimizer_within_another_object_is_found():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    dense = MLP([6, 4, 2])
    adam = torch.optim.Adam(dense.parameters())
    wide = expand(dense, 2, optimizer=Wrapper(adam))
    assert {id(p) for p in adam.param_groups[0]["params"]} == {id(p) for p in wide.parameters()}


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
