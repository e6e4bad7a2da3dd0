"""Trying out which network suits some features: dense, split or the recipe, budget by budget.

Networks learn from a part of the training samples and are compared on the rest. No choice is made
on test samples: they only judge what was chosen.
"""

from __future__ import annotations

import html
import io
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError, needs
from fissile.bank import Bank, Data, Dense, Expand
from fissile.bank.spec import Spec
from fissile.bank.step import guess
from fissile.data import catalogue
from fissile.data.features import read_features
from fissile.data.sets import Labelled
from fissile.lab.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (4, 8, 16, 32, 64)
#: Widths at whose budgets the recipe is tried too, which takes much longer.
BUDGETS = (4, 16, 64)
ALPHA, SEEDS, EPOCHS = 4, 3, 25
#: From the simplest on; one that is more complicated must be clearly better to be chosen.
ARMS = ("dense", "split", "recipe")
_CLEAR = 2.0  # standard errors
_HELD = 0.2
BATCH, TRIES = 256, 2  # of the recipe: samples of a step, plans


@dataclass(frozen=True)
class Tried:
    """What an arm came to at a width: its non-zeros, and which held-out samples it got right."""

    arm: str
    width: int
    nonzeros: int
    right: NDArray[np.float64]  # of each held-out sample, the share of seeds
    test: float  # accuracy; shown for what was chosen alone
    curve: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float:
        """Return the held-out accuracy."""
        return float(self.right.mean())

    def clearly_above(self, other: Tried) -> bool:
        """Return whether the difference is more than two standard errors over the samples."""
        each = self.right - other.right
        return bool(each.mean() > _CLEAR * each.std(ddof=1) / len(each) ** 0.5)

    @property
    def options(self) -> dict[str, Any]:
        """Return what makes such a network, as :class:`fissile.sklearn.FissileClassifier` takes."""
        if self.arm == "recipe":
            return {"nonzeros": self.nonzeros, "batch": BATCH, "tries": TRIES}
        return {"hidden": self.width, "alpha": ALPHA if self.arm == "split" else 1}


def samples_of(name: str, label: str = "label") -> Labelled:
    """Read a features file, a table of numbers with a column of labels, or a data set by its name.

    >>> samples_of("features.npz").inputs
    512
    """
    path = Path(name)
    if not path.exists():
        if name not in catalogue.ENTRIES:
            raise FileError(f"{name} is neither a file nor a data set; see: fissile data")
        data = catalogue.load(name).flat()
    elif path.suffix in (".csv", ".parquet") and not _has_features(path):
        data = _table(path, label)
    else:
        data = read_features(path).flat()
    if len(np.unique(data.y)) < 2:
        raise FissileError(f"all training samples of {name} are of one class; give two or more")
    return data


def _has_features(path: Path) -> bool:
    if path.suffix != ".parquet":
        return False
    needs("pyarrow", "data")
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        return "features" in parquet.read_schema(path).names
    except (ArrowException, OSError) as error:
        raise FileError(f"{path}: {str(error).splitlines()[0]}") from None


def _table(path: Path, label: str) -> Labelled:
    """Read a table: a column of labels, one that says train or test if there is one, numbers."""
    import pandas

    try:
        frame = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    except (ValueError, OSError) as error:
        raise FileError(f"{path}: not a readable table: {str(error).splitlines()[0]}") from None
    if label not in frame:
        known = ", ".join(map(str, frame.columns[:8]))
        raise FileError(f"{path} has no column {label!r}, but {known}; name it with --label")
    if frame[label].isna().any():
        raise FileError(f"{path}: {int(frame[label].isna().sum())} rows have no label")
    y, names = pandas.factorize(frame[label], sort=True)
    split = frame.get("split")
    x = frame.drop(columns=[label, "split"], errors="ignore")
    for column in x:
        if not pandas.api.types.is_numeric_dtype(x[column]) or not np.isfinite(x[column]).all():
            raise FileError(f"{path}: the column {column!r} holds NaN or no numbers; leave it out")
    values, names = x.to_numpy(np.float32), tuple(map(str, names))
    if split is None:  # every class alike
        return Labelled(values, y, values[:1], y[:1], names).held_out(_HELD)
    test = (split == "test").to_numpy()
    if not test.any() or test.all() or not split.isin(["train", "test"]).all():
        raise FileError(f"{path}: the column 'split' must say train or test, and both must occur")
    return Labelled(values[~test], y[~test], values[test], y[test], names)


