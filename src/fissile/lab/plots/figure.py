"""A study's figure: its panels in rows, one legend for all of them, and its files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FileError
from fissile.lab.plots.data import Pictures, points
from fissile.lab.plots.panels import (
    equivalence,
    grown,
    heats,
    limits,
    lines,
    matrices,
    pictured,
    regression,
    series,
    starred,
)
from fissile.lab.plots.style import (
    BASELINE,
    COLUMN,
    FULL,
    LETTERS,
    MANY,
    METHODS,
    STAR,
    Look,
    alpha_of,
    look,
    named,
    role,
    styled,
    wrapped,
)
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame

__all__ = ["draw", "legend", "save"]

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
        lines(axes, panel, table)
    elif isinstance(panel, Regression):
        regression(axes, panel, table)
    elif isinstance(panel, Series):
        series(axes, panel, table)
    elif isinstance(panel, Curves):
        grown(axes, table)
    elif isinstance(panel, Equivalence):
        equivalence(axes, panel, table)


def _level(row: Sequence[_Spot]) -> None:
    """Give the panels of a row that show one measure one axis, named on the left."""
    by_measure: dict[str, list[_Spot]] = {}
    for spot in row:
        if isinstance(spot.panel, Lines) and len(spot.table):
            by_measure.setdefault(spot.panel.measure, []).append(spot)
    for measure, same in by_measure.items():
        low_high = limits([(s.panel, s.table) for s in same if isinstance(s.panel, Lines)])
        for spot in same:
            spot.axes.set_ylim(low_high)
            spot.axes.tick_params(labelleft=spot is same[0])
        same[0].axes.set_ylabel(named(measure, LETTERS), linespacing=1.0)


def _heats(spots: Sequence[_Spot]) -> None:
    warm = [(s.axes, s.panel, s.table) for s in spots if isinstance(s.panel, Heat) and len(s.table)]
    if warm:
        heats(warm)


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


_DPI = 300
#: Formats, and what must not get into them: a file says the same whenever it is written.
_FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "png": {"Software": None},
}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG; files already there are replaced whole or not at all.

    >>> save(draw(study, frame), Path("figures"), study.id)

    The same figure always becomes the same bytes.
    """
    folder = Path(folder)
    pages = {folder / f"{name}.{kind}": _rendered(figure, kind) for kind in _FORMATS}
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in pages}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in pages.items():
            beside[path].write_bytes(data)
        for path, temporary in beside.items():
            temporary.replace(path)
    except OSError as error:
        raise FileError(
            f"could not write the figure {name!r} to {folder}: {error.strerror or error}; "
            "make room there, or choose another folder"
        ) from None
    finally:
        _remove(list(beside.values()))
    return list(pages)


def _rendered(figure: Figure, kind: str) -> bytes:
    page = BytesIO()
    with styled():
        figure.savefig(page, format=kind, dpi=_DPI, metadata=_FORMATS[kind])
    return page.getvalue()


def _remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # the folder is no folder, or not ours: then nothing of ours is in it
            return
