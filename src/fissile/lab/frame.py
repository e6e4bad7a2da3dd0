"""Results as tables: a wide one for figures and claims, a tidy one for everybody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from math import nan
from operator import attrgetter
from typing import TYPE_CHECKING

from fissile._common.errors import FissileError, needs
from fissile.lab.stats import Comparison, compare, fold_change, summary
from fissile.lab.store import Rows
from fissile.lab.trial import KINDS, Work

if TYPE_CHECKING:
    from pandas import DataFrame

#: What tells arms of one trial apart; all other columns describe the trial itself.
ARM = ("arm", "split", "alpha", "clusters", "moments", "every", "fraction", "grow", "allocation")
#: Measures that figures show as a multiple of the dense network's.
_FOLDED = (
    "capacity",
    "means_capacity",
    "atoms_capacity",
    "cosine",
    "absolute_cosine",
    "diagonal_cosine",
)

LABELS = {
    "accuracy": "Test accuracy (%)",
    "nats": "Test loss (nats)",
    "best": "Best test accuracy (%)",
    "improvement": "Relative improvement (%)",
    "per_parameter": "Accuracy per parameter (%)",
    "capacity": "Total feature capacity",
    "cosine": "Mean cosine similarity",
    "absolute_cosine": "Mean absolute cosine similarity",
    "diagonal_cosine": "The same, each neuron with itself too",
    "capacity_fold": "Capacity, fold change",
    "means_capacity_fold": "Capacity of class means, fold change",
    "atoms_capacity_fold": "Capacity of atoms, fold change",
    "cosine_fold": "Cosine, fold change",
    "absolute_cosine_fold": "Absolute cosine, fold change",
    "diagonal_cosine_fold": "The same with itself, fold change",
    "collisions": "Edge collision rate",
    "any_collisions": "Edge collision rate, by any sample",
    "agreement": "Pairwise agreement",
    "adjusted_rand": "Adjusted Rand index",
    "unit_agreement": "Pairwise agreement, by unit rows",
    "unit_adjusted_rand": "Adjusted Rand index, by unit rows",
    "cosine_agreement": "Pairwise agreement, by |cosine|",
    "cosine_adjusted_rand": "Adjusted Rand index, by |cosine|",
    "coded": "Clauses with a code",
    "neurons": "Hidden neurons before the split",
    "clauses": "Clauses",
    "literals": "Literals",
    "classes": "Classes",
    "depth": "Layers of weights",
    "warm_up": "Epochs before the split",
    "epoch": "Epoch",
    "every": "Steps between moves",
    "fraction": "Share of weights moved",
    "nonzeros": "Non-zero weights",
    "budget": "Non-zero parameters",
    "held_out": "Held-out accuracy (%)",
}


def labelled(name: str) -> str:
    """Return how a figure calls a column."""
    return LABELS.get(name, name.replace("_", " "))


def table(
    works: Sequence[Work],
    measures: Rows | Mapping[str, Mapping[str, float]],
    accuracy: str = "accuracy",
) -> DataFrame:
    """Return one row for each finished trial: its settings, its arm, its measures.

    >>> frame = table(works, store.rows(work.key for work in works))

    Accuracies are in percent, as in the paper. Gains are over the dense arm of the same trial, and
    multiples (``_fold``) are of its measures. ``accuracy`` is the measure that is reported as the
    accuracy, of the trials that have it.
    """
    needs("pandas", "lab")
    import pandas

    keys = measures.keys if isinstance(measures, Rows) else measures
    places = {key: place for place, key in enumerate(keys)}
    finished = [work for work in works if work.key in places]
    frame = _settings(finished)
    if isinstance(measures, Rows):
        order = [places[work.key] for work in finished]
        numbers = {name: column[order] for name, column in measures.columns().items()}
    else:
        numbers = dict(pandas.DataFrame([measures[work.key] for work in finished]))
    own = {name: column for name, column in numbers.items() if name not in frame}
    frame = pandas.concat([frame, pandas.DataFrame(own)], axis=1)
    for name in {"accuracy", "best", "warm", "held_out"} & set(frame.columns):
        frame[name] = 100 * frame[name]
    if "accuracy" not in frame:
        return frame
    if accuracy in frame:
        frame["accuracy"] = frame[accuracy].fillna(frame["accuracy"])
    if "nonzeros" in frame:
        frame["per_parameter"] = frame["accuracy"] / frame["nonzeros"]
    # Row for row, the dense network of the same trial; NaN where there is none.
    setting = [name for name in described(frame) if name not in ARM]
    place = frame.groupby(setting, sort=False, dropna=False).ngroup()
    dense = frame[frame["arm"] == "dense"].groupby(place, sort=False).head(1)
    dense = dense.set_axis(place[dense.index]).reindex(place).reset_index(drop=True)
    frame["improvement"] = 100 * (fold_change(frame["accuracy"], dense["accuracy"]) - 1)
    for name in [name for name in _FOLDED if name in frame]:
        frame[f"{name}_fold"] = fold_change(frame[name], dense[name])
    return frame


def _settings(works: Sequence[Work]) -> DataFrame:
    """Return the columns of trials; those of a cell differ in the trial's number alone."""
    import pandas

    parts = {
        name: attrgetter(*(item.name for item in fields(kind) if item.name != "number"))
        for name, kind in KINDS.items()
    }
    cells: dict[tuple[int, ...], int] = {}
    rows, codes = list[dict[str, object]](), list[int]()
    for work in works:
        # The parts of a cell's trials are the same objects: faster to compare than what they hold.
        cell = tuple(map(id, parts[work.kind](work)))
        if cell not in cells:
            cells[cell] = len(rows)
            rows.append(work.columns())
        codes.append(cells[cell])
    frame = pandas.DataFrame(rows).iloc[codes].reset_index(drop=True)
    return frame.assign(trial=[work.number for work in works]) if rows else frame


