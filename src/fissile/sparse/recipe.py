"""The recipe we recommend: the best, or level with it, at most points of the study ``frontier``.

A linear classifier, alone or beside a hidden layer, starts with all its weights and is pruned
gradually by second-order saliency. Which of six settings is best is tried on held-out samples.
"""

from __future__ import annotations

from fissile.sparse.plan import Plan, Prune

__all__ = ["LEAST_HIDDEN", "hidden_for", "plans", "within_budget"]

#: More neurons than this are not worth their training while the budget is small.
LEAST_HIDDEN = 128
_PRUNE = Prune(begin=0.1, end=0.75, saliency="second-order", power=5.0)
#: How many times the usual hidden neurons beside the linear classifier (0: it is alone); rate,
#: dropout of inputs, smoothing of labels. All decay by the same share.
_DECAY = 0.3
_SETTINGS = (
    (1, 3e-3, 0.0, 0.1),
    (0, 1e-2, 0.0, 0.0),
    (1, 1e-2, 0.2, 0.0),
    (0, 3e-3, 0.0, 0.1),
    (1, 1e-3, 0.2, 0.1),
    (1, 3e-3, 0.0, 0.0),
)
#: Instead of the linear classifier alone, where all of it would not take the budget.
_LARGE = {1: (4, 1e-3, 0.2, 0.1), 3: (1, 3e-3, 0.2, 0.1)}


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


def plans(budget: int, inputs: int, outputs: int) -> list[Plan]:
    """Return the recipe's six plans for a budget, the one to take without trying first.

    >>> len(plans(5_000, inputs=512, outputs=100))
    6
    """
    hidden = hidden_for(budget, inputs, outputs)
    large = _LARGE if budget >= outputs * (inputs + 1) else {}
    return [
        Plan(
            budget,
            times * hidden,
            direct=True,
            prune=_PRUNE,
            lr=lr,
            decay=_DECAY,
            dropout=dropout,
            smooth=smooth,
        )
        for times, lr, dropout, smooth in (large.get(i, one) for i, one in enumerate(_SETTINGS))
    ]
