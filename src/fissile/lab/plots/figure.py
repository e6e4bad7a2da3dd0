"""A study's figure: its panels in rows, one legend for all of them, and its files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import ceil, lcm
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FileError
from fissile._common.files import move_finished
from fissile.lab.plots import panels, style
from fissile.lab.plots.data import Pictures, Spot, points
from fissile.lab.stats import LEVEL
from fissile.lab.study import Curves, Equivalence, Heat, Lines, Matrices, Regression, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame

    from fissile.lab.study import Panel, Study

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
_LETTERS_BELOW = 76  # more names in one row would not fit


def draw(
    study: Study, frame: DataFrame, pictures: Pictures | None = None, note: str = ""
) -> Figure | None:
    """Return the figure of a study, or None where there is nothing to show yet.

    >>> draw(STUDIES["codes"], frame, {"dense": w1, "clause-2": split})

    Args:
        study: what to draw.
        frame: its trials, from :func:`fissile.lab.frame.table`.
        pictures: the first layer of each arm, NaN where a weight does not exist; or accuracies.
        note: what a reader of the figure alone must know, such as whose features these are.
    """
    pictures = pictures or {}
    tables = [[points(panel, frame, pictures) for panel in row] for row in study.figure]
    matrices = [panel for panel in chain(*study.figure) if isinstance(panel, Matrices)]
    if not any(map(len, chain(*tables))) and not any(
        panels.pictured(panel, pictures) for panel in matrices
    ):
        return None
    with style.styled():
        figure, places = _laid_out(study.figure, pictures)
        letters = 17 * figure.get_figwidth()
        if note:
            figure.suptitle(style.wrapped(note, letters), fontsize=7, style="italic")
        spots: list[Spot] = []
        several = sum(map(len, study.figure)) > 1
        for row in zip(study.figure, tables, places, strict=True):
            in_row = []
            for panel, table, place in zip(*row, strict=True):
                if isinstance(panel, Matrices):
                    panels.matrices(place, panel, pictures)
                else:
                    in_row.append(Spot(panel, table, figure.add_subplot(place)))
            for number, spot in enumerate(in_row, len(spots)):
                letter = f"({ascii_lowercase[number]}) " if several else ""
                _draw_panel(spot, letter, letters / len(in_row) - len(letter) / 2)
            _level(in_row)
            spots += in_row
        if warm := [spot for spot in spots if isinstance(spot.panel, Heat) and len(spot.table)]:
            panels.heats(warm)
        _legend(figure, spots)
        return laid_out_once(figure)


def laid_out_once(figure: Figure) -> Figure:
    """Return the figure with its layout kept: every file shows the same picture, to the byte."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:  # the last digits of a layout may differ from run to run
        left, bottom, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(left, 9), round(bottom, 9), round(width, 9), round(height, 9)))
    return figure


def _laid_out(
    rows: Sequence[Sequence[Panel]], pictures: Pictures
) -> tuple[Figure, list[list[Any]]]:
    """Return an empty figure and the places of its panels, equally wide in each row."""
    from matplotlib.figure import Figure

    heights = [_height(row, pictures) for row in rows]
    alone = sum(map(len, rows)) == 1 and not isinstance(rows[0][0], Matrices)
    arms = len({arm for panel in chain(*rows) for arm in getattr(panel, "arms", ())})
    width, below = style.COLUMN if alone else style.FULL, _LEGEND
    if arms > style.MANY:  # they need a legend of several rows, and deserve a higher panel
        width, below = style.FULL, _LEGEND + 0.6 + 0.14 * ceil(arms / _across_many(arms))
    figure = Figure(figsize=(width, sum(heights) + below), layout="constrained")
    columns = lcm(*map(len, rows))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    places = []
    for number, row in enumerate(rows):
        wide = columns // len(row)
        places.append([grid[number, i * wide : (i + 1) * wide] for i in range(len(row))])
    return figure, places


def _height(row: Sequence[Panel], pictures: Pictures) -> float:
    if isinstance(row[0], Matrices):
        return 0.45 + 1.45 * len(panels.pictured(row[0], pictures))
    return 2.5 if isinstance(row[0], Heat) else _HEIGHTS.get(len(row), 1.75)