def described(frame: DataFrame) -> list[str]:
    """Return the columns that say what a trial is; they come first, and end with its number."""
    names = list(frame.columns)
    return names[: names.index("trial") + 1]


def after(arm: str, epochs: int) -> str:
    """Return what curves call an arm that was split after so many epochs."""
    return f"{arm} after {epochs}"


def tidy(frame: DataFrame) -> DataFrame:
    """Return one row per setting, arm, trial and measure."""
    long = frame.melt(id_vars=described(frame), var_name="measure", value_name="value")
    return long.dropna(subset=["value"]).reset_index(drop=True)


def pick(frame: DataFrame, where: Mapping[str, object], arms: Iterable[str] = ()) -> DataFrame:
    """Return the rows with these settings, and of these arms if any are named."""
    for name, value in where.items():
        frame = frame[frame[name] == value]
    wanted = list(arms)
    return frame[frame["arm"].isin(wanted)] if wanted else frame


def cells(frame: DataFrame, measure: str, along: Sequence[str]) -> DataFrame:
    """Return a row for every cell and arm: mean, standard error, trials, p against dense.

    >>> cells(frame, "accuracy", ["neurons"])  # columns neurons, arm, mean, error, count, p
    """
    import pandas

    # What is relative to dense is tested by the measure behind it.
    raw = "accuracy" if measure == "improvement" else measure.removesuffix("_fold")
    rows = []
    for values, cell in frame.groupby(list(along), sort=True):
        arms = list(dict.fromkeys(cell["arm"]))
        for arm in arms:
            compared = arm != "dense" and "dense" in arms
            against = paired(cell, arm, "dense", raw) if compared else None
            p = nan if against is None else against.p
            rows.append((*values, arm, *astuple(summary(cell.loc[cell["arm"] == arm, measure])), p))
    return pandas.DataFrame(rows, columns=[*along, "arm", "mean", "error", "count", "p"])


def paired(cell: DataFrame, arm: str, over: str, measure: str) -> Comparison | None:
    """Compare two arms of one cell trial by trial; None if they have no trial in common."""
    sides = []
    for name in (arm, over):
        rows = cell[cell["arm"] == name].set_index("trial")[measure].dropna()
        if rows.index.has_duplicates:
            raise FissileError(
                f"these rows hold several {name} networks for one trial: they are not one cell"
            )
        sides.append(rows)
    both = sides[0].index.intersection(sides[1].index)
    return compare(sides[0][both], sides[1][both]) if len(both) else None
