"""One network in training, some epochs at a time: on the bank, or, with weights, in a loop."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from fissile._common.shapes import Float, Int
from fissile.bank import Bank, Data, Expand, Spec
from fissile.bank.loop import Recipe, batches, penalty
from fissile.expansion.expand import expand
from fissile.expansion.split import Split
from fissile.layers import SparseLinear

__all__ = ["Curves", "Network", "Task", "Trainer", "alone", "is_split", "losses", "make"]

#: Held for what threads share: torch's global generator, which first weights are drawn from, and
#: the standard output, which is silenced while a network is split.
alone = threading.Lock()


class Network(NamedTuple):
    """A network and the Adam that goes on with it."""

    module: nn.Module
    adam: Adam


class Curves(NamedTuple):
    """The loss of the training set and the accuracy of the test set after some epochs."""

    loss: list[float]
    score: list[float]


class Task(NamedTuple):
    """What a network learns, and how: everything but its seed."""

    sizes: Sequence[int]
    data: Data
    recipe: Recipe
    weights: Float[Tensor, " classes"] | None = None
    device: str = "cpu"


class Trainer(ABC):
    """A network in training."""

    @abstractmethod
    def train(self, epochs: int) -> Curves:
        """Train for some epochs; a network that diverges is frozen, and its curves are NaN."""

    @abstractmethod
    def split(self, alpha: int, split: Split) -> None:
        """Split every neuron; the number of non-zero parameters stays, biases counted."""

    @abstractmethod
    def take(self) -> Network:
        """Take a copy of the network out."""

    @abstractmethod
    def put(self, network: Network) -> None:
        """Go on with a copy of another network of the same task."""


def make(task: Task, seed: int) -> Trainer:
    """Make a fresh network of a task, with the weights and the order of batches of its seed.

    >>> trainer = make(Task([64, 25, 10], data, Recipe()), seed=0)
    >>> trainer.train(25)  # the warm-up
    >>> trainer.split(4, Random())
    >>> trainer.train(25)
    """
    plain = _Banked(task, seed)
    return plain if task.weights is None else _Weighted(task, task.weights, seed, plain.take())


def is_split(module: nn.Module) -> bool:
    """Tell whether a network's neurons have been split."""
    return any(isinstance(layer, SparseLinear) for layer in module.modules())


class _Banked(Trainer):
    """A bank of one network: on a processor a compiled kernel trains it."""

    def __init__(self, task: Task, seed: int) -> None:
        spec = Spec(list(task.sizes), task.data, seed=seed, recipe=task.recipe)
        with alone:
            self._bank = Bank([spec], device=task.device)
        self._epoch = 0

    def train(self, epochs: int) -> Curves:
        self._epoch += epochs
        self._bank.train(until=self._epoch)
        curves = self._bank.loss, self._bank.accuracy
        return Curves(*(curve[0, -epochs:].tolist() for curve in curves))

    def split(self, alpha: int, split: Split) -> None:
        with alone:
            self._bank = self._bank.branch({"split": Expand(alpha, split, budget="all")})

    def take(self) -> Network:
        return Network(*self._bank.take(0))

    def put(self, network: Network) -> None:
        self._bank.put(0, *network)


class _Weighted(Trainer):
    """A plain loop, for samples whose losses weigh differently; the bank knows no weights."""

    def __init__(self, task: Task, weights: Tensor, seed: int, network: Network) -> None:
        self._task, self._seed, self._epoch = task, seed, 0
        data, device = task.data, task.device
        self._train = torch.as_tensor(data.x).to(device), data.y.to(device)
        self._test = torch.as_tensor(data.x_test).to(device), data.y_test.to(device)
        self._weights = weights.to(device)
        self._alive = True
        self._module, self._adam = _copied(network, device)

    def train(self, epochs: int) -> Curves:
        curves = Curves([], [])
        for _ in range(epochs):
            kept, loss = self.take(), self._pass() if self._alive else float("nan")
            self._alive = self._alive and np.isfinite(loss) and _finite(self._module)
            if not self._alive:
                self.put(kept)
            self._epoch += 1
            score = self._score()
            curves.loss.append(loss if self._alive else float("nan"))
            curves.score.append(score if self._alive else float("nan"))
        return curves

    def _pass(self) -> float:
        """Train one epoch and return the mean loss of its samples, penalties apart."""
        (x, y), recipe = self._train, self._task.recipe
        self._module.train()
        total = 0.0
        for rows in batches(len(x), recipe.batch, self._seed, self._epoch):
            rows = rows.to(x.device)
            each = losses(self._module(x[rows]), y[rows]) * self._weights[y[rows]]
            loss = each.mean() + penalty(self._module, recipe)
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
            total += float(each.detach().sum())
        return total / len(x)

    @torch.no_grad()
    def _score(self) -> float:
        """Return the weighted share of test samples that are classified rightly."""
        x, y = self._test
        found = self._module.eval()(x)
        guess = (found.squeeze(-1) > 0).long() if found.shape[-1] == 1 else found.argmax(-1)
        weights = self._weights[y].double()
        return float((weights * (guess == y)).sum() / weights.sum())

    def split(self, alpha: int, split: Split) -> None:
        with alone:
            self._module = expand(
                self._module, alpha, split, seed=self._seed, budget="all", optimizer=self._adam
            )

    def take(self) -> Network:
        return _copied(Network(self._module, self._adam), "cpu")

    def put(self, network: Network) -> None:
        self._module, self._adam = _copied(network, self._task.device)
        for group in self._adam.param_groups:
            group["lr"] = self._task.recipe.lr


def _copied(network: Network, device: str) -> Network:
    module, adam = copy.deepcopy(network)
    module.to(device)
    for state in adam.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(device)
    return Network(module, adam)


def losses(
    logits: Float[Tensor, "batch outputs"], y: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return the cross-entropy of every sample; one output tells two classes apart."""
    if logits.shape[-1] == 1:
        return functional.binary_cross_entropy_with_logits(
            logits.squeeze(-1), y.to(logits.dtype), reduction="none"
        )
    return functional.cross_entropy(logits, y, reduction="none")


def _finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
