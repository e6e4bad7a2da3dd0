"""Small models wired in every way, and what is found in them."""

from torch import nn
from torch.nn import functional

from fissile.discovery import discover


class Net(nn.Module):
    """A module whose forward is the function given, with its layers as attributes."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def pair(run, **more):
    return Net(run, fc1=nn.Linear(4, 6), fc2=nn.Linear(6, 3), **more)


def filters(run, **more):
    return Net(run, c1=nn.Conv2d(3, 8, 3), c2=nn.Conv2d(8, 4, 3), **more)


def places(model, inputs=None):
    return [(one.kind, one.firsts, one.second) for one in discover(model, inputs)]


def why(model, name, inputs=None):
    (reason,) = {one.reason for one in discover(model, inputs).refusals if one.name == name}
    return reason


def halved(way):
    def run(m, x):
        one, other = way(m.fc1(x))
        return m.fc2(functional.silu(one) * other)

    return Net(run, fc1=nn.Linear(4, 12), fc2=nn.Linear(6, 3))


class Unreadable(nn.Module):
    """Layers in a row, behind code that cannot be traced."""

    def __init__(self, wrong=False):
        super().__init__()
        self.fc1, self.norm, self.act = nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU()
        self.fc2, self.wrong = nn.Linear(6, 4), wrong

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        h = self.act(self.norm(self.fc1(x)))
        return self.fc2(h.cumsum(-1) if self.wrong else h)
