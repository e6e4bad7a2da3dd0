"""The recipe we recommend: where a budget of non-zeros buys most, as the study ``frontier`` found.

A linear classifier, alone or beside a hidden layer, starts with all its weights and is pruned
gradually by second-order saliency. Which of six settings is best is tried on held-out samples.
"""

from __future__ import annotations

from fissile.sparse.plan import Plan, Prune

__all__ = ["LEAST_HIDDEN", "hidden_for", "plans", "within_budget"]

#: More neurons than this are not worth their training while the budget is small.
LEAST_HIDDEN = 128
_PRUNE = Prune(begin=0.1, end=0.75, saliency="second-order", power=5.0)
#: Beside a hidden layer or alone; rate, decay, dropout of inputs, smoothing of labels.
_SETTINGS = (
    (True, 3e-3, 0.3, 0.0, 0.1),
    (False, 1e-2, 0.3, 0.0, 0.0),
    (True, 1e-2, 0.3, 0.2, 0.0),
    (False, 3e-3, 0.3, 0.0, 0.1),
    (True, 1e-3, 0.3, 0.2, 0.1),
    (True, 3e-3, 0.3, 0.0, 0.0),
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


def plans(budget: int, inputs: int, outputs: int) -> list[Plan]:
    """Return the recipe's six plans for a budget, the one to take without trying first.

    >>> len(plans(5_000, inputs=512, outputs=100))
    6
    """
    hidden = hidden_for(budget, inputs, outputs)
    return [
        Plan(
            budget,
            hidden if beside else 0,
            direct=True,
            prune=_PRUNE,
            lr=lr,
            decay=decay,
            dropout=dropout,
            smooth=smooth,
        )
        for beside, lr, decay, dropout, smooth in _SETTINGS
    ]
