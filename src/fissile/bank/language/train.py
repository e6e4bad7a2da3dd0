"""Training GPTs side by side: the networks of all seeds, in arms whose tensors are alike.

Half-way every network goes on in each arm: with its feed-forward networks, or the bottleneck of its
head, split as they are, with masks that move, or dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.random import noise
from fissile._common.shapes import Int
from fissile.bank.language.gpt import GPT, Shape
from fissile.bank.spec import Arm, Dense, Dynamic, Expand
from fissile.bank.stack import fresh_adam, rebuilt, stacked_modules, tensors_of
from fissile.bank.step import Replay, foreach_adam, guess, network_losses
from fissile.expansion.budget import Allocation
from fissile.expansion.optimizer import Moments
from fissile.expansion.rewire import Rewire
from fissile.layers import SparseLinear


class Text(NamedTuple):
    """What is learned from and what is tested on, as the numbers of its characters."""

    train: Int[Tensor, " characters"]
    test: Int[Tensor, " characters"]
    characters: int


class Trained(NamedTuple):
    """What became of one network: its numbers after every epoch, on the text that tests it."""

    accuracy: list[float]
    nats: list[float]
    nonzeros: int  # weights of linear layers


@dataclass
class Networks:
    """A stack, its Adam, the seed of each network, and how its masks move, if they do."""

    model: GPT
    adam: Moments
    seeds: Int[Tensor, " networks"]
    moves: Dynamic | None = None

    @classmethod
    def of(cls, shape: Shape, seeds: Sequence[int], device: str = "cpu") -> Networks:
        """Return networks with the weights that their seeds give them."""
        models = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                models.append(GPT(shape))
        model = stacked_modules(models).to(device)
        assert isinstance(model, GPT)
        return cls(model, fresh_adam(model, len(seeds)), torch.tensor(seeds, device=device))

    def branch(self, arm: Arm, allocation: str | Allocation = "magnitude") -> Networks:
        """Return the networks as an arm makes them; these here stay as they are."""
        new = joined([self])
        if isinstance(arm, Expand | Dynamic):
            new.model.split(arm, allocation, self.seeds.cpu(), new.adam)
            new.moves = arm if isinstance(arm, Dynamic) else None
        if not isinstance(arm, Dense | Expand | Dynamic) or getattr(arm, "grow", "") == "gradient":
            raise FissileError(f"a GPT cannot be trained as {arm}; split it, or leave it dense")
        if isinstance(arm, Expand) and arm.moments == "fresh":
            new.adam = fresh_adam(new.model, len(new.seeds))
        return new

    def nonzeros(self) -> list[int]:
        """Count the weights of linear layers in each network."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear | SparseLinear)]
        there = [m.pattern() if isinstance(m, SparseLinear) else m.weight != 0 for m in layers]
        counts: list[int] = torch.stack([one.sum((-2, -1)) for one in there]).sum(0).tolist()
        return counts


def joined(parts: Sequence[Networks]) -> Networks:
    """Return networks of one shape as one stack, with tensors of its own."""
    states = [dict(tensors_of(part.model)) for part in parts]
    model = rebuilt(parts[0].model, {n: torch.cat([s[n] for s in states]) for n in states[0]})
    assert isinstance(model, GPT)
    adam, olds = Moments.of(model.parameters()), [list(part.model.parameters()) for part in parts]
    for new, *same in zip(model.parameters(), *olds, strict=True):
        held = [part.adam.state[old] for part, old in zip(parts, same, strict=True)]
        adam.state[new] = {key: torch.cat([one[key] for one in held]) for key in held[0]}
    return replace(parts[0], model=model, adam=adam, seeds=torch.cat([p.seeds for p in parts]))


