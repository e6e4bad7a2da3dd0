"""Panels of what grows: accuracy with the epochs, and with the weights."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from fissile.lab.plots.style import LETTERS, look, named
from fissile.lab.study import Equivalence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

__all__ = ["equivalence", "grown"]


def grown(axes: Axes, table: DataFrame) -> None:
    """Draw the test accuracy over the epochs: dense, and a curve for every time of the split."""
    from matplotlib import colormaps

    dense, split = table[table["arm"] == "dense"], table[table["arm"] != "dense"]
    times = sorted(split["warm_up"].unique())
    colours = colormaps["viridis"]
    for place, time in enumerate(times):
        one = split[split["warm_up"] == time]
        colour = colours(0.95 * place / max(1, len(times) - 1))
        _band(axes, one, color=colour, label=f"{time:g}", gid=f"split after {time:g}")
    if len(dense):
        style = look("dense")
        _band(axes, dense, color=style.colour, linestyle=style.line, label=None, gid="dense")
    if times:
        axes.legend(
            title="split after epoch", ncols=3, fontsize=6, title_fontsize=6, frameon=False,
            handlelength=1.2, columnspacing=0.8, labelspacing=0.25, loc="lower right",
        )  # fmt: skip
    # The first epochs climb from nothing; what tells the curves apart is above.
    late = table[table["epoch"] > table["epoch"].max() / 10]
    low, high = late["mean"].min(), late["mean"].max()
    span = (high - low) or 1.0
    axes.set_ylim(low - 0.35 * span, high + 0.06 * span)
    axes.set(xlabel=named("epoch"), ylabel=named("accuracy", LETTERS))


def _band(axes: Axes, one: DataFrame, **style: Any) -> None:
    """Draw a mean and, behind it, its standard error."""
    axes.plot(one["epoch"], one["mean"], linewidth=0.9, **style)
    low, high = one["mean"] - one["error"], one["mean"] + one["error"]
    axes.fill_between(one["epoch"], low, high, color=style["color"], alpha=0.15, linewidth=0)


def equivalence(axes: Axes, panel: Equivalence, table: DataFrame) -> None:
    """Draw accuracy over weights, and above each expanded network its multiple."""
    for arm in ("dense", panel.arm):
        one = table[table["arm"] == arm].sort_values("nonzeros")
        axes.errorbar(one["nonzeros"], one["mean"], one["error"], capsize=1.6, **look(arm).curve)
    for row in table[table["arm"] == panel.arm].to_dict("records"):
        if isfinite(row["ratio"]):
            axes.annotate(
                f"{row['ratio']:.1f}×", (row["nonzeros"], row["mean"]), (0, 4),
                textcoords="offset points", ha="center", fontsize=6,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set(xlabel=named("nonzeros"), ylabel=named("accuracy", LETTERS))
    axes.margins(y=0.1)
