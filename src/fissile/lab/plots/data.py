"""The numbers behind a figure: one table for each panel, and all of them in one for a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from fissile.lab.frame import cells, labelled, pick
from fissile.lab.stats import Line, line, ratios, summary
from fissile.lab.study import Curves, Equivalence, Heat, Lines, Matrices, Regression, Series

if TYPE_CHECKING:
    from pandas import DataFrame

    from fissile.lab.study import Panel, Study

#: What figures show of single networks: first layers, or accuracies (trials, epochs).
Pictures = Mapping[str, NDArray[Any]]
_FIRST = ("panel", "title", "measure", "arm")
_LAST = ("mean", "error", "count", "p", "slope", "intercept", "r2")
_MULTIPLES = ("ratio", "low", "high")


class Spot(NamedTuple):
    """A panel, the numbers it shows, and the axes it is drawn on."""

    panel: Any
    table: DataFrame
    axes: Any


def points(panel: Panel, frame: DataFrame, pictures: Pictures | None = None) -> DataFrame:
    """Return the cells that a panel shows, a row each; none where nothing has run yet."""
    import pandas

    match panel:
        case Lines():
            return _cells(panel, panel.measure, [panel.along], panel.arms, frame)
        case Heat():
            return _cells(panel, panel.measure, [panel.down, panel.across], [panel.arm], frame)
        case Regression():
            x, y = (
                _cells(panel, name, [panel.along], panel.arms, frame)
                .set_index([panel.along, "arm"])["mean"]
                .rename(axis)
                for axis, name in (("x", panel.x), ("y", panel.y))
            )
            return x.to_frame().join(y, how="inner").reset_index()
        case Series():
            return _series(panel, frame)
        case Curves():
            return _curves(panel, pictures or {})
        case Equivalence():
            return _equivalence(panel, frame)
        case Matrices():
            return pandas.DataFrame()


def _cells(
    panel: Lines | Regression | Heat,
    measure: str,
    along: list[str],
    arms: Sequence[str],
    frame: DataFrame,
) -> DataFrame:
    """Return the cells of some arms, compared with the dense arm whether it is shown or not."""
    columns = [*panel.where, measure, "arm", *along]
    if not set(columns) <= set(frame.columns):
        frame = frame.iloc[:0].reindex(columns=list(dict.fromkeys(columns)))
    table = cells(pick(frame, panel.where, [*arms, "dense"]), measure, along)
    return table[table["arm"].isin(list(arms)) & table["mean"].notna()]


def _series(panel: Series, frame: DataFrame) -> DataFrame:
    import pandas

    rows = []
    if {*panel.where, panel.along} <= set(frame.columns):
        for value, cell in pick(frame, panel.where).groupby(panel.along, sort=True):
            known = [name for name in panel.measures if name in cell]
            rows += [(value, name, *astuple(summary(cell[name]))) for name in known]
    table = pandas.DataFrame(rows, columns=[panel.along, "measure", "mean", "error", "count"])
    return table[table["mean"].notna()]


def _curves(panel: Curves, pictures: Pictures) -> DataFrame:
    """Return the accuracy after every epoch of dense, and of the arm from each of its splits on."""
    import pandas

    rows = []
    for name, values in pictures.items():
        arm, _, split = name.partition(" after ")
        if arm in ("dense", panel.arm):
            first = int(split or 0)
            epochs = range(first, values.shape[-1])
            rows += [(arm, first, at + 1, *astuple(summary(values[:, at]))) for at in epochs]
    return pandas.DataFrame(rows, columns=["arm", "warm_up", "epoch", "mean", "error", "count"])


def _equivalence(panel: Equivalence, frame: DataFrame) -> DataFrame:
    """Return accuracy and weights of both arms, and the multiples of the expanded one."""
    import pandas

    if not {"arm", "neurons", "nonzeros", "accuracy", "trial"} <= set(frame.columns):
        return pandas.DataFrame(columns=["arm", "neurons", "nonzeros", "mean", "error", "ratio"])
    part = pick(frame, {}, ["dense", panel.arm])
    cell = ["neurons", "arm"]
    table = cells(part, "accuracy", ["neurons"])
    sizes = part.groupby(cell)["nonzeros"].mean().reset_index()
    multiples = ratios(frame, panel.arm).drop(columns="bound").assign(arm=panel.arm)
    return table.merge(sizes, on=cell).merge(multiples, on=cell, how="left")


def fit(table: DataFrame, arm: str) -> Line:
    """Return the line through an arm's points of a regression."""
    part = table[table["arm"] == arm]
    return line(part["x"], part["y"])


def in_words(panel: Panel) -> str:
    """Return what a panel shows, for those who do not see it."""
    match panel:
        case Matrices(arms=arms):
            return f"First layers and their Gram matrices of {', '.join(arms)}"
        case Lines(measure=y, along=x, arms=arms) | Regression(y=y, x=x, arms=arms):
            text = f"{labelled(y)} against {labelled(x)} for {', '.join(arms)}"
        case Heat(measure=measure, arm=arm, down=down, across=across):
            text = f"{labelled(measure)} of {arm} by {labelled(down)} and {labelled(across)}"
        case Curves(arm=arm):
            text = f"{labelled('accuracy')} over epochs, dense and {arm} split at several times"
        case Equivalence(arm=arm):
            text = f"{labelled('accuracy')} over weights, dense and {arm}"
        case Series(measures=measures, along=along):
            text = f"{', '.join(map(labelled, measures))} against {labelled(along)}"
    return f"{panel.title}: {text}" if panel.title else text


def numbers(study: Study, frame: DataFrame, pictures: Pictures | None = None) -> DataFrame:
    """Return what the figure shows as one long table, a row for every point and every fit.

    >>> numbers(STUDIES["capacity"], frame).to_csv("capacity.csv", index=False)

    Panels are named by row and column. A fit has the measure ``y ~ x``, and its p-value is that of
    a slope of zero; elsewhere p compares the arm with dense. Bounds below zero are not cut here.
    """
    import pandas

    rows = [
        {"panel": f"{down}.{across}", "title": getattr(panel, "title", ""), **row}
        for down, panels in enumerate(study.figure, 1)
        for across, panel in enumerate(panels, 1)
        for row in _rows(panel, frame, pictures)
    ]
    known = {*_FIRST, *_LAST, *_MULTIPLES}
    settings = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in known]
    multiples = _MULTIPLES if any("ratio" in row for row in rows) else ()
    table = pandas.DataFrame(rows, columns=[*_FIRST, *settings, *_LAST, *multiples])
    whole = table[[*settings, "count"]].convert_dtypes()  # 8, not 8.0, where others have none
    return table.assign(**{name: whole[name] for name in whole})


def _rows(panel: Panel, frame: DataFrame, pictures: Pictures | None) -> Iterator[dict[str, Any]]:
    where: Mapping[str, object] = getattr(panel, "where", {})
    if isinstance(panel, Regression):
        for measure in (panel.x, panel.y):
            yield from _rows(Lines(panel.along, measure, panel.arms, where), frame, pictures)
        table = points(panel, frame)
        for arm in dict.fromkeys(table["arm"]):
            row = asdict(fit(table, arm)) | {"error": nan}  # of its slope, not of a point
            yield {**where, "arm": arm, "measure": f"{panel.y} ~ {panel.x}", **row}
        return
    measure = getattr(panel, "measure", "accuracy")
    for row in points(panel, frame, pictures).to_dict("records"):
        yield {**where, "measure": measure, **row}
