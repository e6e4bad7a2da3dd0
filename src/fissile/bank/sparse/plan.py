"""Plans: how a sparse network of one hidden layer is made, trained and cut down to its budget.

Every way to spend a budget of non-zeros is a plan: dense, split, sparse from the start with masks
that stay or move, wide and then pruned, linear. :func:`recommended_plans` has our own six, the best
or level with the best at all points of the study ``frontier``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fissile._common.errors import FissileError, whole

Start = Literal["dense", "uniform", "erdos-renyi"]
Saliency = Literal["magnitude", "second-order"]
Schedule = Literal["cosine", "constant", "again"]
Activation = Literal["relu", "none"]
Grow = Literal["random", "gradient"]


def _one_of(name: str, value: object, known: Any) -> None:
    if value not in get_args(known):
        raise FissileError(f"{name}={value!r} is not one of {', '.join(get_args(known))}")


@dataclass(frozen=True)
class SplitAt:
    """Split every neuron into ``alpha`` children at a share of the training.

    >>> SplitAt(4)  # as the paper does
    >>> SplitAt(2, at=0.25, allocation="saliency")

    ``allocation`` is how the budget is shared afterwards, as :func:`fissile.expand` understands it;
    ``scale`` multiplies the copied columns.
    """

    alpha: int
    at: float = 0.5
    allocation: str = "magnitude"
    split: str = "random"
    scale: float = 1.0

    def __post_init__(self) -> None:
        whole("alpha", self.alpha, least=1)
        if not 0 <= self.at <= 1:
            raise FissileError(f"a split at={self.at!r} is not within the training, 0 to 1")


@dataclass(frozen=True)
class Prune:
    """Cut down to the budget: gradually, from one share of the training to another, or at once.

    >>> Prune(0.2, 0.75, "second-order")
    >>> Prune(0.5, 0.5)  # one shot

    The count falls along a cubic (Zhu and Gupta, 2017). What goes first has the smallest magnitude,
    or the smallest second-order saliency: w² times the mean square of its gradient, which Adam
    keeps anyway.
    """

    begin: float = 0.2
    end: float = 0.75
    saliency: Saliency = "magnitude"
    power: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= 1 or not self.end:
            raise FissileError(
                f"pruning from {self.begin!r} to {self.end!r} is not within the training; give "
                "0 <= begin <= end <= 1, and an end above 0"
            )
        _one_of("saliency", self.saliency, Saliency)

    def left(self, share: float, before: float) -> float | None:
        """Return how much of the surplus may stay now, or None where nothing is to be cut."""
        if share < self.begin or before >= self.end:
            return None
        if share >= self.end:
            return 0.0
        done = (share - self.begin) / (self.end - self.begin)
        return math.pow(1 - done, self.power)


@dataclass(frozen=True)
class Rewire:
    """Move masks: a share of each layer's weights, falling to none along a cosine.

    >>> Plan(2_000, hidden=32, start="erdos-renyi", rewire=Rewire(grow="gradient"))
    """

    fraction: float = 0.3
    grow: Grow = "random"
    until: float = 0.75

    def __post_init__(self) -> None:
        _one_of("grow", self.grow, Grow)
        if not 0 < self.fraction <= 1:
            raise FissileError(f"fraction={self.fraction!r} is not a share above 0 and at most 1")


@dataclass(frozen=True)
class Plan:
    """How one network is made and trained.

    >>> Plan(budget=5_000, hidden=128, direct=True, prune=Prune(saliency="second-order"))

    Args:
        budget: the non-zeros that may be left in the end, biases included.
        hidden: neurons at first; 0 for a linear classifier.
        direct: the outputs also see the inputs, past the hidden layer.
        activation: ``"relu"``, or ``"none"`` for a factorised linear classifier, which needs no
            hidden biases.
        start: every weight at first, or as many as the budget has, dealt to the layers by their
            sizes or by Erdos and Renyi's rule (Mocanu et al., 2018).
        splits, prune, rewire: what happens to the weights on the way.
        l1: penalise the absolute direct weights, as strongly as leaves the budget, for the first
            half of the training; the second refits what is left.
        lr, schedule: Adam's rate: constant, falling along a cosine, or falling again after each
            split.
        decay: of weights, at every step, as a share of the rate (AdamW).
        dropout: the share of inputs that a training step does not see.
        smooth: the share of a label that is spread over all classes.
    """

    budget: int
    hidden: int = 0
    direct: bool = False
    activation: Activation = "relu"
    start: Start = "dense"
    splits: tuple[SplitAt, ...] = ()
    prune: Prune | None = None
    rewire: Rewire | None = None
    l1: bool = False
    lr: float = 3e-3
    schedule: Schedule = "cosine"
    decay: float = 0.0
    dropout: float = 0.0
    smooth: float = 0.0

    def __post_init__(self) -> None:
        whole("budget", self.budget, least=1)
        whole("hidden", self.hidden, least=0)
        if not self.hidden and not self.direct:
            raise FissileError("a plan needs hidden neurons, direct weights, or both")
        _one_of("start", self.start, Start)
        _one_of("activation", self.activation, Activation)
        _one_of("schedule", self.schedule, Schedule)
        for name in ("dropout", "smooth"):
            if not 0 <= getattr(self, name) < 1:
                raise FissileError(f"{name}={getattr(self, name)!r} is not a share below 1")
        for name in ("lr", "decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise FissileError(f"{name}={getattr(self, name)!r} must be 0 or more")
        if self.l1 and (self.hidden or self.prune):
            raise FissileError("l1 is for linear plans, and cuts down to the budget by itself")
        if self.splits and not self.hidden:
            raise FissileError("there are no neurons to split: give hidden=")

    @property
    def bias(self) -> bool:
        """Whether hidden neurons have biases: without an activation they would do nothing."""
        return self.hidden > 0 and self.activation == "relu"

    def weights(self, inputs: int, outputs: int) -> int:
        """Count the places for weights at the widest, whether there are weights or not.

        >>> Plan(100, hidden=8, direct=True).weights(inputs=16, outputs=4)
        224
        """
        hidden = self.hidden * math.prod(split.alpha for split in self.splits)
        return hidden * (inputs + outputs) + self.direct * inputs * outputs

    def shape(self) -> Hashable:
        """Return what plans must share to be trained as one stack."""
        return self.hidden, self.direct, self.activation, self.splits, self.l1, self.dropout

    def rate(self, share: float) -> float:
        """Return Adam's rate at a share of the training.

        >>> Plan(100, 8, lr=1e-2).rate(0.5)
        0.005
        """
        if self.schedule == "constant":
            return self.lr
        begin, end = 0.0, 1.0
        if self.schedule == "again":
            times = [0.0, *(split.at for split in self.splits), 1.0]
            begin = max(time for time in times[:-1] if time <= share)
            end = min(time for time in times if time > share) if share < 1 else 1.0
        return self.lr * (1 + math.cos(math.pi * (share - begin) / (end - begin or 1.0))) / 2


# --- the plans we recommend: start with all weights, prune gradually by second-order saliency


#: More neurons than this are not worth their training while the budget is small.
LEAST_HIDDEN = 128
#: More than this never were.
_MOST_HIDDEN = 1024
_PRUNE = Prune(begin=0.1, end=0.75, saliency="second-order", power=5.0)

#: Times the usual hidden neurons, with a linear classifier or not, lr, decay, dropout, smooth.
_SMALL = (
    (1, True, 3e-3, 0.3, 0.0, 0.1),
    (0, True, 1e-2, 0.3, 0.0, 0.0),
    (1, True, 1e-2, 0.3, 0.2, 0.0),
    (0, True, 3e-3, 0.3, 0.0, 0.1),
    (1, True, 1e-3, 0.3, 0.2, 0.1),
    (1, True, 3e-3, 0.3, 0.0, 0.0),
)
#: Where all of a linear classifier would not take the budget.
_LARGE = (
    (4, True, 1e-3, 0.3, 0.0, 0.1),
    (4, False, 1e-3, 0.3, 0.0, 0.1),
    (4, True, 1e-3, 0.3, 0.2, 0.0),
    (4, True, 3e-3, 1.0, 0.0, 0.1),
    (4, False, 3e-3, 1.0, 0.0, 0.1),
    (4, False, 3e-3, 1.0, 0.2, 0.1),
)


def within_budget(budget: int, inputs: int, outputs: int) -> int:
    """Return how wide a dense network of one hidden layer may be, biases counted.

    >>> within_budget(20_000, inputs=512, outputs=100)
    32
    """
    return max(0, (budget - outputs) // (inputs + 1 + outputs))


def hidden_for(budget: int, inputs: int, outputs: int) -> int:
    """Return the neurons that the recipe begins with: a power of two, at least 128.

    >>> hidden_for(100_000, inputs=512, outputs=100)
    256
    """
    wanted = max(LEAST_HIDDEN, 1.5 * within_budget(budget, inputs, outputs))
    return 1 << (int(wanted) - 1).bit_length()


def is_large(budget: int, inputs: int, outputs: int) -> bool:
    """Return whether all of a linear classifier is within the budget.

    >>> is_large(100_000, inputs=512, outputs=100)
    True
    """
    return budget >= outputs * (inputs + 1)


def recommended_plans(budget: int, inputs: int, outputs: int) -> list[Plan]:
    """Return the six plans we recommend for a budget; the first is the one to take untried.

    >>> len(recommended_plans(5_000, inputs=512, outputs=100))
    6
    """
    hidden = hidden_for(budget, inputs, outputs)
    most = max(hidden, _MOST_HIDDEN)
    settings = _LARGE if is_large(budget, inputs, outputs) else _SMALL
    return [
        Plan(
            budget, min(times * hidden, most), direct, prune=_PRUNE,
            lr=lr, decay=decay, dropout=dropout, smooth=smooth,
        )
        for times, direct, lr, decay, dropout, smooth in settings
    ]  # fmt: skip
