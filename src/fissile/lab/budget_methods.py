"""Every way to spend a budget that the frontier compares, each with six settings to choose from.

A method is a function of the budget, the inputs and the outputs; its settings are plans. All have
Adam, decay, dropout of inputs and smoothing of labels to choose from, and the same number of tries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fissile.bank.sparse import Plan, Prune, Rewire, SplitAt
from fissile.bank.sparse.plan import is_large, within_budget
from fissile.bank.sparse.plan import recommended_plans as recommended

Method = Callable[[int, int, int], list[Plan]]
#: How many settings every method may try.
SETTINGS = 6
OURS = "recipe"

#: Rates, decay, dropout of inputs and smoothing of labels, for methods with nothing else to choose.
_TRIED: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "schedule": "constant"},  # as in the paper
    {"lr": 3e-3},
    {"lr": 3e-3, "decay": 0.3, "smooth": 0.1},
    {"lr": 1e-2, "decay": 0.3},
    {"lr": 1e-2, "decay": 0.3, "dropout": 0.2},
    {"lr": 1e-3, "decay": 0.3, "dropout": 0.2, "smooth": 0.1},
)
#: For methods that also choose between two widths.
_FEWER: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "decay": 0.3},
    {"lr": 3e-3, "decay": 0.3, "dropout": 0.2, "smooth": 0.1},
    {"lr": 1e-3, "decay": 0.3, "smooth": 0.1},
)
#: What the search for the recipe has found for large budgets; there it stands in the place of the
#: highest rate, which they do not want, for all methods alike.
_STRONG: dict[str, Any] = {"lr": 3e-3, "decay": 1.0, "smooth": 0.1}
#: Widths that budgets share, so that their networks can be trained as one stack.
_WIDTHS = (16, 64, 256, 1024, 4096, 16384)


def _suited(
    known: Sequence[dict[str, Any]], budget: int, inputs: int, outputs: int
) -> list[dict[str, Any]]:
    """Return the settings that suit a budget."""
    if not is_large(budget, inputs, outputs):
        return list(known)
    return [_STRONG if settings == {"lr": 1e-2, "decay": 0.3} else settings for settings in known]


def _with_settings(plan: Plan, inputs: int, outputs: int) -> list[Plan]:
    return [replace(plan, **settings) for settings in _suited(_TRIED, plan.budget, inputs, outputs)]


def _narrow(budget: int, inputs: int, outputs: int, **ways: Any) -> list[Plan]:
    """Return plans that begin with the dense network of the budget."""
    hidden = max(1, within_budget(budget, inputs, outputs))
    return _with_settings(Plan(budget, hidden, **ways), inputs, outputs)


def _wide(budget: int, inputs: int, outputs: int, **ways: Any) -> list[Plan]:
    """Return plans with two widths, about four and sixteen times the dense network's."""
    around = 4 * within_budget(budget, inputs, outputs)
    first = max((i for i, width in enumerate(_WIDTHS[:-1]) if width <= around), default=0)
    return [
        Plan(budget, width, **ways, **settings)
        for width in _WIDTHS[first : first + 2]
        for settings in _suited(_FEWER, budget, inputs, outputs)
    ]


def _low_rank(budget: int, inputs: int, outputs: int) -> list[Plan]:
    rank = max(1, (budget - outputs) // (inputs + outputs))
    return _with_settings(Plan(budget, rank, activation="none"), inputs, outputs)


def _l1(budget: int, inputs: int, outputs: int) -> list[Plan]:
    return _with_settings(Plan(budget, direct=True, l1=True), inputs, outputs)


def _split(*splits: SplitAt, **ways: Any) -> Method:
    return partial(_narrow, splits=splits, **ways)


CONTENDERS: dict[str, Method] = {
    "dense": _narrow,
    "fpe-2": _split(SplitAt(2)),
    "fpe-4": _split(SplitAt(4)),
    "fpe-8": _split(SplitAt(8)),
    "fpe-16": _split(SplitAt(16)),
    "fpe-at-0": _split(SplitAt(4, at=0.0)),
    "static-uniform": partial(_wide, start="uniform"),
    "static-erk": partial(_wide, start="erdos-renyi"),
    "set": partial(_wide, start="erdos-renyi", rewire=Rewire()),
    "rigl": partial(_wide, start="erdos-renyi", rewire=Rewire(grow="gradient")),
    "one-shot": partial(_wide, prune=Prune(0.5, 0.5)),
    "gradual": partial(_wide, prune=Prune(0.2, 0.75)),
    "l1": _l1,
    "low-rank": _low_rank,
    OURS: recommended,
}


# --- what the recipe consists of, one thing changed at a time


def _changed(method: Method, change: Callable[[Plan], Plan]) -> Method:
    return lambda budget, inputs, outputs: [
        change(plan) for plan in method(budget, inputs, outputs)
    ]


_ours = partial(_changed, recommended)


def _pruned(plan: Plan, **ways: Any) -> Plan:
    assert plan.prune is not None
    return replace(plan, prune=replace(plan.prune, **ways))


def _hidden_only(plan: Plan) -> Plan:
    """Leave the direct weights out; where there is nothing else, take other settings."""
    if plan.hidden:
        return replace(plan, direct=False)
    return replace(plan, direct=False, hidden=128, lr=plan.lr / 3)


def _rising_again(plan: Plan) -> Plan:
    """Let the rate rise again after the split, wherever it falls."""
    return plan if plan.schedule == "constant" else replace(plan, schedule="again")


ABLATED: dict[str, Method] = {
    "recipe-magnitude": _ours(partial(_pruned, saliency="magnitude")),
    "recipe-one-shot": _ours(partial(_pruned, begin=0.5, end=0.5)),
    "recipe-slower": _ours(partial(_pruned, begin=0.2, power=3.0)),
    "recipe-no-direct": _ours(_hidden_only),
    "recipe-direct": _ours(lambda plan: replace(plan, direct=True)),
    "recipe-linear": _ours(lambda plan: replace(plan, hidden=0, direct=True)),
    "recipe-plain": _ours(lambda plan: replace(plan, decay=0.0, dropout=0.0, smooth=0.0)),
    "recipe-rewired": _ours(
        lambda plan: replace(plan, rewire=Rewire(0.2, grow="gradient", until=0.95))
    ),
    "fpe-4-layer": _split(SplitAt(4, allocation="layer")),
    "fpe-4-erdos-renyi": _split(SplitAt(4, allocation="erdos-renyi")),
    "fpe-4-saliency": _split(SplitAt(4, allocation="saliency")),
    "fpe-16-saliency": _split(SplitAt(16, allocation="saliency")),
    "fpe-4-rewired": _split(SplitAt(4), rewire=Rewire(0.2, grow="gradient", until=0.95)),
    "fpe-4-scaled": _split(SplitAt(4, scale=0.5)),
    "fpe-4-gram": _split(SplitAt(4, split="gram")),
    "fpe-4-early": _split(SplitAt(4, at=0.2)),
    "fpe-2-then-2": _split(SplitAt(2, at=0.35), SplitAt(2, at=0.65)),
    "fpe-4-again": _changed(_split(SplitAt(4)), _rising_again),
}
METHODS: dict[str, Method] = CONTENDERS | ABLATED