def _draw_panel(spot: Spot, letter: str, letters: float) -> None:
    """Draw one panel; its title may have this many letters in a line.

    A study may have the paper's own letters in its titles; those of the figure are in its order.
    """
    panel, table, axes = spot
    title = letter + re.sub(r"^\([a-z]\) ", "", getattr(panel, "title", ""))
    if isinstance(panel, Heat) and "alpha" not in title:
        title += f", alpha {style.alpha_of(panel.arm)}"
    axes.set_title(style.wrapped(title.strip(), letters), linespacing=1.0)
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
    handles = [*_baseline_and_stars(spots), *map(_handle, arms), *_roles(spots)]
    if not handles:
        return
    across = 2 if figure.get_figwidth() <= style.COLUMN else 5
    # Six in three columns: dense and its stars, then each split with both its alphas.
    wide = sum(len(str(handle.get_label())) for handle in handles) > _LETTERS_BELOW
    narrow = across == 2
    columns = 3 if not narrow and (len(handles) > across or wide) else min(across, len(handles))
    spacing, letters = 1.6, None
    if len(handles) > style.MANY:
        columns, spacing, letters = _across_many(len(handles)), 1.2, 7
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False,
        handlelength=2.6, columnspacing=spacing, borderpad=0.2, fontsize=letters,
    )  # fmt: skip
    bold = {arm.label for arm in arms if arm.bold}
    for text in legend.get_texts():
        if text.get_text() in bold:
            text.set_fontweight("bold")


def _across_many(arms: int) -> int:
    """Return the columns of a legend of many arms; what has very many has longer names."""
    return 5 if arms <= 15 else 4


def _handle(drawn: style.Look) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=drawn.label, **drawn.curve)


def _baseline_and_stars(spots: Sequence[Spot]) -> Iterable[Line2D]:
    """Yield the dense network, which is an arm, a baseline or both, and the meaning of stars."""
    from matplotlib.lines import Line2D

    dense = style.look("dense")
    with_dense = [spot.table for spot in spots if isinstance(spot.panel, (*_OF_ARMS, Curves))]
    based = [spot for spot in spots if getattr(spot.panel, "baseline", None) is not None]
    if any("dense" in set(table.get("arm", ())) for table in with_dense):
        yield _handle(dense)
    elif any(len(spot.table) for spot in based):
        yield Line2D([], [], label=dense.label, **style.BASELINE)
    lined = [spot for spot in spots if isinstance(spot.panel, Lines)]
    lower = [sign for spot in lined for sign in panels.is_lower(spot)]
    for way, mark in ((False, style.STAR), (True, style.LOWER)):
        if way in lower:
            text = f"{'below' if way else 'above'} dense, p < {LEVEL:g}{_of_alpha(lined)}"
            yield Line2D([], [], color="black", label=text, **mark)


def _of_alpha(lined: Sequence[Spot]) -> str:
    """Return the expansion factor of the arms with stars, where others are drawn without."""
    shown = {style.alpha_of(arm) for spot in lined for arm in spot.table["arm"]} - {1}
    marked = {style.alpha_of(arm) for spot in lined for arm in spot.panel.stars}
    return f" (α = {min(marked)})" if len(marked) == 1 and shown > marked else ""


def _arms(spots: Sequence[Spot]) -> list[style.Look]:
    """Return the looks of the split arms, split by split; methods as they are listed."""
    tables = [spot.table for spot in spots if isinstance(spot.panel, _OF_ARMS)]
    arms = {arm for table in tables for arm in table["arm"]} - {"dense"}
    if not arms.isdisjoint(style.METHODS):
        return [style.look(arm) for arm in style.METHODS if arm in arms]
    ordered = sorted(arms, key=lambda arm: (arm.rpartition("-")[0], style.alpha_of(arm)))
    return [style.look(arm) for arm in ordered]


def _roles(spots: Sequence[Spot]) -> list[Line2D]:
    tables = [spot.table for spot in spots if isinstance(spot.panel, Series)]
    looks = dict.fromkeys(style.role(name) for table in tables for name in table["measure"])
    return list(map(_handle, looks))


#: What must not get into a file, by its format: it says the same whenever it is written.
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG; files already there are replaced whole or not at all.

    >>> save(draw(study, frame), Path("figures"), study.id)

    The same figure always becomes the same bytes.
    """
    folder, names = Path(folder), [f"{name}.{kind}" for kind in _METADATA]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            style.styled(),
            tempfile.TemporaryDirectory(
                dir=folder, prefix=".unfinished-", ignore_cleanup_errors=True
            ) as beside,
        ):
            for page, metadata in zip(names, _METADATA.values(), strict=True):
                figure.savefig(Path(beside, page), dpi=300, metadata=metadata)
            move_finished(Path(beside), folder, last=f"{name}.svg")
    except OSError as error:
        raise FileError(
            f"could not write the figure {name!r} to {folder}: {error.strerror or error}; "
            "make room there, or choose another folder"
        ) from None
    return [folder / page for page in names]