def tried(data: Labelled, most: int = 10_000) -> list[Tried]:
    """Train every arm at every width, on at most so many samples.

    >>> found = tried(samples_of("features.npz"))
    """
    needs("sklearn", "sklearn")
    from fissile.sklearn import search

    if len(data.y) > most:
        part = data.held_out(most)
        data = replace(data, x=part.x_test, y=part.y_test)
    parts = data.held_out(_HELD)
    x, held, test = (np.asarray(one, np.float32) for one in (parts.x, parts.x_test, data.x_test))
    outputs = search.outputs_for(data.classes)
    bank_data = Data(*map(torch.from_numpy, (x, parts.y, held, parts.y_test)))
    specs = [
        Spec([data.inputs, width, outputs], bank_data, seed=seed)
        for width in WIDTHS
        for seed in range(SEEDS)
    ]
    bank = Bank(specs)
    bank.train(until=EPOCHS)
    arms = bank.branch({"dense": Dense(), "split": Expand(ALPHA, budget="all")})
    at_split = [_right(arms.take(i)[0], held, parts.y_test).mean() for i in range(len(arms))]
    arms.train(until=2 * EPOCHS)
    found = []
    for start in range(0, len(arms), 2 * SEEDS):
        for number, arm in enumerate(ARMS[:2]):
            rows = range(start + number, start + 2 * SEEDS, 2)
            modules = [arms.take(row)[0] for row in rows]
            width = specs[start // 2].sizes[1]
            first = start // 2
            warm = bank.accuracy[first : first + SEEDS].double().mean(0).tolist()
            drop = float(np.mean([at_split[row] for row in rows]))
            after = arms.accuracy[list(rows)].double().mean(0).tolist()
            found.append(
                Tried(
                    arm,
                    width,
                    search.dense_size(data.inputs, width, outputs),
                    np.mean([_right(one, held, parts.y_test) for one in modules], 0),
                    float(np.mean([_right(one, test, data.y_test).mean() for one in modules])),
                    (*warm, drop, *after),
                )
            )
    steps = 2 * EPOCHS * max(1, len(x) // BATCH)
    for width in BUDGETS:
        budget = search.dense_size(data.inputs, width, outputs)
        plans = search.plans_for(budget, data.inputs, outputs, TRIES, steps)
        batch = min(BATCH, len(x))
        made = search.PlanSearch(plans, outputs, 2 * EPOCHS, batch).run(x, parts.y, [0], 1)
        right = [_right(made.module, *one) for one in ((held, parts.y_test), (test, data.y_test))]
        found.append(Tried("recipe", width, budget, right[0], float(right[1].mean())))
    return found


def _right(module: torch.nn.Module, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    from fissile.sklearn.search import logits

    right: NDArray[np.float64] = (guess(logits(module.eval(), x)).numpy() == y).astype(np.float64)
    return right


def chosen(found: list[Tried]) -> list[Tried]:
    """Return for every budget the simplest arm that no other is clearly above.

    >>> [(one.nonzeros, one.arm) for one in chosen(found)]
    """
    best = []
    for width in sorted({one.width for one in found}):
        arms = sorted((one for one in found if one.width == width), key=lambda t: ARMS.index(t.arm))
        top = max(arms, key=lambda one: one.accuracy)
        best.append(next(one for one in arms if not top.clearly_above(one)))
    return best


def told(one: Tried, name: str, label: str = "label") -> tuple[str, str]:
    """Return the command and the lines of Python that make such a network."""
    shown = {k: v for k, v in one.options.items() if k in ("nonzeros", "hidden", "alpha")}
    flags = " ".join(f"--{key} {value}" for key, value in shown.items())
    flags += "" if label == "label" else f" --label {shlex.quote(label)}"
    inside = ", ".join(f"{key}={value}" for key, value in one.options.items())
    recipe = "" if one.arm == "recipe" else ', recipe="paper"'
    lines = f"FissileClassifier({inside}{recipe}, random_state=0).fit(x, y)"
    return f"fissile fit {shlex.quote(name)} {flags} --to model.safetensors", lines


def page(found: list[Tried], name: str, text: str, label: str = "label") -> str:
    """Return a page that needs no other file: the table, the commands and the curves."""
    with styled():
        picture = io.StringIO()
        figure(found).savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    ways = [(one, html.escape("\n".join(told(one, name, label)))) for one in chosen(found)]
    rows = "".join(
        f"<h3>{one.nonzeros:,} non-zeros: {one.arm}</h3><pre>{way}</pre>" for one, way in ways
    )
    title = html.escape(f"fissile try {name}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        f"svg{{width:100%;height:auto}}</style><h1>{title}</h1><pre>{html.escape(text)}</pre>"
        f"{svg[svg.index('<svg') :]}{rows}</html>\n"
    )


def figure(found: list[Tried]) -> Figure:
    """Draw accuracy over non-zeros, the gain over width, and the drop with the recovery."""
    needs("matplotlib", "lab")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 2.8), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    by = {arm: [one for one in found if one.arm == arm] for arm in ARMS}
    for arm, ones in by.items():
        accuracies = [100 * one.accuracy for one in ones]
        left.plot([one.nonzeros for one in ones], accuracies, "o-", label=arm)
    left.set(xscale="log", xlabel="non-zeros", ylabel="held-out accuracy, %")
    left.legend()
    gains = [100 * (s.right - d.right) for s, d in zip(by["split"], by["dense"], strict=True)]
    errors = [_CLEAR * one.std(ddof=1) / len(one) ** 0.5 for one in gains]
    middle.errorbar(WIDTHS, [one.mean() for one in gains], errors, fmt="o-", color="C1")
    middle.axhline(0, color="black", linewidth=0.8, linestyle="--")
    middle.set(xscale="log", xlabel="neurons", ylabel="split over dense, points")
    for one in (by["dense"][0], by["split"][0]):
        epochs = [*range(1, EPOCHS + 1), EPOCHS, *range(EPOCHS + 1, 2 * EPOCHS + 1)]
        right.plot(epochs, [100 * value for value in one.curve], label=one.arm)
    right.set(xlabel="epochs", ylabel=f"accuracy at {WIDTHS[0]} neurons, %")
    return drawn
