"""The paper's recipe: warm-up, split, fine-tuning, each phase until its best epoch.

A network trains on the bank or, if the classes have weights, in a plain loop.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from sklearn.utils.parallel import Parallel, delayed
from torch import Tensor, nn
from torch.optim import Adam

from fissile._common.errors import FissileError
from fissile._common.shapes import Float
from fissile.bank import Bank, Data, Expand, Spec
from fissile.bank.loop import Recipe, batches, penalty
from fissile.bank.step import guess
from fissile.expansion.expand import expand
from fissile.expansion.split import Split
from fissile.sklearn.search import dense_size, held_out, losses, sensible

#: The hidden neurons where neither a width nor a budget is given, as in MLPClassifier.
_DEFAULT = 100
#: Held for what threads share: torch's global generator, which first weights are drawn from, and
#: the standard output, which is silenced while a network is split.
_alone = threading.Lock()


def width(nonzeros: int | None, hidden: int | None, inputs: int, outputs: int) -> int:
    """Return the hidden neurons: as given, or as many as the budget allows.

    >>> width(20_000, None, inputs=512, outputs=100)
    32
    """
    if nonzeros is None:
        return _DEFAULT if hidden is None else sensible("hidden", hidden, inputs, outputs)
    budget = sensible("nonzeros", nonzeros, inputs, outputs)
    least = dense_size(inputs, 1, outputs)
    if budget < least:
        raise FissileError(
            f"nonzeros={budget} is too small a budget for {inputs} inputs and {outputs} outputs: "
            f"one hidden neuron takes {least} parameters; give at least {least}"
        )
    return (budget - outputs) // (inputs + 1 + outputs)


def to_data(x: NDArray[Any], y: NDArray[Any], share: float | None = None, seed: int = 0) -> Data:
    """Return the samples as the bank takes them, a share of every class as the test set.

    Without a share nobody looks at the test set, and it is a single sample.
    """
    x = x if x.flags.writeable else x.copy()
    arrays = (x, y, x[:1], y[:1])
    if share is not None:
        parts = held_out(x, y, share, seed)
        arrays = (parts.x, parts.y, parts.x_test, parts.y_test)
    return Data(*map(torch.from_numpy, arrays))


# --- one network


class Network(NamedTuple):
    """A network and its Adam."""

    module: nn.Module
    adam: Adam


class Epoch(NamedTuple):
    """The loss of the training set and the accuracy of the test set after an epoch."""

    loss: float
    score: float


class Task(NamedTuple):
    """Everything that decides a training but its seed."""

    sizes: Sequence[int]
    data: Data
    recipe: Recipe
    weights: Float[Tensor, " classes"] | None = None
    device: str = "cpu"


def make(task: Task, seed: int) -> Trainer:
    """Make a fresh network of a task, with the weights and the order of batches of its seed.

    >>> trainer = make(Task([64, 25, 10], data, Recipe()), seed=0)
    >>> trainer.train(25)  # the warm-up
    >>> trainer.split(4, Random())
    >>> trainer.train(25)
    """
    plain = BankTrainer(task, seed)
    if task.weights is None:
        return plain
    return WeightedTrainer(task, task.weights, seed, plain.take())


class BankTrainer:
    """A bank of one network: on a processor a compiled kernel trains it."""

    def __init__(self, task: Task, seed: int) -> None:
        spec = Spec(list(task.sizes), task.data, seed=seed, recipe=task.recipe)
        with _alone:
            self._bank = Bank([spec], device=task.device)
        self._epoch = 0

    def train(self, epochs: int) -> list[Epoch]:
        """Train for some epochs; return those before the network diverged, if it did."""
        self._epoch += epochs
        self._bank.train(until=self._epoch)
        losses, scores = (c[0, -epochs:].tolist() for c in (self._bank.loss, self._bank.accuracy))
        finished = map(Epoch, losses, scores)
        return [epoch for epoch in finished if math.isfinite(epoch.loss)]

    def split(self, alpha: int, split: Split) -> None:
        """Split every neuron; the number of non-zero parameters stays, biases counted."""
        with _alone:
            self._bank = self._bank.branch({"split": Expand(alpha, split, budget="all")})

    def take(self) -> Network:
        """Return a copy of the network."""
        return Network(*self._bank.take(0))

    def put(self, network: Network) -> None:
        """Go on with a copy of another network of the same task."""
        self._bank.put(0, *network)


class WeightedTrainer:
    """A plain loop with the same methods, because the bank knows no weights of samples."""

    def __init__(self, task: Task, weights: Tensor, seed: int, network: Network) -> None:
        self._task, self._seed, self._epoch = task, seed, 0
        data, device = task.data, task.device
        self._train = torch.as_tensor(data.x).to(device), data.y.to(device)
        self._test = torch.as_tensor(data.x_test).to(device), data.y_test.to(device)
        self._weights = weights.to(device)
        self._alive = True
        self._module, self._adam = _copied(network, device)

    def train(self, epochs: int) -> list[Epoch]:
        finished: list[Epoch] = []
        while self._alive and len(finished) < epochs:
            kept, loss = self.take(), self._pass()
            finite = [bool(p.isfinite().all()) for p in self._module.parameters()]
            self._alive = math.isfinite(loss) and all(finite)
            self._epoch += 1
            if self._alive:
                finished.append(Epoch(loss, self._score()))
            else:
                self.put(kept)
        return finished

    def _pass(self) -> float:
        """Train one epoch and return the mean loss of its samples, without penalties."""
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
        """Return the weighted accuracy of the test set."""
        x, y = self._test
        weights = self._weights[y].double()
        return float((weights * (guess(self._module.eval()(x)) == y)).sum() / weights.sum())

    def split(self, alpha: int, split: Split) -> None:
        with _alone:
            self._module = expand(
                self._module, alpha, split, seed=self._seed, budget="all", optimizer=self._adam
            )

    def take(self) -> Network:
        return _copied(Network(self._module, self._adam), "cpu")

    def put(self, network: Network) -> None:
        self._module, self._adam = _copied(network, self._task.device)
        for group in self._adam.param_groups:
            group["lr"] = self._task.recipe.lr


Trainer = BankTrainer | WeightedTrainer


def _copied(network: Network, device: str) -> Network:
    module, adam = copy.deepcopy(network)
    module.to(device)
    for state in adam.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(device)
    return Network(module, adam)


# --- both phases


@dataclass
class TrainedNetwork:
    """A network and its epochs; of several, the one of the highest quality is kept."""

    epochs: list[Epoch] = field(default_factory=list)
    quality: float = -math.inf
    diverged: bool = False
    network: Network = None  # type: ignore[assignment]  # there at the end

    def train(self, trainer: Trainer, epochs: int) -> list[Epoch]:
        """Train some epochs more, and return them; a diverged network finishes fewer."""
        new = trainer.train(epochs)
        self.diverged |= len(new) < epochs
        self.epochs += new
        return new


@dataclass(frozen=True)
class TwoPhase:
    """The epochs of both phases, the split between them, and when to stop.

    >>> TwoPhase(warm_up=25, fine_tune=25, alpha=4, split=Random()).run(trainer).network

    With ``patience``, a phase ends when that many epochs in a row were not its best. It goes on
    from the network of its best epoch.
    """

    warm_up: int
    fine_tune: int
    alpha: int
    split: Split
    patience: int | None = None
    verbose: bool = False

    def run(self, trainer: Trainer) -> TrainedNetwork:
        """Train a network from its first weights to the end."""
        trained = TrainedNetwork()
        self._phase(trainer, "warm-up", self.warm_up, trained)
        trainer.split(self.alpha, self.split)
        self._phase(trainer, "fine-tuning", self.fine_tune, trained)
        trained.network = trainer.take()
        return trained

    def best(self, trainers: Sequence[Trainer], jobs: int | None = None) -> TrainedNetwork:
        """Train several networks, ``jobs`` at a time, and return the best."""
        networks = Parallel(jobs, prefer="threads")(delayed(self.run)(each) for each in trainers)
        return max(networks, key=lambda trained: trained.quality)  # type: ignore[no-any-return]

    def _phase(self, trainer: Trainer, name: str, epochs: int, trained: TrainedNetwork) -> None:
        # One call trains all epochs, unless somebody looks at each of them.
        step = epochs if self.patience is None and not self.verbose else 1
        best, kept, since = -math.inf, None, 0
        for epoch in range(0, epochs, max(1, step)):
            new = trained.train(trainer, step)
            score = new[-1].score if new else math.nan
            if self.verbose and new:
                held = "" if self.patience is None else f", held-out accuracy {score:.4f}"
                with _alone:
                    print(f"{name} epoch {epoch + 1}: loss {new[-1].loss:.4f}{held}")
            if self.patience is None:
                continue
            if score > best:
                best, kept, since = score, trainer.take(), 0
            elif (since := since + 1) >= self.patience:
                break
        if kept is not None:
            trainer.put(kept)
            trained.quality = best
        elif trained.epochs:
            trained.quality = -trained.epochs[-1].loss
