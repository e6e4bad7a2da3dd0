"""Small GPTs trained side by side, against one network in a plain loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fissile
from fissile import FissileError
from fissile._common.random import hash32, noise
from fissile.bank import Dense, DropConnect, Dynamic, Expand
from fissile.bank.language import GPT, Networks, Shape, Text, train
from fissile.bank.language.train import _fitted
from fissile.bank.stack import module_at
from fissile.layers import Masked, weight_of

ARMS = {
    "dense": (Dense(), "magnitude"),
    "split": (Expand(2), "magnitude"),
    "layer": (Expand(2), "layer"),
    "fresh": (Expand(2, moments="fresh"), "magnitude"),
    "moving": (Dynamic(2, every=3, fraction=0.3), "layer"),
}
HOW = {"lr": 3e-3, "batch": 4, "steps": 6, "warm_up": 2, "fine_tune": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text():
    """Thirteen characters, each followed by the next or the one after it."""
    draw = torch.Generator().manual_seed(0)
    read = torch.randint(1, 3, (1500,), generator=draw).cumsum(0) % 13
    return Text(read[:1200], read[1200:], 13)


def shape(place, neurons=6):
    return Shape(13, neurons, place, layers=2, width=16, heads=2, context=8, beside=5)


def said(model, tokens):
    """Return what one network says, written out with what torch has for one network."""
    x = functional.embedding(tokens, model.characters) + model.positions[: tokens.shape[-1]]
    for block in model.blocks:
        mixed = block.mix(block.norms[0](x)).unflatten(-1, (3, block.heads, -1))
        q, k, v = (mixed.select(-3, i).transpose(-3, -2) for i in range(3))
        score = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1)
        seen = score.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + block.join(seen.transpose(-3, -2).flatten(-2))
        x = x + block.ffn(block.norms[1](x))
    return model.head(model.norm(x))


def loop(sizes, seed, text, name):
    """Train one network in a plain loop, with torch's Adam; return it and its nats."""
    arm, allocation = ARMS[name]
    torch.manual_seed(seed)
    model = GPT(sizes)
    adam, rewire, span = torch.optim.Adam(model.parameters(), HOW["lr"]), None, sizes.context
    for epoch in range(4):
        if epoch == 2 and name != "dense":
            holders = [model] if sizes.place == "head" else model.blocks
            which = "head" if sizes.place == "head" else "ffn"
            for number, holder in enumerate(holders):
                kept = None if name == "fresh" else adam
                stream = int(hash32(seed, number))
                old = getattr(holder, which)
                wide = fissile.expand(old, 2, seed=stream, allocation=allocation, optimizer=kept)
                wide = fissile.to_masked(wide, optimizer=kept)
                setattr(holder, which, wide)
            if name == "fresh":
                adam = torch.optim.Adam(model.parameters(), HOW["lr"])
            if name == "moving":
                until = HOW["fine_tune"] * HOW["steps"]
                how = {"every": arm.every, "fraction": arm.fraction, "until": until}
                rewire = fissile.Rewire(model, adam, **how, seed=seed)
        starts = noise(seed, epoch, HOW["steps"], HOW["batch"]) * (len(text.train) - span)
        for rows in starts.long():
            tokens = text.train[rows[:, None] + torch.arange(span + 1)]
            logits = said(model, tokens[:, :-1])
            adam.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            adam.step()
            if rewire is not None:
                rewire.step()
    size = (len(text.test) - 1) // span * span
    with torch.no_grad():
        logits = said(model, text.test[:size].view(-1, span)).flatten(0, 1)
    right = float((logits.argmax(-1) == text.test[1 : size + 1]).double().mean())
    return right, float(functional.cross_entropy(logits, text.test[1 : size + 1]))


@pytest.mark.parametrize("place", ["ffn", "head"])
def test_a_stack_trains_as_a_plain_loop_does(place, text):
    found = train(shape(place), [3, 1], text, ARMS, **HOW)
    for name in ARMS:
        right, nats = loop(shape(place), 1, text, name)
        assert found[1, name].nats[-1] == pytest.approx(nats, abs=2e-4), name
        assert found[1, name].accuracy[-1] == pytest.approx(right, abs=0.02), name
    assert len({round(one.nats[-1], 6) for one in found.values()}) == len(found)


@pytest.mark.parametrize("place", ["ffn", "head"])
def test_a_network_trains_alike_alone_and_in_a_stack(place, text):
    together = train(shape(place), [0, 1, 2], text, ARMS, **HOW)
    for name in ("dense", "layer", "moving"):
        alone = train(shape(place), [1], text, {name: ARMS[name]}, **HOW)[1, name]
        assert alone.nonzeros == together[1, name].nonzeros
        torch.testing.assert_close(
            torch.tensor(alone.nats), torch.tensor(together[1, name].nats), rtol=1e-5, atol=1e-6
        )


def test_it_learns_and_every_arm_keeps_the_budget(text):
    long = {**HOW, "warm_up": 6, "steps": 20}
    found = train(shape("ffn"), [0, 1], text, ARMS, **long)
    assert len({one.nonzeros for one in found.values()}) == 1
    for one in found.values():
        assert len(one.nats) == len(one.accuracy) == 8
        assert one.nats[-1] < 1.2 < one.nats[0]
        assert one.accuracy[-1] > 0.35


def test_masks_move_and_keep_their_size(text):
    moving = Networks.of(shape("ffn"), [0, 1]).branch(*ARMS["moving"])
    layers = [m for m in moving.model.modules() if isinstance(m, Masked)]
    before = [m.mask.clone() for m in layers]
    for _ in _fitted(moving, text, 0, 1, 1e-3, 4, 7, 8):
        pass
    for layer, old in zip(layers, before, strict=True):
        assert not torch.equal(layer.mask, old)
        assert torch.equal(layer.mask.sum((-2, -1)), old.sum((-2, -1)))
        assert not (layer.weight * ~layer.mask).any()


def test_branching_leaves_the_warm_network_as_it_is(text):
    warm = Networks.of(shape("head"), [0])
    before = {name: value.clone() for name, value in warm.model.state_dict().items()}
    split = warm.branch(*ARMS["split"])
    for _ in _fitted(split, text, 0, 1, 1e-2, 4, 2, 8):
        pass
    assert all(torch.equal(value, before[n]) for n, value in warm.model.state_dict().items())
    one = module_at(split.model, 0)
    assert weight_of(one.head[0]).shape == (12, 16)
    assert isinstance(one.blocks[0].ffn[0], nn.Linear)


@pytest.mark.parametrize("arm", [DropConnect(2), Dynamic(2, grow="gradient")])
def test_what_a_gpt_cannot_be_trained_as_is_refused(arm):
    with pytest.raises(FissileError, match="a GPT cannot be trained as"):
        Networks.of(shape("ffn"), [0]).branch(arm)
