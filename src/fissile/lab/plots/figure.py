"""A study's figure: its panels in rows, one legend for all of them, and its files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import chain
from math import ceil, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FileError
from fissile._common.files import move_finished
from fissile.lab.plots import panels, style
from fissile.lab.plots.data import Pictures, Spot, points
from fissile.lab.stats import LEVEL
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
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame

_DRAW: dict[type, Callable[[Spot], None]] = {
    Lines: panels.lines,
    Regression: panels.regression,
    Series: panels.series,
    Curves: panels.grown,
    Equivalence: panels.equivalence,
}
#: Panels that show arms, one curve for each.
_OF_ARMS = (Lines, Regression, Equivalence)
_HEIGHTS = {1: 2.3, 2: 1.9}  # inches of a row with so many panels; three and more need less
_LEGEND = 0.35


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
    shown = any(len(table) for row in tables for table in row)
    if not shown and not any(
        isinstance(panel, Matrices) and panels.pictured(panel, pictures)
        for panel in chain(*study.figure)
    ):
        return None
    with style.styled():
        figure, places = _laid_out(study.figure, pictures)
        letters = 17 * figure.get_figwidth()
        if note:
            figure.suptitle(style.wrapped(note, letters), fontsize=7, style="italic")
        spots = []
        for row in zip(study.figure, tables, places, strict=True):
            found = []
            for panel, table, place in zip(*row, strict=True):
                if isinstance(panel, Matrices):
                    panels.matrices(place, panel, pictures)
                else:
                    found.append(Spot(panel, table, figure.add_subplot(place)))
            for spot in found:
                _draw_panel(spot, letters / len(found))
            _level(found)
            spots += found
        if warm := [spot for spot in spots if isinstance(spot.panel, Heat) and len(spot.table)]:
            panels.heats(warm)
        _legend(figure, spots)
        # The layout is found once: every file then shows the same picture, to the byte.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


def _laid_out(
    rows: Sequence[Sequence[Panel]], pictures: Pictures
) -> tuple[Figure, list[list[Any]]]:
    """Return an empty figure and the places of its panels, equally wide in each row."""
    from matplotlib.figure import Figure

    heights = [_height(row, pictures) for row in rows]
    alone = sum(map(len, rows)) == 1 and not isinstance(rows[0][0], Matrices)
    arms = len({arm for row in rows for one in row for arm in getattr(one, "arms", ())})
    size = (
        style.COLUMN if alone and arms <= style.MANY else style.FULL,
        sum(heights) + _below(arms),
    )
    figure = Figure(figsize=size, layout="constrained")
    columns = lcm(*map(len, rows))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    places = []
    for number, row in enumerate(rows):
        wide = columns // len(row)
        places.append([grid[number, i * wide : (i + 1) * wide] for i in range(len(row))])
    return figure, places


def _below(arms: int) -> float:
    """Return the inches that a legend takes; many arms also deserve a higher panel."""
    return _LEGEND if arms <= style.MANY else _LEGEND + 0.6 + 0.14 * ceil(arms / _across_many(arms))


def _height(row: Sequence[Panel], pictures: Pictures) -> float:
    if isinstance(row[0], Matrices):
        return 0.45 + 1.45 * len(panels.pictured(row[0], pictures))
    return 2.5 if isinstance(row[0], Heat) else _HEIGHTS.get(len(row), 1.75)


def _draw_panel(spot: Spot, letters: float) -> None:
    """Draw one panel; its title may be so many letters wide."""
    panel, table, axes = spot
    title = getattr(panel, "title", "")
    if isinstance(panel, Heat) and "alpha" not in title:
        title += f", alpha {style.alpha_of(panel.arm)}"
    axes.set_title(style.wrapped(title, letters), linespacing=1.0)
    if not len(table):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", va="center")
    elif not isinstance(panel, Heat):  # heat-maps share their colours, and are drawn together
        _DRAW[type(panel)](spot)


def _level(row: Sequence[Spot]) -> None:
    """Give the panels of a row that show one measure one axis, named on the left."""
    by_measure: dict[str, list[Spot]] = {}
    for spot in row:
        if isinstance(spot.panel, Lines) and len(spot.table):
            by_measure.setdefault(spot.panel.measure, []).append(spot)
    for measure, same in by_measure.items():
        low_high = panels.limits(same)
        for spot in same:
            spot.axes.set_ylim(low_high)
            spot.axes.tick_params(labelleft=spot is same[0])
        same[0].axes.set_ylabel(style.named(measure, style.LETTERS), linespacing=1.0)


def _legend(figure: Figure, spots: Sequence[Spot]) -> None:
    """Explain, below the panels, the arms, the kinds of curves and the stars they show."""
    arms = _arms(spots)
    handles = [*_dense(spots), *_stars(spots), *map(_handle, arms), *_roles(spots)]
    if not handles:
        return
    across = 2 if figure.get_figwidth() <= style.COLUMN else 5
    # Six in three columns: dense and its stars, then each split with both its alphas.
    columns = 3 if len(handles) > across > 2 else min(across, len(handles))
    spacing, letters = 1.6, None
    if len(handles) > style.MANY:
        columns, spacing, letters = _across_many(len(handles)), 1.2, 7
    made = figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False,
        handlelength=2.6, columnspacing=spacing, borderpad=0.2, fontsize=letters,
    )  # fmt: skip
    bold = {one.label for one in arms if one.bold}
    for text in made.get_texts():
        if text.get_text() in bold:
            text.set_fontweight("bold")


def _across_many(arms: int) -> int:
    """Return the columns of a legend of many arms; what has very many has longer names."""
    return 5 if arms <= 15 else 4


def _handle(drawn: style.Look) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=drawn.label, **drawn.curve)


def _dense(spots: Sequence[Spot]) -> Iterable[Line2D]:
    """Yield the dense network, which is an arm, a baseline or both."""
    from matplotlib.lines import Line2D

    dense = style.look("dense")
    with_dense = [one.table for one in spots if isinstance(one.panel, (*_OF_ARMS, Curves))]
    if any("dense" in set(table.get("arm", ())) for table in with_dense):
        yield _handle(dense)
    elif any(getattr(one.panel, "baseline", None) is not None and len(one.table) for one in spots):
        yield Line2D([], [], label=dense.label, **style.BASELINE)


def _stars(spots: Sequence[Spot]) -> Iterable[Line2D]:
    from matplotlib.lines import Line2D

    if any(len(panels.starred(one)) for one in spots if isinstance(one.panel, Lines)):
        yield Line2D([], [], color="black", label=f"p < {LEVEL:g} against dense", **style.STAR)


def _arms(spots: Sequence[Spot]) -> list[style.Look]:
    """Return the looks of the split arms, split by split; methods as they are listed."""
    found = {arm for one in spots if isinstance(one.panel, _OF_ARMS) for arm in one.table["arm"]}
    if not found.isdisjoint(style.METHODS):
        return [style.look(arm) for arm in style.METHODS if arm in found]
    ordered = sorted(
        found - {"dense"}, key=lambda arm: (arm.rpartition("-")[0], style.alpha_of(arm))
    )
    return [style.look(arm) for arm in ordered]


def _roles(spots: Sequence[Spot]) -> list[Line2D]:
    names = [
        name for one in spots if isinstance(one.panel, Series) for name in one.table["measure"]
    ]
    return [_handle(one) for one in dict.fromkeys(map(style.role, names))]


#: What must not get into a file, by its format: it says the same whenever it is written.
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG; files already there are replaced whole or not at all.

    >>> save(draw(study, frame), Path("figures"), study.id)

    The same figure always becomes the same bytes.
    """
    folder = Path(folder)
    pages = {f"{name}.{kind}": _rendered(figure, kind) for kind in _METADATA}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=".unfinished-", ignore_cleanup_errors=True
        ) as beside:
            for page, data in pages.items():
                Path(beside, page).write_bytes(data)
            move_finished(Path(beside), folder, last=f"{name}.svg")
    except OSError as error:
        raise FileError(
            f"could not write the figure {name!r} to {folder}: {error.strerror or error}; "
            "make room there, or choose another folder"
        ) from None
    return [folder / page for page in pages]


def _rendered(figure: Figure, kind: str) -> bytes:
    page = BytesIO()
    with style.styled():
        figure.savefig(page, format=kind, dpi=300, metadata=_METADATA[kind])
    return page.getvalue()