def train(
    shape: Shape,
    seeds: Sequence[int],
    text: Text,
    arms: Mapping[str, tuple[Arm, str]],
    *,
    lr: float = 1e-3,
    batch: int = 32,
    steps: int = 100,
    warm_up: int = 20,
    fine_tune: int = 20,
    device: str = "cpu",
    progress: Callable[[float], object] | None = None,
) -> dict[tuple[int, str], Trained]:
    """Train networks, split half-way, in every arm: the seed and the arm's name give the result.

    >>> arms = {"dense": (Dense(), "magnitude"), "split": (Expand(2), "layer")}
    >>> train(Shape(65, 16), range(5), text, arms)[0, "split"].nats[-1]

    ``steps`` make an epoch. The arms of a seed share the warm-up and see the same texts.
    """
    text = text._replace(train=text.train.to(device), test=text.test.to(device))
    how = lr, batch, steps, shape.context
    left = len(seeds) * (warm_up + len(arms) * fine_tune)
    done = 0

    def fit(networks: Networks, first: int, epochs: int) -> list[list[tuple[float, float]]]:
        nonlocal done
        curves: list[list[tuple[float, float]]] = [[] for _ in networks.seeds]
        for scores in _fitted(networks, text, first, epochs, *how):
            for curve, score in zip(curves, scores, strict=True):
                curve.append(score)
            done += len(curves)
            if progress is not None:
                progress(done / left)
        return curves

    warm = Networks.of(shape, seeds, device)
    before, found = fit(warm, 0, warm_up), dict[tuple[int, str], Trained]()
    for names in _alike(arms):
        networks = joined([warm.branch(*arms[name]) for name in names])
        curves, counts = fit(networks, warm_up, fine_tune), networks.nonzeros()
        places = [(row, name) for name in names for row in range(len(seeds))]
        for (row, name), curve, count in zip(places, curves, counts, strict=True):
            whole = [*before[row], *curve]
            found[seeds[row], name] = Trained([a for a, _ in whole], [n for _, n in whole], count)
    return found


def _alike(arms: Mapping[str, tuple[Arm, str]]) -> list[list[str]]:
    """Return the names of arms that can be one stack: their tensors and moves are alike."""
    groups: dict[object, list[str]] = {}
    for name, (arm, _) in arms.items():
        moves = (arm.every, arm.fraction, arm.grow) if isinstance(arm, Dynamic) else None
        groups.setdefault((getattr(arm, "alpha", 1), moves), []).append(name)
    return list(groups.values())


def _fitted(
    networks: Networks, text: Text, first: int, epochs: int, lr: float, batch: int, steps: int,
    context: int,
) -> Iterator[list[tuple[float, float]]]:  # fmt: skip
    """Train a stack in place; yield the accuracy and the nats of each network after every epoch."""
    model, adam, seeds, moves = networks.model, networks.adam, networks.seeds, networks.moves
    device, parameters = seeds.device, list[Tensor](model.parameters())
    states = [adam.state[parameter] for parameter in parameters]
    rates = torch.full((len(seeds),), lr, device=device)
    span = torch.arange(context + 1, device=device)
    starts = torch.zeros(len(seeds), steps, batch, dtype=torch.long, device=device)
    now = torch.zeros(1, dtype=torch.long, device=device)

    def step() -> None:
        rows = text.train[starts.index_select(1, now).squeeze(1).unsqueeze(-1) + span]
        with _half(device):
            logits = model(rows[..., :-1])
        loss = network_losses(logits.float(), rows[..., 1:].flatten(-2)).sum()
        foreach_adam(parameters, list(torch.autograd.grad(loss, parameters)), states, rates)
        now.add_(1)

    again = Replay(step, eager=3) if device.type == "cuda" else step
    rewire = None
    if moves is not None:
        how = {"every": moves.every, "fraction": moves.fraction, "until": epochs * steps}
        rewire = Rewire(model, adam, **how, seed=seeds)  # type: ignore[arg-type]
    for epoch in range(first, first + epochs):
        # Drawn from the seed and the epoch: the arms of a seed see the same texts.
        drawn = noise(seeds, epoch, steps, batch) * (len(text.train) - context)
        starts.copy_(drawn.long())
        now.zero_()
        for _ in range(steps):
            again()
            if rewire is not None:
                rewire.step()
        yield _scores(model, len(seeds), text, context, 2 * batch)


@torch.no_grad()
def _scores(
    model: GPT, networks: int, text: Text, context: int, texts: int
) -> list[tuple[float, float]]:
    """Return the accuracy and the mean nats of each network over the whole text for testing."""
    count = (len(text.test) - 1) // context
    x, y = (text.test[at : at + count * context].view(count, context) for at in (0, 1))
    sums = torch.zeros(2, networks, dtype=torch.float64, device=text.test.device)
    for part, wanted in zip(x.split(texts), y.flatten().split(texts * context), strict=True):
        with _half(part.device):
            logits = model(part.expand(networks, -1, -1)).float()
        wanted = wanted.expand(networks, -1)
        sums[0] += (guess(logits) == wanted).sum(-1)
        sums[1] += network_losses(logits, wanted) * wanted.shape[-1]
    return [(a, n) for a, n in (sums / (count * context)).T.tolist()]


def _half(device: torch.device) -> AbstractContextManager[object]:
    """Compute products in bfloat16 on a GPU; weights, norms and sums stay in single precision."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
