"""Heat-maps: a measure over two axes, its value written in every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fissile.lab.plots.style import named
from fissile.lab.study import Heat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from pandas import DataFrame

__all__ = ["diverging", "heats"]

# ColorBrewer's red and blue, which differ for every kind of colour blindness; white at zero.
_COLOURS = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#ffffff",
    "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip


def diverging() -> Colormap:
    """Return the colours of everything that has a sign: blue, white at zero, red."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("diverging", _COLOURS)


def heats(warm: Sequence[tuple[Axes, Heat, DataFrame]]) -> None:
    """Draw heat-maps with one scale of colours, and one bar that explains it."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = np.concatenate([table["mean"].to_numpy(float) for _, _, table in warm])
    if warm[0][1].measure == "improvement":
        # Equal limits on both sides put zero at white, and one scale makes the maps comparable.
        limit = float(np.abs(values).max()) or 1.0
        scale, colours = Normalize(-limit, limit), diverging()
    else:
        scale, colours = Normalize(values.min(), values.max()), colormaps["Blues"]
    for axes, panel, table in warm:
        _heat(axes, panel, table, scale, colours)
    every = [axes for axes, _, _ in warm]
    bar = every[0].figure.colorbar(
        ScalarMappable(scale, colours),
        ax=every,
        label=named(warm[0][1].measure),
        location="bottom",
        shrink=0.5,
        aspect=40,
    )
    bar.outline.set_visible(False)


def _heat(axes: Axes, panel: Heat, table: DataFrame, scale: Normalize, colours: Colormap) -> None:
    grid = table.pivot(index=panel.down, columns=panel.across, values="mean")
    axes.imshow(
        grid.to_numpy(float), cmap=colours, norm=scale, origin="lower", aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns])
    axes.set_yticks(range(len(grid.index)), [f"{value:g}" for value in grid.index])
    axes.tick_params(length=0)
    axes.set_facecolor("0.85")  # a cell without a number is not a zero
    axes.spines[:].set_visible(False)
    axes.set_xlabel(named(panel.across))
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel(named(panel.down))
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)):
        if np.isfinite(value):
            # Dark cells are at both ends of a scale with a sign, and at one of the other.
            red, green, blue, _ = colours(scale(value))
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "white"
            axes.text(column, row, written(value), color=ink, ha="center", va="center", fontsize=7)


def written(value: float) -> str:
    """Return a value as its cell shows it: one decimal, a true minus, and never minus zero."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", "−")
