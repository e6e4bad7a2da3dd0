"""The legend of a figure: every arm once, whichever panels it is in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fissile.lab.plots.curves import starred
from fissile.lab.plots.methods import METHODS
from fissile.lab.plots.style import BASELINE, COLUMN, MANY, STAR, Look, alpha_of, look, role
from fissile.lab.stats import LEVEL
from fissile.lab.study import Curves, Equivalence, Lines, Panel, Regression, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame

__all__ = ["legend"]

Shown = Sequence[tuple[Panel, "DataFrame"]]


def legend(figure: Figure, shown: Shown) -> None:
    """Explain, below the panels, the arms, the kinds of curves and the stars they show."""
    arms = _arms(shown)
    handles = [*_dense(shown), *_stars(shown), *map(_handle, arms), *_roles(shown)]
    if not handles:
        return
    across = 2 if figure.get_figwidth() <= COLUMN else 5
    # Six in three columns: dense and its stars, then each split with both its alphas.
    columns = 3 if len(handles) > across > 2 else min(across, len(handles))
    spacing, letters = 1.6, None
    if len(handles) > MANY:
        columns, spacing, letters = across_many(len(handles)), 1.2, 7
    made = figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False,
        handlelength=2.6, columnspacing=spacing, borderpad=0.2, fontsize=letters,
    )  # fmt: skip
    bold = {one.label for one in arms if one.bold}
    for text in made.get_texts():
        if text.get_text() in bold:
            text.set_fontweight("bold")


def across_many(arms: int) -> int:
    """Return the columns of a legend of many arms; what has very many has longer names."""
    return 5 if arms <= 15 else 4


def _handle(style: Look) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=style.label, **style.curve)


def _dense(shown: Shown) -> Iterable[Line2D]:
    """Yield the dense network, which is an arm, a baseline or both."""
    from matplotlib.lines import Line2D

    style = look("dense")
    with_dense = [table for panel, table in shown if _of_arms(panel) or isinstance(panel, Curves)]
    if any("dense" in set(table.get("arm", ())) for table in with_dense):
        yield _handle(style)
    elif any(getattr(panel, "baseline", None) is not None and len(table) for panel, table in shown):
        yield Line2D([], [], label=style.label, **BASELINE)


def _stars(shown: Shown) -> Iterable[Line2D]:
    from matplotlib.lines import Line2D

    if any(len(starred(panel, table)) for panel, table in shown if isinstance(panel, Lines)):
        yield Line2D([], [], color="black", label=f"p < {LEVEL:g} against dense", **STAR)


def _arms(shown: Shown) -> list[Look]:
    """Return the looks of the split arms, split by split; methods as they are listed."""
    found = {arm for panel, table in shown if _of_arms(panel) for arm in table["arm"]}
    if not found.isdisjoint(METHODS):
        return [look(arm) for arm in METHODS if arm in found]
    ordered = sorted(found - {"dense"}, key=lambda arm: (arm.rpartition("-")[0], alpha_of(arm)))
    return [look(arm) for arm in ordered]


def _of_arms(panel: Panel) -> bool:
    return isinstance(panel, Lines | Regression | Equivalence)


def _roles(shown: Shown) -> list[Line2D]:
    names = [
        name for panel, table in shown if isinstance(panel, Series) for name in table["measure"]
    ]
    return [_handle(style) for style in dict.fromkeys(map(role, names))]
