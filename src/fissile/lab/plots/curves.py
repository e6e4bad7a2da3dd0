"""Panels with a curve for every arm or column: lines, regressions, and the theory's series."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2, log10
from typing import TYPE_CHECKING, Any

import numpy as np

from fissile.lab.plots.data import fit
from fissile.lab.plots.style import BASELINE, LETTERS, STAR, look, named, role
from fissile.lab.stats import LEVEL, Line
from fissile.lab.study import Lines, Regression, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

__all__ = ["limits", "lines", "regression", "series", "starred", "ticks"]

_BARS: dict[str, Any] = {"elinewidth": 0.7, "capsize": 1.6, "capthick": 0.7}
_LABELS = 8  # more would crowd an axis
_APART = 0.16  # inches from one label to the next, or they would touch


# --- lines


def lines(axes: Axes, panel: Lines, table: DataFrame) -> None:
    """Draw the mean and the standard error of every arm, its stars, and the baseline."""
    for arm in panel.arms:
        one = table[table["arm"] == arm]
        if len(one):
            x, y = one[panel.along], one["mean"]
            axes.errorbar(x, y, one["error"], label=arm, **look(arm).curve, **_BARS)
    if panel.baseline is not None:
        axes.axhline(panel.baseline, zorder=1, label="baseline", **BASELINE)
    for at, cell in starred(panel, table).groupby(panel.along):
        top = _above(panel, table, at)
        # The star of the upper arm is the upper one, which says in grey whose it is.
        for height, arm in enumerate(cell.sort_values("mean")["arm"]):
            _star(axes, float(at), top, height, arm)
    _along(axes, panel.along, table[panel.along], log=panel.log)


def _above(panel: Lines, table: DataFrame, at: float) -> float:
    """Return the height above which nothing is drawn at a place along the axis."""
    tops = table["mean"] + table["error"].fillna(0)
    top = float(tops[table[panel.along] == at].max())
    room = 0.25 * (tops.max() - table["mean"].min())  # about what two stars take
    line = panel.baseline
    return line if line is not None and top < line < top + room else top


def starred(panel: Lines, table: DataFrame) -> DataFrame:
    """Return the cells that get a star: significantly away from dense, of an arm to be starred."""
    return table[table["arm"].isin(list(panel.stars)) & (table["p"] < LEVEL)]


def _star(axes: Axes, x: float, y: float, height: int, arm: str) -> None:
    from matplotlib.transforms import ScaledTranslation

    up = ScaledTranslation(0, (5.5 + 5.5 * height) / 72, axes.figure.dpi_scale_trans)
    place = axes.transData + up
    axes.plot(x, y, color=look(arm).colour, transform=place, gid=f"star {arm}", **STAR)


def limits(shown: Sequence[tuple[Lines, DataFrame]]) -> tuple[float, float]:
    """Return the range of y that panels with a common axis need, with room for their stars."""
    seen = [panel.baseline for panel, _ in shown if panel.baseline is not None]
    for _, table in shown:
        error = table["error"].fillna(0)
        seen += [*(table["mean"] - error), *(table["mean"] + error)]
    stars = any(len(starred(panel, table)) for panel, table in shown)
    low = min(_lowest(shown), default=min(seen))
    return _roomy(low, max(seen), 0.24 if stars else 0.07)


def _lowest(shown: Sequence[tuple[Lines, DataFrame]]) -> list[float]:
    """Return where each panel that names an arm to begin with begins: no arm is hidden wholly."""
    found = []
    for panel, table in shown:
        own = table.loc[table["arm"] == panel.above, "mean"]
        if len(own):
            found.append(float(min(own.min(), table.groupby("arm")["mean"].max().min())))
    return found


def _roomy(low: float, high: float, above: float) -> tuple[float, float]:
    span = (high - low) or abs(high) or 1.0
    return low - 0.07 * span, high + above * span


# --- regressions


def regression(axes: Axes, panel: Regression, table: DataFrame) -> None:
    """Draw the cells' means, the line through those of each arm, and its R² above them."""
    fits = {arm: fit(table, arm) for arm in panel.arms if (table["arm"] == arm).any()}
    for place, (arm, found) in enumerate(fits.items()):
        one, style = table[table["arm"] == arm], look(arm)
        axes.plot(one["x"], one["y"], label=arm, alpha=0.9, **style.points)
        ends = np.array([one["x"].min(), one["x"].max()])
        if np.isfinite(found.slope):
            height = found.intercept + found.slope * ends
            axes.plot(ends, height, color=style.colour, linestyle=style.line, gid=f"fit {arm}")
        _explained(axes, found, arm, place)
    rows = ceil(len(fits) / 2)
    axes.set_ylim(_roomy(table["y"].min(), table["y"].max(), 0.08 + 0.14 * rows))
    axes.set(xlabel=named(panel.x), ylabel=named(panel.y, LETTERS))


