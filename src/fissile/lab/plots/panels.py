"""Panels of a figure: lines, regressions, series, training curves, heat-maps, first layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2, log10
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.random import seeded
from fissile.lab.plots.data import Pictures, Spot, fit
from fissile.lab.plots.style import BASELINE, LETTERS, LOWER, STAR, look, named, role
from fissile.lab.stats import LEVEL
from fissile.lab.study import Lines, Matrices
from fissile.measure import gram, gram_clusters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.gridspec import SubplotSpec
    from pandas import DataFrame, Series

_BARS: dict[str, Any] = {"elinewidth": 0.7, "capsize": 1.6, "capthick": 0.7}
_CELLS: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
_LABELS = 8  # more would crowd an axis
_APART = 0.16  # inches from one label to the next, or they would touch


def lines(spot: Spot) -> None:
    """Draw the mean and the standard error of every arm, its stars, and the baseline."""
    from matplotlib.transforms import ScaledTranslation

    panel, table, axes = spot
    for arm in panel.arms:
        part = table[table["arm"] == arm]
        if len(part):
            x, y = part[panel.along], part["mean"]
            axes.errorbar(x, y, part["error"], label=arm, **look(arm).curve, **_BARS)
    if panel.baseline is not None:
        axes.axhline(panel.baseline, zorder=1, label="baseline", **BASELINE)
    for at, cell in starred(spot).groupby(panel.along):
        top = _above(panel, table, at)
        # The star of the upper arm is the upper one, which says in grey whose it is.
        cell = cell.assign(lower=is_lower(spot).loc[cell.index]).sort_values("mean")
        for height, (arm, lower) in enumerate(zip(cell["arm"], cell["lower"], strict=True)):
            up = ScaledTranslation(0, (5.5 + 5.5 * height) / 72, axes.figure.dpi_scale_trans)
            place = axes.transData + up
            colour = look(arm).colour
            axes.plot(
                float(at),
                top,
                color=colour,
                transform=place,
                gid=f"star {arm}",
                **(LOWER if lower else STAR),
            )
    _axis_below(axes, panel.along, table[panel.along], doubling=True, log=panel.log)


def _above(panel: Lines, table: DataFrame, at: float) -> float:
    """Return the height above which nothing is drawn at a place along the axis."""
    tops = table["mean"] + table["error"].fillna(0)
    top = float(tops[table[panel.along] == at].max())
    room = 0.25 * (tops.max() - table["mean"].min())  # about what two stars take
    line = panel.baseline
    return line if line is not None and top < line < top + room else top


def starred(spot: Spot) -> DataFrame:
    """Return the cells that get a star: significantly away from dense, of an arm to be starred."""
    return spot.table[spot.table["arm"].isin(spot.panel.stars) & (spot.table["p"] < LEVEL)]


def is_lower(spot: Spot) -> Series[bool]:
    """Return, for each cell with a star, whether it lies below the dense network."""
    panel, table, _ = spot
    marked = starred(spot)
    dense = table[table["arm"] == "dense"].set_index(panel.along)["mean"]
    level = marked[panel.along].map(dense) if panel.baseline is None else panel.baseline
    return marked["mean"] < level


def limits(spots: Sequence[Spot]) -> tuple[float, float]:
    """Return the range of y that panels with a common axis need, with room for their stars."""
    seen, lowest = [], []
    for panel, table, _ in spots:
        error = table["error"].fillna(0)
        seen += [*(table["mean"] - error), *(table["mean"] + error)]
        seen += [] if panel.baseline is None else [panel.baseline]
        above = table.loc[table["arm"] == panel.above, "mean"]
        if len(above):  # the axis begins there, but hides no arm wholly
            lowest.append(float(min(above.min(), table.groupby("arm")["mean"].max().min())))
    stars = any(len(starred(spot)) for spot in spots)
    return _roomy(min(lowest, default=min(seen)), max(seen), 0.24 if stars else 0.07)


def _roomy(low: float, high: float, above: float) -> tuple[float, float]:
    span = (high - low) or abs(high) or 1.0
    return low - 0.07 * span, high + above * span


def regression(spot: Spot) -> None:
    """Draw the cells' means, the line through those of each arm, and its R² above them."""
    panel, table, axes = spot
    shown = [arm for arm in panel.arms if (table["arm"] == arm).any()]
    for place, arm in enumerate(shown):
        part, style, through = table[table["arm"] == arm], look(arm), fit(table, arm)
        axes.plot(part["x"], part["y"], label=arm, alpha=0.9, **style.points)
        ends = np.array([part["x"].min(), part["x"].max()])
        if np.isfinite(through.slope):
            height = through.intercept + through.slope * ends
            axes.plot(ends, height, color=style.colour, linestyle=style.line, gid=f"fit {arm}")
        if through.count > 2 and np.isfinite(through.r2):  # any two points lie on a line
            # The arm's marker and its R² beside it: two arms in a row, from the top.
            x, y, inside = 0.05 + 0.5 * (place % 2), 0.95 - 0.11 * (place // 2), axes.transAxes
            axes.plot(x, y, transform=inside, **style.points)
            text = f"R² = {through.r2:.2f}"
            axes.text(x + 0.05, y, text, transform=inside, va="center_baseline", fontsize=7)
    rows = ceil(len(shown) / 2)
    axes.set_ylim(_roomy(table["y"].min(), table["y"].max(), 0.08 + 0.14 * rows))
    axes.set(xlabel=named(panel.x), ylabel=named(panel.y, LETTERS))


def series(spot: Spot) -> None:
    """Draw closed forms as lines and what was simulated as markers with errors over trials."""
    panel, table, axes = spot
    for name in panel.measures:
        part, style = table[table["measure"] == name], role(name)
        # No probability and no count is below zero: what a bound says there is zero.
        x, y = part[panel.along], part["mean"].clip(lower=0)
        if style.marker:
            axes.errorbar(x, y, part["error"], label=name, zorder=3, **style.curve, **_BARS)
        else:
            # A single place makes no line, but it can be seen.
            seen = {"marker": "_", "markersize": 9.0} if len(part) == 1 else {}
            axes.plot(x, y, label=name, **style.curve | seen)
    if panel.log and (table["mean"] > 0).any():
        _logarithmic(axes)
    axes.set_ylabel(named(panel.measures[0], LETTERS))
    _axis_below(axes, panel.along, table[panel.along], doubling=True)


def _logarithmic(axes: Axes) -> None:
    """Make the upper axis logarithmic, with plain numbers: few panels span whole decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    between = (1, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5) if high < 1e3 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _axis_below(
    axes: Axes, name: str, values: Sequence[float], *, doubling: bool = False, log: bool = False
) -> None:
    """Name the axis and put a tick at every value there is, a label where there is room."""
    known = sorted({float(value) for value in values})
    steps = {b / a for a, b in pairwise(known)} if known[0] > 0 else set()
    doubles = doubling and len(known) > 2 and len(steps) == 1
    places = known
    if log or doubles:
        axes.set_xscale("log", base=10 if log else 2)
        axes.xaxis.minorticks_off()
        places = [(log10 if log else log2)(value) for value in known]
    kept = ticks(known, places, axes.bbox.width / axes.figure.dpi)
    texts = [f"{value:,.0f}" if value >= 1_000 else f"{value:g}" for value in known]
    labels = [text if value in kept else "" for value, text in zip(known, texts, strict=True)]
    axes.set_xticks(known, labels)
    axes.set_xlabel(named(name))


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


def grown(spot: Spot) -> None:
    """Draw the test accuracy over the epochs: dense, and a curve for every time of the split."""
    from matplotlib import colormaps

    _, table, axes = spot
    dense, split = table[table["arm"] == "dense"], table[table["arm"] != "dense"]
    times = sorted(split["warm_up"].unique())
    colours = colormaps["viridis"]
    for place, time in enumerate(times):
        colour = colours(0.95 * place / max(1, len(times) - 1))
        part = split[split["warm_up"] == time]
        _band(axes, part, color=colour, label=f"{time:g}", gid=f"split after {time:g}")
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


def _band(axes: Axes, table: DataFrame, **style: Any) -> None:
    """Draw a mean and, behind it, its standard error."""
    epoch, mean, error = (table[name] for name in ("epoch", "mean", "error"))
    axes.plot(epoch, mean, linewidth=0.9, **style)
    low, high = mean - error, mean + error
    axes.fill_between(epoch, low, high, color=style["color"], alpha=0.15, linewidth=0)


def equivalence(spot: Spot) -> None:
    """Draw accuracy over weights, and above each expanded network its multiple."""
    panel, table, axes = spot
    for arm in ("dense", panel.arm):
        part = table[table["arm"] == arm].sort_values("nonzeros")
        axes.errorbar(part["nonzeros"], part["mean"], part["error"], capsize=1.6, **look(arm).curve)
    above = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 6}
    finite = np.isfinite(table["ratio"].astype(float))
    told = table[(table["arm"] == panel.arm) & finite].sort_values("nonzeros")
    known = told["nonzeros"].tolist()
    inches = axes.bbox.width / axes.figure.dpi / 2  # a multiple is twice as wide as a tick's label
    kept = ticks(known, [log10(value) for value in known], inches) if known else []
    for row in told.to_dict("records"):
        if row["nonzeros"] in kept:
            axes.annotate(f"{row['ratio']:.1f}×", (row["nonzeros"], row["mean"]), **above)
    axes.set_xscale("log")
    axes.set(xlabel=named("nonzeros"), ylabel=named("accuracy", LETTERS))
    axes.margins(y=0.1)


# ColorBrewer's red and blue, which differ for every kind of colour blindness; white at zero.
_COLOURS = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#ffffff",
    "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip


def diverging() -> Colormap:
    """Return the colours of everything that has a sign: blue, white at zero, red."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("diverging", _COLOURS)


def heats(spots: Sequence[Spot]) -> None:
    """Draw heat-maps with one scale of colours, and one bar that explains it."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = np.concatenate([spot.table["mean"].to_numpy(float) for spot in spots])
    measure = spots[0].panel.measure
    if measure == "improvement":
        # Equal limits on both sides put zero at white, and one scale makes the maps comparable.
        limit = float(np.abs(values).max()) or 1.0
        scale, colours = Normalize(-limit, limit), diverging()
    else:
        scale, colours = Normalize(values.min(), values.max()), colormaps["Blues"]
    for spot in spots:
        _heat(spot, scale, colours)
    bar = spots[0].axes.figure.colorbar(
        ScalarMappable(scale, colours), ax=[spot.axes for spot in spots], label=named(measure),
        location="bottom", shrink=0.5, aspect=40,
    )  # fmt: skip
    bar.outline.set_visible(False)


def _heat(spot: Spot, scale: Normalize, colours: Colormap) -> None:
    panel, table, axes = spot
    grid = table.pivot(index=panel.down, columns=panel.across, values="mean")
    values = grid.to_numpy(float)
    axes.imshow(values, cmap=colours, norm=scale, origin="lower", **_CELLS)
    axes.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns])
    axes.set_yticks(range(len(grid.index)), [f"{value:g}" for value in grid.index])
    axes.tick_params(length=0)
    axes.set_facecolor("0.85")  # a cell without a number is not a zero
    axes.spines[:].set_visible(False)
    axes.set_xlabel(named(panel.across))
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel(named(panel.down))
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            # Dark cells are at both ends of a scale with a sign, and at one of the other.
            red, green, blue, _ = colours(scale(value))
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "white"
            axes.text(column, row, written(value), color=ink, ha="center", va="center", fontsize=7)


def written(value: float) -> str:
    """Return a value as its cell shows it: one decimal, a true minus, and never minus zero."""
    return f"{value:z.1f}".replace("-", "−")


_TITLES = {
    "gram": "Gram matrix $W_1^{\\top} W_1$",
    "clustered": "Gram matrix by cluster",
    "w1": "First layer $W_1$",
}
_Picture = tuple[NDArray[Any], Sequence[int], Sequence[int]]
_ACROSS = 4.1  # how many squares are as wide as the page
_LINE: dict[str, Any] = {"color": "black", "linewidth": 0.4}
_POINTS = (190, 90)  # about the size of a picture of a first layer: crosses must fit its cells


def pictured(panel: Matrices, pictures: Pictures) -> list[str]:
    """Return the arms that there is something to show of."""
    return [arm for arm in panel.arms if arm in pictures and np.isfinite(pictures[arm]).any()]


def matrices(place: SubplotSpec, panel: Matrices, pictures: Pictures) -> None:
    """Draw the matrices of every arm, each column with one scale of colours for all arms."""
    arms = pictured(panel, pictures)
    widths = [_ACROSS - len(panel.shows) + 1 if show == "w1" else 1 for show in panel.shows]
    axes = place.subgridspec(len(arms), len(widths), width_ratios=widths).subplots(squeeze=False)
    parents = len(pictures["dense"]) if "dense" in pictures else 0
    for column, show, wide in zip(axes.T, panel.shows, widths, strict=True):
        shown = [_picture(show, pictures[arm], panel.size, parents) for arm in arms]
        _column(column, shown, wide)
        column[0].set_title(_TITLES[show])
        column[-1].set_xlabel("Literals by cluster" if show == "clustered" else "Literal")
        for cell in column:
            if show == "clustered":  # the places there are not the literals' numbers
                cell.set(xticks=[], yticks=[])
            elif show == "w1":
                cell.set_ylabel("Neuron")
    axes[-1, 0].figure.align_xlabels(axes[-1])
    for row, arm in zip(axes, arms, strict=True):
        row[0].set_ylabel(look(arm).label)


def _picture(show: str, weight: NDArray[Any], size: int, parents: int) -> _Picture:
    """Return a matrix, and before which columns, and before which rows, a new group begins."""
    known = torch.from_numpy(np.nan_to_num(weight.astype(np.float64)))
    inputs = weight.shape[1]
    clauses = range(size, inputs, size)
    if show == "w1":
        siblings = len(weight) // parents if parents else 1
        families = range(siblings, len(weight), siblings) if siblings > 1 else ()
        return weight, clauses, families
    values = gram(known).numpy()
    if show == "gram":
        return values, clauses, clauses
    # The draw that measured the recovery of clauses in trial 0, and so the same clusters.
    labels = gram_clusters(known, max(inputs // size, 1), seeded(0)).numpy()
    middle = [np.flatnonzero(labels == label).mean() for label in labels]
    order = np.lexsort((labels, middle))  # cluster by cluster, as they come in
    edges = (np.flatnonzero(np.diff(labels[order])) + 1).tolist()
    return values[np.ix_(order, order)], edges, edges


def _column(column: Sequence[Axes], pictures: Sequence[_Picture], wide: float) -> None:
    from matplotlib.ticker import MaxNLocator

    # A single giant weight must not pale all the others.
    every = np.concatenate([values[np.isfinite(values)] for values, _, _ in pictures])
    limit = float(np.quantile(np.abs(every), 0.99)) or 1.0
    for axes, (values, columns, rows) in zip(column, pictures, strict=True):
        image = axes.imshow(values, cmap=diverging(), vmin=-limit, vmax=limit, **_CELLS)
        down, across = values.shape
        axes.vlines(np.array(columns) - 0.5, -0.5, down - 0.5, **_LINE)
        axes.hlines(np.array(rows) - 0.5, -0.5, across - 0.5, **_LINE)
        _crosses(axes, values)
        axes.spines[:].set_visible(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    figure = column[0].figure
    bar = figure.colorbar(
        image, ax=list(column), location="bottom", extend="both", extendfrac=0.04,
        fraction=0.025, pad=0.02, aspect=20 * wide, ticks=MaxNLocator(4, symmetric=True),
    )  # fmt: skip
    bar.outline.set_linewidth(0.4)
    if any(np.isnan(values).any() for values, _, _ in pictures):
        bar.set_label("×: no weight", fontsize=7)


def _crosses(axes: Axes, values: NDArray[Any]) -> None:
    """Mark the weights that do not exist."""
    rows, columns = np.nonzero(np.isnan(values))
    cell = min(_POINTS[0] / values.shape[1], _POINTS[1] / values.shape[0])
    size, width = (0.5 * cell) ** 2, min(0.7, cell / 8)
    axes.scatter(columns, rows, s=size, c="black", marker="x", linewidths=width)
