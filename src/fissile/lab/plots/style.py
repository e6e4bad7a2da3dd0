"""How figures look: sizes, fonts, and what tells arms and methods apart in colour and in grey."""

from __future__ import annotations

import re
import textwrap
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fissile._common.errors import needs, printable
from fissile.lab.frame import labelled

# Okabe and Ito's colours, which colour-blind readers can tell apart, and two greys.
_BLUE, _SKY, _GREEN, _ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
_VERMILLION, _PURPLE, _GREY, _LIGHT = "#D55E00", "#CC79A7", "#555555", "#999999"
_SOLID, _DASHED, _DOTTED = "-", (0, (4, 1.5)), (0, (1, 1.4))
_MIXED, _LONG = (0, (4, 1.2, 1, 1.2)), (0, (7, 2))


@dataclass(frozen=True)
class Look:
    """The colour, marker and line of an arm or of a kind of curve, and its name in the legend."""

    label: str
    colour: str
    marker: str
    line: Any
    filled: bool = True
    size: float = 3.6
    bold: bool = False  # above all others, and thicker

    @property
    def points(self) -> dict[str, Any]:
        """What draws the markers alone."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": self.colour if self.filled else "white",
            "linestyle": "none",
        }

    @property
    def curve(self) -> dict[str, Any]:
        """What draws the markers and the line through them."""
        bold = {"linewidth": 2.0, "zorder": 4} if self.bold else {}
        return self.points | {"linestyle": self.line} | bold


METHODS: dict[str, Look] = {
    "recipe": Look("recipe", _VERMILLION, "o", _SOLID, size=4.4, bold=True),
    # the paper's split
    "fpe-2": Look("FPE, α = 2", _BLUE, "s", _DOTTED, filled=False),
    "fpe-4": Look("FPE, α = 4", _BLUE, "s", _SOLID),
    "fpe-8": Look("FPE, α = 8", _BLUE, "^", _DASHED, filled=False),
    "fpe-16": Look("FPE, α = 16", _BLUE, "^", _MIXED),
    "fpe-at-0": Look("FPE at the start", _BLUE, "v", _LONG, filled=False),
    # sparse from the start
    "static-uniform": Look("static, uniform", _GREEN, "<", _DOTTED, filled=False),
    "static-erk": Look("static, Erdős–Rényi", _GREEN, "<", _DASHED),
    "set": Look("SET", _PURPLE, "P", _DASHED),
    "rigl": Look("RigL", _PURPLE, "X", _SOLID),
    # wide, then pruned
    "one-shot": Look("pruned at once", _SKY, ">", _DASHED, filled=False),
    "gradual": Look("pruned gradually", _SKY, ">", _SOLID),
    # linear
    "l1": Look("linear, L1", _ORANGE, "p", _SOLID),
    "low-rank": Look("linear, low rank", _LIGHT, "h", _MIXED),
    # the recipe, one thing changed
    "recipe-magnitude": Look("recipe, magnitude", _BLUE, "o", _DASHED, filled=False),
    "recipe-one-shot": Look("recipe, pruned at once", _SKY, ">", _DASHED, filled=False),
    "recipe-slower": Look("recipe, pruned slower", _SKY, ">", _MIXED),
    "recipe-no-direct": Look("recipe, hidden only", _GREEN, "<", _LONG, filled=False),
    "recipe-direct": Look("recipe, always linear beside", _GREEN, "s", _SOLID, filled=False),
    "recipe-linear": Look("recipe, linear only", _ORANGE, "p", _SOLID),
    "recipe-plain": Look("recipe, unregularised", _LIGHT, "h", _MIXED),
    "recipe-rewired": Look("recipe, rewired", _PURPLE, "X", _DOTTED, filled=False),
    # the paper's split, one thing changed
    "fpe-4-layer": Look("FPE-4, each layer's own", _GREEN, "<", _DOTTED, filled=False),
    "fpe-4-erdos-renyi": Look("FPE-4, Erdős–Rényi", _GREEN, "<", _DASHED),
    "fpe-4-saliency": Look("FPE-4, saliency", _SKY, "h", _SOLID),
    "fpe-16-saliency": Look("FPE-16, saliency", _SKY, "h", _MIXED, filled=False),
    "fpe-4-rewired": Look("FPE-4, rewired", _PURPLE, "X", _SOLID),
    "fpe-4-scaled": Look("FPE-4, copies halved", _LIGHT, "p", _DASHED),
    "fpe-4-gram": Look("FPE-4, Gram split", _GREY, ">", _SOLID),
    "fpe-4-early": Look("FPE-4, split early", _PURPLE, "v", _LONG, filled=False),
    "fpe-2-then-2": Look("FPE-2, then 2 again", _BLUE, "d", _DOTTED),
    "fpe-4-again": Look("FPE-4, rate rises again", _GREY, "P", _MIXED),
}


#: Inches: one column of the paper, and its whole width.
COLUMN, FULL = 3.25, 6.75
#: How long a name beside a panel may be: as long as the panel is high.
LETTERS = 27
#: More arms than this need the whole width of the paper and a legend of several rows.
MANY = 10

_INK = "#000000"

_SETTINGS: dict[str, Any] = {
    # It comes with matplotlib, so that every machine draws the same letters, and suits Times.
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlepad": 4,
    "axes.labelpad": 2.5,
    "figure.constrained_layout.w_pad": 0.045,
    "figure.constrained_layout.h_pad": 0.03,
    "lines.linewidth": 1.1,
    "lines.markeredgewidth": 0.8,
    # Letters as outlines: as text, they would look different wherever the font is missing.
    "svg.fonttype": "path",
    "svg.hashsalt": "fissile",  # ids inside the file would be random otherwise
}

#: The dashed line where the dense network would lie.
BASELINE: dict[str, Any] = {"color": _INK, "linestyle": (0, (4, 2)), "linewidth": 0.8}
#: An asterisk as a marker: unlike the letter, it sits where it is put.
STAR: dict[str, Any] = {
    "marker": (6, 2, 0), "markersize": 4.2, "markeredgewidth": 0.8, "linestyle": "none",
}  # fmt: skip
#: What stands in its place where the arm is below the dense network.
LOWER: dict[str, Any] = {
    "marker": "v", "markersize": 3.0, "markeredgewidth": 0.7, "linestyle": "none",
    "markerfacecolor": "white",
}  # fmt: skip


_DENSE = Look("dense", _INK, "D", BASELINE["linestyle"], size=3.0)
_SPLITS = {
    "clause": ("clause split", _BLUE, "o"),
    "random": ("random split", _VERMILLION, "s"),
    "gram": ("Gram split", _GREEN, "^"),
    "means": ("by means", _BLUE, "o"),
    "atoms": ("by atoms", _SKY, "h"),
    "2:4": ("2:4 split", _BLUE, "P"),
    "random-layer": ("random, each layer's own", _ORANGE, "p"),
    "dynamic-layer": ("moving, each layer's own", _PURPLE, "d"),
    "dynamic": ("moving", _SKY, "o"),
    "dynamic-gradient": ("by gradient", _BLUE, "o"),
    "overlapping": ("overlapping inputs", _PURPLE, "v"),
    "dropconnect": ("DropConnect", _PURPLE, "X"),
}
_LINES = {2: _DOTTED, 4: _SOLID}
_MARKED = [(_BLUE, "o"), (_VERMILLION, "s"), (_GREEN, "^"), (_PURPLE, "v"), (_ORANGE, "p")]
_OTHERS: dict[str, Look] = {}  # arms without a look of their own, as a figure meets them

_ROLES = {
    "simulated": Look("simulated", _BLUE, "o", "none", filled=False),
    "bound": Look("bound", _VERMILLION, "", _DASHED),
    "approx": Look("approximation", _GREEN, "", _DOTTED),
}
_EXACT = Look("exact", _INK, "", "-")


def look(arm: str) -> Look:
    """Return how an arm is drawn: colour and marker say the split, line and filling its alpha.

    >>> look("clause-4").label
    'clause split, α = 4'

    Methods of the frontier, which are no splits, have looks of their own.
    """
    if arm == "dense":
        return _DENSE
    if arm in METHODS:
        return METHODS[arm]
    split, alpha = arm.rpartition("-")[0] or arm, alpha_of(arm)
    if alpha == 1 and arm not in _SPLITS:  # no split: an arm of a user's own function
        colour, marker = _MARKED[len(_OTHERS) % len(_MARKED)]
        return _OTHERS.setdefault(arm, Look(plain(arm), colour, marker, _SOLID))
    name, colour, marker = _SPLITS.get(split, (plain(f"{split} split"), _PURPLE, "v"))
    return Look(f"{name}, α = {alpha}", colour, marker, _LINES.get(alpha, "-."), filled=alpha != 2)


def alpha_of(arm: str) -> int:
    """Return an arm's expansion factor: ``alpha_of("clause-4") == 4``; that of dense is 1."""
    last = arm.rpartition("-")[2]
    return int(last) if last.isdecimal() else 1


