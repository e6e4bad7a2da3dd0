"""A small model for every kind of place, with what its first and second layers are called."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from fissile import MLP


class Gated(nn.Module):
    """Gate and up side by side; one bias is missing on purpose."""

    def __init__(self, inputs=8, neurons=6, outputs=5, **_):
        super().__init__()
        self.up = nn.Linear(inputs, neurons)
        self.gate = nn.Linear(inputs, neurons, bias=False)
        self.down = nn.Linear(neurons, outputs)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    def __init__(self, inputs=8, neurons=6, outputs=5, **_):
        super().__init__()
        self.both = nn.Linear(inputs, 2 * neurons)
        self.down = nn.Linear(neurons, outputs)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(functional.gelu(gate) * up)


class Filters(nn.Module):
    def __init__(self, inputs=8, neurons=6, outputs=5, kernels=(3, 1), norm=nn.BatchNorm2d, **how):
        super().__init__()
        self.one = nn.Conv2d(inputs, neurons, kernels[0], **how)
        self.norm = norm(neurons)
        self.two = nn.Conv2d(neurons, outputs, kernels[1])

    def forward(self, x):
        return self.two(self.norm(self.one(x)).relu())


class Turned(nn.Module):
    """Two of transformers' Conv1D, whose weights lie the other way round."""

    def __init__(self, inputs=8, neurons=6, outputs=5, **_):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.one, self.two = Conv1D(neurons, inputs), Conv1D(outputs, neurons)
        nn.init.normal_(self.one.bias), nn.init.normal_(self.two.bias)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Plain(nn.Module):
    def __init__(self, inputs=8, neurons=6, outputs=5, **_):
        super().__init__()
        self.one, self.two = nn.Linear(inputs, neurons), nn.Linear(neurons, outputs)
        self.norm = nn.LayerNorm(neurons)

    def forward(self, x):
        return self.two(functional.gelu(self.norm(self.one(x))))


class Deep(nn.Module):
    """Gated blocks with residuals, and an MLP of several hidden layers as head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Gated(6, 4, 6)}) for _ in range(3))
        self.head = MLP([6, 5, 5, 5, 2])

    def forward(self, x):
        for block in self.blocks:
            x = x + block["mlp"](x)
        return self.head(x)


@dataclass(frozen=True)
class Sort:
    make: type[nn.Module]
    firsts: tuple[str, ...]
    second: str
    kind: str
    image: bool = False

    def inputs(self, channels=8, batch=4, dtype=torch.float32):
        shape = (batch, channels, 5, 5) if self.image else (batch, channels)
        return torch.randn(shape).to(dtype)


SORTS = {
    "mlp": Sort(Plain, ("one",), "two", "mlp"),
    "turned": Sort(Turned, ("one",), "two", "mlp"),
    "gated": Sort(Gated, ("gate", "up"), "down", "gated"),
    "fused": Sort(Fused, ("both",), "down", "fused"),
    "conv": Sort(Filters, ("one",), "two", "conv", image=True),
}

EVERY = pytest.mark.parametrize("sort", SORTS.values(), ids=SORTS)


@torch.no_grad()
def roughened(model, decimals=1):
    """Round the weights, so that magnitudes tie and some are zero."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.mul_(3).copy_(parameter.float().round(decimals=decimals))
            parameter.view(-1)[0] = 1.0
    return model


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
