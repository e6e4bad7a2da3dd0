"""Runs side by side: what differs in their settings, and what that did to their results.

>>> write([load(store, run) for run in store.runs()[:2]], Path("compared"))

Trials pair where two runs have the same arm, cell and trial number: they have one seed. Differences
are against the first run.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FissileError
from fissile.lab import plots
from fissile.lab.frame import described, labelled
from fissile.lab.pages import rendered, whole_folder, write_csv
from fissile.lab.plots import style
from fissile.lab.plots.figure import laid_out_once
from fissile.lab.results import Results, shown, values
from fissile.lab.stats import ENOUGH, interval, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def settings(results: Sequence[Results]) -> list[tuple[str, ...]]:
    """Return the settings that runs differ in: the name, and its values in each run."""
    every = [
        values(result.works) | {"data": {result.study.data(result.run.scale, result.run.changes)}}
        for result in results
    ]
    rows = []
    for name in dict.fromkeys(name for settings in every for name in settings):
        if any(settings.get(name) != every[0].get(name) for settings in every):
            sides = (sorted(own.get(name, ()), key=lambda v: (str(type(v)), v)) for own in every)
            rows.append((name, *(", ".join(map(str, side)) for side in sides)))
    trials = [str(len({work.number for work in result.works})) for result in results]
    return [*rows, ("trials", *trials)] if len(set(trials)) > 1 else rows


def differences(results: Sequence[Results], measure: str = "accuracy") -> DataFrame:
    """Return a row for every cell and arm that a run shares with the first.

    Means are those of the paired trials; ``low`` and ``high`` bound the difference with 95 %
    confidence, and need three pairs.
    """
    import pandas

    first, *others = results
    rows: list[tuple[Any, ...]] = []
    for other in others:
        for arm in dict.fromkeys(first.frame.get("arm", ())):
            rows += _paired(first, other, arm, measure) if arm != "converged" else []
    if not rows:
        names = " and ".join(result.run.name for result in results)
        raise FissileError(
            f"{names} have no trials of {measure} to pair: they need the same arms, cells and "
            "trial numbers; see what they hold with: fissile results RUN"
        )
    columns = ["cell", "arm", "run", "first", "mean", "difference", "low", "high", "pairs"]
    return pandas.DataFrame(rows, columns=columns)


def _paired(first: Results, other: Results, arm: str, measure: str) -> list[tuple[Any, ...]]:
    """Compare one arm of two runs, cell by cell."""
    if any(not result.rows or measure not in result.frame for result in (first, other)):
        return []
    sides = [
        result.frame[result.frame["arm"] == arm].dropna(subset=[measure])
        for result in (first, other)
    ]
    known = [name for name in described(sides[0]) if name in sides[1] and name != "load"]
    # A column without a common value is what was changed: it does not tell cells apart.
    cell = [name for name in known if set(sides[0][name]) & set(sides[1][name])]
    if "trial" not in cell or any(side.duplicated(cell).any() for side in sides):
        return []  # several cells of one run are like one of the other
    table = sides[0].merge(sides[1], on=cell, suffixes=("", " other"))
    axes = [name for name in dict.fromkeys([*first.along, *other.along]) if name in cell]
    varied = [n for n in axes if any(r.frame[n].nunique() > 1 for r in (first, other))]
    varied = varied or axes[:1]
    rows = []
    for place, part in table.groupby(varied or ["arm"], sort=True):
        before, after = part[measure], part[f"{measure} other"]
        gains = after - before
        low, high = interval(gains) if len(part) >= ENOUGH else (nan, nan)
        where = (f"{name} = {at}" for name, at in zip(varied, place, strict=False))
        means = (summary(column).mean for column in (before, after, gains))
        rows.append((", ".join(where), arm, other.run.name, *means, low, high, len(part)))
    return rows


def draw(results: Sequence[Results], table: DataFrame, measure: str = "accuracy") -> Figure:
    """Return a figure of the differences and their confidence intervals, a line for each."""
    with style.styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.FULL, 0.9 + 0.16 * len(table)), layout="constrained")
        axes = figure.add_subplot()
        ends = table[["low", "high"]].sub(table["difference"], axis=0).abs().fillna(0.0)
        axes.axvline(0.0, **style.BASELINE)
        for colour, name in zip(_COLOURS * len(results), dict.fromkeys(table["run"]), strict=False):
            part = table["run"] == name
            axes.errorbar(
                table.loc[part, "difference"], table.index[part], xerr=ends[part].T.to_numpy(),
                fmt="o", markersize=3, color=colour, linewidth=1, label=style.wrapped(name, 40),
            )  # fmt: skip
        texts = (", ".join(filter(None, (r.arm, r.cell))) for r in table.itertuples())
        axes.set_yticks(table.index, list(texts), parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel(
            f"{labelled(measure)}: difference from {results[0].run.name}, 95 % interval"
        )
        if len(results) > 2:
            axes.legend(frameon=False)
        return laid_out_once(figure)


_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]


def texts(table: DataFrame) -> list[tuple[str, ...]]:
    """Return the rows of a table of differences as text."""
    return [
        (
            *(str(row[name]) for name in ("cell", "arm", "run")),
            f"{row['first']:.4g}",
            f"{row['mean']:.4g}",
            f"{row['difference']:+.3g}",
            f"{row['low']:+.3g} to {row['high']:+.3g}" if row["low"] == row["low"] else "–",
            str(row["pairs"]),
        )
        for row in table.to_dict("records")
    ]


def write(results: Sequence[Results], folder: Path, measure: str = "accuracy") -> Path:
    """Write runs side by side as a page, with its figure and numbers, and return the page."""
    table = differences(results, measure)
    with whole_folder(Path(folder), "the comparison") as beside:
        paths = plots.save(draw(results, table, measure), beside, "compare")
        write_csv(beside / "compare.csv", table.to_dict("records"))
        svg = next(path for path in paths if path.suffix == ".svg").read_bytes()
        page = rendered(
            "compare.html.jinja",
            names=[shown(result.run) for result in results],
            first=results[0].run.name,
            notes=[(result.run.name, result.note) for result in results if result.note],
            settings=settings(results),
            rows=texts(table),
            measure=labelled(measure),
            source=f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
            enough=ENOUGH,
        )
        (beside / "index.html").write_text(page, "utf-8", newline="\n")
    return Path(folder) / "index.html"
