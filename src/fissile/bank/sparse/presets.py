"""The recipe we recommend: the best, or level with it, at all points of the study ``frontier``.

A linear classifier, alone or beside a hidden layer, or a wide hidden layer alone, starts with all
its weights and is pruned gradually by second-order saliency. Which of six settings is best is tried
on held-out samples.
"""

from __future__ import annotations

from typing import NamedTuple

from fissile.bank.sparse.plan import Plan, Prune

__all__ = ["LEAST_HIDDEN", "hidden_for", "is_large", "plans", "within_budget"]

#: More neurons than this are not worth their training while the budget is small.
LEAST_HIDDEN = 128
#: More than this never were.
_MOST_HIDDEN = 1024
_PRUNE = Prune(begin=0.1, end=0.75, saliency="second-order", power=5.0)


class _Setting(NamedTuple):
    times: int  # the usual hidden neurons; 0: the linear classifier is alone
    direct: bool  # with the linear classifier
    lr: float
    decay: float
    dropout: float
    smooth: float


_SMALL = (
    _Setting(1, True, 3e-3, 0.3, 0.0, 0.1),
    _Setting(0, True, 1e-2, 0.3, 0.0, 0.0),
    _Setting(1, True, 1e-2, 0.3, 0.2, 0.0),
    _Setting(0, True, 3e-3, 0.3, 0.0, 0.1),
    _Setting(1, True, 1e-3, 0.3, 0.2, 0.1),
    _Setting(1, True, 3e-3, 0.3, 0.0, 0.0),
)
#: Where all of a linear classifier would not take the budget.
_LARGE = (
    _Setting(4, True, 1e-3, 0.3, 0.0, 0.1),
    _Setting(4, False, 1e-3, 0.3, 0.0, 0.1),
    _Setting(4, True, 1e-3, 0.3, 0.2, 0.0),
    _Setting(4, True, 3e-3, 1.0, 0.0, 0.1),
    _Setting(4, False, 3e-3, 1.0, 0.0, 0.1),
    _Setting(4, False, 3e-3, 1.0, 0.2, 0.1),
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


def plans(budget: int, inputs: int, outputs: int) -> list[Plan]:
    """Return the recipe's six plans for a budget, the one to take without trying first.

    >>> len(plans(5_000, inputs=512, outputs=100))
    6
    """
    hidden = hidden_for(budget, inputs, outputs)
    most = max(hidden, _MOST_HIDDEN)
    return [
        Plan(
            budget,
            min(one.times * hidden, most),
            direct=one.direct,
            prune=_PRUNE,
            lr=one.lr,
            decay=one.decay,
            dropout=one.dropout,
            smooth=one.smooth,
        )
        for one in (_LARGE if is_large(budget, inputs, outputs) else _SMALL)
    ]