def role(measure: str) -> Look:
    """Return how a column of the theory such as ``coverage_bound`` is drawn, by its last word."""
    return _ROLES.get(measure.rpartition("_")[2], _EXACT)


def named(column: str, letters: int = 60) -> str:
    """Return the name of a column for an axis, in lines of at most this number of letters."""
    text = labelled(column)
    return wrapped(text[:1].upper() + text[1:], letters)


def wrapped(text: str, letters: float) -> str:
    """Return a text in lines of at most this number of letters and much alike, alpha as a letter.

    >>> wrapped("coverage of clauses, alpha 2", 20)
    'coverage of\nclauses, α\xa0=\xa02'
    """
    nice = re.sub(r"\balpha (\d+)", "α\xa0=\xa0\\1", plain(text))  # spaces that no line ends at
    lines = textwrap.wrap(nice, int(letters), break_long_words=False)
    for width in range(int(letters), 0, -1):  # the narrowest that takes no line more
        narrower = textwrap.wrap(nice, width, break_long_words=False)
        if len(narrower) > len(lines):
            break
        lines = narrower
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: ``$5 or $6`` is no formula."""
    return printable(text).replace("$", r"\$")


def styled() -> AbstractContextManager[None]:
    """Draw in the house style, whatever the user's own matplotlib settings are."""
    needs("matplotlib", "lab")
    from matplotlib import style

    _OTHERS.clear()
    return style.context(["default", _SETTINGS])
