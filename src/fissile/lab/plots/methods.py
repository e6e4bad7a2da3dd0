"""How the methods of the frontier look: families by colour, members by marker, line and filling."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["METHODS", "Drawn"]

# Okabe and Ito's colours again, and two greys.
_BLUE, _SKY, _GREEN, _ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
_VERMILLION, _PURPLE, _GREY, _LIGHT = "#D55E00", "#CC79A7", "#555555", "#999999"
_SOLID, _DASHED, _DOTTED = "-", (0, (4, 1.5)), (0, (1, 1.4))
_MIXED, _LONG = (0, (4, 1.2, 1, 1.2)), (0, (7, 2))


class Drawn(NamedTuple):
    """A method's name in the legend, and what draws it."""

    label: str
    colour: str
    marker: str
    line: Any
    filled: bool = True
    bold: bool = False


METHODS: dict[str, Drawn] = {
    "recipe": Drawn("recipe", _VERMILLION, "o", _SOLID, bold=True),
    # the paper's split
    "fpe-2": Drawn("FPE, α = 2", _BLUE, "s", _DOTTED, filled=False),
    "fpe-4": Drawn("FPE, α = 4", _BLUE, "s", _SOLID),
    "fpe-8": Drawn("FPE, α = 8", _BLUE, "^", _DASHED, filled=False),
    "fpe-16": Drawn("FPE, α = 16", _BLUE, "^", _MIXED),
    "fpe-at-0": Drawn("FPE at the start", _BLUE, "v", _LONG, filled=False),
    # sparse from the start
    "static-uniform": Drawn("static, uniform", _GREEN, "<", _DOTTED, filled=False),
    "static-erk": Drawn("static, Erdős–Rényi", _GREEN, "<", _DASHED),
    "set": Drawn("SET", _PURPLE, "P", _DASHED),
    "rigl": Drawn("RigL", _PURPLE, "X", _SOLID),
    # wide, then pruned
    "one-shot": Drawn("pruned at once", _SKY, ">", _DASHED, filled=False),
    "gradual": Drawn("pruned gradually", _SKY, ">", _SOLID),
    # linear
    "l1": Drawn("linear, L1", _ORANGE, "p", _SOLID),
    "low-rank": Drawn("linear, low rank", _LIGHT, "h", _MIXED),
    # the recipe, one thing changed
    "recipe-magnitude": Drawn("recipe, magnitude", _BLUE, "o", _DASHED, filled=False),
    "recipe-one-shot": Drawn("recipe, pruned at once", _SKY, ">", _DASHED, filled=False),
    "recipe-slower": Drawn("recipe, pruned slower", _SKY, ">", _MIXED),
    "recipe-no-direct": Drawn("recipe, hidden only", _GREEN, "<", _LONG, filled=False),
    "recipe-direct": Drawn("recipe, always linear beside", _GREEN, "s", _SOLID, filled=False),
    "recipe-linear": Drawn("recipe, linear only", _ORANGE, "p", _SOLID),
    "recipe-plain": Drawn("recipe, unregularised", _LIGHT, "h", _MIXED),
    "recipe-rewired": Drawn("recipe, rewired", _PURPLE, "X", _DOTTED, filled=False),
    # the paper's split, one thing changed
    "fpe-4-layer": Drawn("FPE-4, each layer's own", _GREEN, "<", _DOTTED, filled=False),
    "fpe-4-erdos-renyi": Drawn("FPE-4, Erdős–Rényi", _GREEN, "<", _DASHED),
    "fpe-4-saliency": Drawn("FPE-4, saliency", _SKY, "h", _SOLID),
    "fpe-16-saliency": Drawn("FPE-16, saliency", _SKY, "h", _MIXED, filled=False),
    "fpe-4-rewired": Drawn("FPE-4, rewired", _PURPLE, "X", _SOLID),
    "fpe-4-scaled": Drawn("FPE-4, copies halved", _LIGHT, "p", _DASHED),
    "fpe-4-gram": Drawn("FPE-4, Gram split", _GREY, ">", _SOLID),
    "fpe-4-early": Drawn("FPE-4, split early", _PURPLE, "v", _LONG, filled=False),
    "fpe-2-then-2": Drawn("FPE-2, then 2 again", _BLUE, "d", _DOTTED),
    "fpe-4-again": Drawn("FPE-4, rate rises again", _GREY, "P", _MIXED),
}
