"""What the tests draw: networks, splits and settings of every kind."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import nn

from fissile import MLP, Blocks, Gram, Groups, Overlapping, Random, Split, Structured

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    model: nn.Module
    alpha: int
    split: Split
    budget: str
    seed: int


def splits_for(inputs, alpha):
    """Every split that fits a fan-in, by the registry's rules."""
    fitting = [Random(), Overlapping(), Gram(), Gram(clusters=alpha)]
    fitting += [Structured(n, n * alpha) for n in (1, 2) if inputs % (n * alpha) == 0]
    fitting += [Blocks(1)]
    fitting += [Groups([j % alpha for j in range(inputs)])]
    fitting += [Groups([min(j, alpha) for j in range(inputs)])] if inputs > alpha else []
    return fitting


@st.composite
def networks(draw, alpha, dtype=None, plain=None):
    """A model of random shape whose weights hold ties and zeros as often as not."""
    plain = draw(st.booleans()) if plain is None else plain
    depth = draw(st.integers(1, 4))
    inputs = alpha * draw(st.integers(1, 4))
    # Equal hidden fan-ins keep one split valid for every widened layer.
    hidden = [inputs if i % 2 else draw(st.integers(1, 6)) for i in range(depth)]
    sizes = [inputs, *hidden, draw(st.integers(1, 6))]
    torch.manual_seed(draw(st.integers(0, 10_000)))
    if plain:
        model = _sequential(sizes, bias=draw(st.booleans()), norm=draw(st.booleans()))
    else:
        embedding = inputs if draw(st.booleans()) else None
        model = MLP(
            sizes,
            embedding=embedding,
            layer_norm=draw(st.booleans()),
            dropout=draw(st.sampled_from([0.0, 0.1])),
            activation=draw(st.sampled_from(["relu", "gelu", "tanh", nn.LeakyReLU(0.2)])),
        )
    _roughen(model, draw(st.sampled_from([None, 1, 0])))
    return model.to(draw(st.sampled_from(DTYPES)) if dtype is None else dtype)


@st.composite
def cases(draw, dtype=None, plain=None):
    alpha = draw(st.integers(2, 8))
    model = draw(networks(alpha, dtype, plain))
    inputs = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    split = draw(st.sampled_from(splits_for(inputs, alpha)))
    budget = draw(st.sampled_from(["weights", "all"]))
    return Case(model, alpha, split, budget, draw(st.integers(0, 1000)))


def _sequential(sizes, bias, norm):
    layers = []
    for before, after in pairwise(sizes[:-1]):
        layers.append(nn.Linear(before, after, bias=bias))
        if norm:
            layers.append(nn.LayerNorm(after))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1], bias=bias))


@torch.no_grad()
def _roughen(model, decimals):
    """Round the weights so that magnitudes tie and some are zero, leaving one of each layer."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(3)
            if decimals is not None:
                module.weight.copy_(module.weight.round(decimals=decimals))
            module.weight[0, 0] = 1.0


def same(one, other):
    """Return whether two models have the same tensors, to the bit."""
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )
