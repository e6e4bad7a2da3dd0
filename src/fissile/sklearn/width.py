"""How wide a network of one hidden layer may be within a budget of non-zero parameters.

Everything that learns is counted, biases too. ``fissile.expand(..., budget="all")`` keeps this
number: the children's additional biases are paid for with weights.
"""

from __future__ import annotations

from fissile._common.errors import FissileError, whole

__all__ = ["DEFAULT", "budget_for", "count", "outputs_for", "width"]

#: The hidden neurons of a network of which neither width nor budget is given, as MLPClassifier has.
DEFAULT = 100


def outputs_for(classes: int) -> int:
    """Return how many outputs tell the classes apart: one for two, else one each."""
    return 1 if classes == 2 else classes


def count(inputs: int, hidden: int, outputs: int) -> int:
    """Count the parameters of ``MLP([inputs, hidden, outputs])``, biases included.

    >>> count(64, 25, 10)
    1885
    """
    return hidden * (inputs + 1) + outputs * (hidden + 1)


def width(nonzeros: int | None, hidden: int | None, inputs: int, outputs: int) -> int:
    """Return the hidden neurons: as given, or as many as the budget allows.

    >>> width(20_000, None, inputs=512, outputs=100)
    32
    """
    _check_one(nonzeros, hidden)
    if nonzeros is None:
        return DEFAULT if hidden is None else whole("hidden", hidden, least=1)
    budget = whole("nonzeros", nonzeros, least=1)
    least = count(inputs, 1, outputs)
    if budget < least:
        raise FissileError(
            f"nonzeros={budget} is too small a budget for {inputs} inputs and {outputs} outputs: "
            f"one hidden neuron takes {least} parameters; give at least {least}"
        )
    return (budget - outputs) // (inputs + 1 + outputs)


def budget_for(nonzeros: int | None, hidden: int | None, inputs: int, outputs: int) -> int:
    """Return the budget: as given, or what a dense network of that width takes.

    >>> budget_for(None, 25, inputs=64, outputs=10)
    1885
    """
    _check_one(nonzeros, hidden)
    if hidden is not None:
        return count(inputs, whole("hidden", hidden, least=1), outputs)
    if nonzeros is None:
        raise FissileError('recipe="best" spends a budget; give one, such as nonzeros=5_000')
    budget = whole("nonzeros", nonzeros, least=1)
    if budget <= outputs:
        raise FissileError(
            f"nonzeros={budget} is too small a budget: the biases of the outputs take {outputs}, "
            f"and there must be a weight; give at least {outputs + 1}"
        )
    return budget


def _check_one(nonzeros: int | None, hidden: int | None) -> None:
    if nonzeros is not None and hidden is not None:
        raise FissileError(
            f"nonzeros={nonzeros!r} and hidden={hidden!r} both decide the width; give one of them"
        )