def _explained(axes: Axes, found: Line, arm: str, place: int) -> None:
    """Write an arm's R² beside its marker, two in a row, from the top."""
    if found.count < 3 or not np.isfinite(found.r2):  # two points are on a line, whatever they say
        return
    x, y = 0.05 + 0.5 * (place % 2), 0.95 - 0.11 * (place // 2)
    axes.plot(x, y, transform=axes.transAxes, **look(arm).points)
    text = f"R² = {found.r2:.2f}"
    axes.text(x + 0.05, y, text, transform=axes.transAxes, va="center_baseline", fontsize=7)


# --- series


def series(axes: Axes, panel: Series, table: DataFrame) -> None:
    """Draw closed forms as lines and what was simulated as markers with errors over trials."""
    for name in panel.measures:
        one, style = table[table["measure"] == name], role(name)
        # No probability and no count is below zero: what a bound says there is zero.
        x, y = one[panel.along], one["mean"].clip(lower=0)
        if style.marker:
            axes.errorbar(x, y, one["error"], label=name, zorder=3, **style.curve, **_BARS)
        else:
            # A single place makes no line, but it can be seen.
            seen = {"marker": "_", "markersize": 9.0} if len(one) == 1 else {}
            axes.plot(x, y, label=name, **style.curve | seen)
    if panel.log and (table["mean"] > 0).any():
        _logarithmic(axes)
    axes.set_ylabel(named(panel.measures[0], LETTERS))
    _along(axes, panel.along, table[panel.along], doubling=True)


def _logarithmic(axes: Axes) -> None:
    """Make the upper axis logarithmic, with plain numbers: few panels span whole decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    between = (1, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5) if high < 1e3 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


# --- the axis below


def _along(
    axes: Axes, name: str, values: Sequence[float], *, doubling: bool = False, log: bool = False
) -> None:
    """Name the axis and put a tick at every value there is, a label where there is room."""
    found = sorted({float(value) for value in values})
    places = found
    if log:
        axes.set_xscale("log")
        axes.xaxis.minorticks_off()
        places = [log10(value) for value in found]
    elif doubling and found[0] > 0 and len({high / low for low, high in pairwise(found)}) == 1:
        axes.set_xscale("log", base=2)
        axes.xaxis.minorticks_off()
        places = [log2(value) for value in found]
    kept = ticks(found, places, axes.bbox.width / axes.figure.dpi)
    axes.set_xticks(found, [_written(value) if value in kept else "" for value in found])
    axes.set_xlabel(named(name))


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:g}"


def ticks(values: Sequence[float], places: Sequence[float], inches: float) -> list[float]:
    """Return the values to label, first and last among them, far enough apart to be read.

    >>> ticks([4, 6, 8, 32], [4, 6, 8, 32], inches=1.5)
    [4, 8, 32]
    """
    span = places[-1] - places[0]
    gap = span / (_LABELS - 0.5) if len(values) > _LABELS else span * _APART / inches
    kept = [0]
    for number, place in enumerate(places):
        if place - places[kept[-1]] >= gap:
            kept.append(number)
    if len(kept) > 1:
        kept[-1] = len(values) - 1
    return [values[number] for number in kept]
