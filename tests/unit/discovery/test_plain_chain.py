"""A plain chain is read off, and the answer is the one that tracing gives."""

import random

import pytest
import torch
from torch import nn

from fissile import MLP, expand
from fissile.discovery import discover, search

WIDTHS = (4, 6)


def part(draw):
    """Draw what may stand between two linear layers, fit or not."""
    width = draw.choice(WIDTHS)
    return draw.choice(
        [
            nn.ReLU, nn.Tanh, nn.GELU, nn.PReLU, nn.Identity, lambda: nn.PReLU(width),
            lambda: nn.Dropout(0.1), lambda: nn.LayerNorm(width), lambda: nn.RMSNorm(width),
            lambda: nn.BatchNorm1d(width), lambda: nn.LayerNorm((2, width)), nn.AlphaDropout,
        ]
    )()  # fmt: skip


def random_chain(draw, depth=2):
    """Draw a chain; widths mostly fit, some parts are nested, tied or used twice."""
    parts, width = [], 4
    for _ in range(draw.randint(1, 4)):
        inputs = width if draw.random() < 0.9 else draw.choice(WIDTHS)
        width = draw.choice(WIDTHS)
        parts += [nn.Linear(inputs, width, bias=draw.random() < 0.8)]
        parts += [part(draw) for _ in range(draw.randint(0, 3))]
    if depth and draw.random() < 0.5:
        parts.insert(draw.randrange(len(parts)), random_chain(draw, depth - 1))
    if draw.random() < 0.1:
        parts.append(parts[0])
    linears = [module for module in parts if isinstance(module, nn.Linear)]
    if draw.random() < 0.1 and linears[0].weight.shape == linears[-1].weight.shape:
        linears[-1].weight = linears[0].weight
    if draw.random() < 0.1:
        parts[-1].register_forward_hook(lambda *_: None)
    if draw.random() < 0.1:
        parts.append(nn.Sequential())
    if depth == 2 and draw.random() < 0.3:
        return MLP([4, 6, 4, 6], embedding=4, layer_norm=draw.random() < 0.5, dropout=0.1)
    return nn.Sequential(*parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_a_chain_that_is_read_off_is_the_traced_one(seed, monkeypatch):
    model = random_chain(random.Random(seed))
    read_off = discover(model)
    monkeypatch.setattr(search, "_plain_chain", lambda _: None)
    assert discover(model) == read_off


def test_most_chains_go_the_short_way():
    chains = [random_chain(random.Random(seed)) for seed in range(150)]
    assert sum(search._plain_chain(chain) is not None for chain in chains) > 75


def added(model):
    model.more = nn.Linear(4, 4)
    return model


class Reversed(nn.Sequential):
    def forward(self, x):
        return super().forward(x.flip(-1))


OTHERS = {
    "a class of its own": lambda: Reversed(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "another part": lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 3)),
    "a part that nothing calls": lambda: added(MLP([4, 6, 3])),
    "one layer": lambda: nn.Linear(4, 6),
    "a convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_traced(name):
    assert search._plain_chain(OTHERS[name]()) is None


def test_a_plain_chain_is_not_traced(monkeypatch):
    monkeypatch.setattr(search.Survey, "visit", None)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    state = torch.random.get_rng_state()
    assert expand(model, 2)[0].out_features == 12
    assert len(discover(model, torch.ones(2, 4))) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
