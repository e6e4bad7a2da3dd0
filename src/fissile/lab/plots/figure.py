"""A study's figure: its panels in rows, and one legend for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import TYPE_CHECKING, Any

from fissile.lab.plots import curves, growth
from fissile.lab.plots.data import Pictures, points
from fissile.lab.plots.heat import heats
from fissile.lab.plots.legend import across_many, legend
from fissile.lab.plots.matrices import matrices, pictured
from fissile.lab.plots.style import (
    COLUMN,
    FULL,
    LETTERS,
    MANY,
    alpha_of,
    named,
    styled,
    wrapped,
)
from fissile.lab.study import (
    Curves,
    Equivalence,
    Heat,
    Lines,
    Matrices,
    Panel,
    Regression,
    Series,
    Study,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["draw"]

_HEIGHTS = {1: 2.3, 2: 1.9}  # inches of a row with so many panels; three and more need less
_LEGEND = 0.35


@dataclass(frozen=True)
class _Spot:
    """A panel, the numbers it shows, and where it is drawn."""

    panel: Panel
    table: DataFrame
    axes: Axes


def draw(
    study: Study, frame: DataFrame, pictures: Pictures | None = None, note: str = ""
) -> Figure | None:
    """Return the figure of a study, or None where there is nothing to show yet.

    >>> draw(STUDIES["capacity"], frame)
    >>> draw(STUDIES["codes"], frame, {"dense": w1, "clause-2": split})

    Args:
        study: what to draw.
        frame: its trials, from :func:`fissile.lab.frame.table`.
        pictures: the first layer of each arm, NaN where a weight does not exist; or accuracies.
        note: what a reader of the figure alone must know, such as whose features these are.
    """
    pictures = pictures or {}
    tables = [[points(panel, frame, pictures) for panel in row] for row in study.figure]
    drawable = [
        pictured(panel, pictures) if isinstance(panel, Matrices) else len(table)
        for panels, found in zip(study.figure, tables, strict=True)
        for panel, table in zip(panels, found, strict=True)
    ]
    if not any(drawable):
        return None
    with styled():
        return _drawn(study.figure, tables, pictures, note)


def _drawn(
    panels: Sequence[Sequence[Panel]],
    tables: Sequence[Sequence[DataFrame]],
    pictures: Pictures,
    note: str,
) -> Figure:
    figure, places = _laid_out(panels, pictures)
    if note:
        figure.suptitle(wrapped(note, 17 * figure.get_figwidth()), fontsize=7, style="italic")
    spots = []
    for row in zip(panels, tables, places, strict=True):
        found = []
        for panel, table, place in zip(*row, strict=True):
            if isinstance(panel, Matrices):
                matrices(place, panel, pictures)
            else:
                found.append(_Spot(panel, table, figure.add_subplot(place)))
        for spot in found:
            _draw_panel(spot, 17 * figure.get_figwidth() / len(found))
        _level(found)
        spots += found
    _heats(spots)
    legend(figure, [(spot.panel, spot.table) for spot in spots])
    # The layout is found once: every file then shows the same picture, to the byte.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _laid_out(
    panels: Sequence[Sequence[Panel]], pictures: Pictures
) -> tuple[Figure, list[list[Any]]]:
    """Return an empty figure and the places of its panels, equally wide in each row."""
    from matplotlib.figure import Figure

    heights = [_height(row, pictures) for row in panels]
    alone = sum(map(len, panels)) == 1 and not isinstance(panels[0][0], Matrices)
    arms = len({arm for row in panels for one in row for arm in getattr(one, "arms", ())})
    size = (COLUMN if alone and arms <= MANY else FULL, sum(heights) + _below(arms))
    figure = Figure(figsize=size, layout="constrained")
    columns = lcm(*map(len, panels))
    grid = figure.add_gridspec(len(panels), columns, height_ratios=heights)
    places = []
    for number, row in enumerate(panels):
        wide = columns // len(row)
        places.append([grid[number, i * wide : (i + 1) * wide] for i in range(len(row))])
    return figure, places


def _below(arms: int) -> float:
    """Return the inches that a legend takes; many arms also deserve a higher panel."""
    return _LEGEND if arms <= MANY else _LEGEND + 0.6 + 0.14 * ceil(arms / across_many(arms))


def _height(row: Sequence[Panel], pictures: Pictures) -> float:
    if isinstance(row[0], Matrices):
        return 0.45 + 1.45 * len(pictured(row[0], pictures))
    return 2.5 if isinstance(row[0], Heat) else _HEIGHTS.get(len(row), 1.75)


def _draw_panel(spot: _Spot, letters: float) -> None:
    """Draw one panel; its title may be so many letters wide."""
    panel, table, axes = spot.panel, spot.table, spot.axes
    title = getattr(panel, "title", "")
    if isinstance(panel, Heat) and "alpha" not in title:
        title += f", alpha {alpha_of(panel.arm)}"
    axes.set_title(wrapped(title, letters), linespacing=1.0)
    if not len(table):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", va="center")
    elif isinstance(panel, Lines):
        curves.lines(axes, panel, table)
    elif isinstance(panel, Regression):
        curves.regression(axes, panel, table)
    elif isinstance(panel, Series):
        curves.series(axes, panel, table)
    elif isinstance(panel, Curves):
        growth.grown(axes, table)
    elif isinstance(panel, Equivalence):
        growth.equivalence(axes, panel, table)


def _level(row: Sequence[_Spot]) -> None:
    """Give the panels of a row that show one measure one axis, named on the left."""
    by_measure: dict[str, list[_Spot]] = {}
    for spot in row:
        if isinstance(spot.panel, Lines) and len(spot.table):
            by_measure.setdefault(spot.panel.measure, []).append(spot)
    for measure, same in by_measure.items():
        limits = curves.limits([(s.panel, s.table) for s in same if isinstance(s.panel, Lines)])
        for spot in same:
            spot.axes.set_ylim(limits)
            spot.axes.tick_params(labelleft=spot is same[0])
        same[0].axes.set_ylabel(named(measure, LETTERS), linespacing=1.0)


def _heats(spots: Sequence[_Spot]) -> None:
    warm = [(s.axes, s.panel, s.table) for s in spots if isinstance(s.panel, Heat) and len(s.table)]
    if warm:
        heats(warm)
