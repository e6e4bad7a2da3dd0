"""The case study as a demonstration: ``python -m fissile.cli.demo``.

Trains the paper's example on generated data, prints the arms side by side with the paper's
numbers, and draws its Figure 1. It is the study ``codes`` of the lab, in a store of its own, with a
fifth of the paper's epochs: a demonstration should take a minute.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fissile._common.errors import FissileError
from fissile._common.progress import number_of
from fissile.cli import check

if __name__ == "__main__":  # before anything is imported that may be missing
    try:
        check()
    except FissileError as error:
        sys.exit(f"error: {error}")

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fissile.lab.plots import draw, save
from fissile.lab.results import Results
from fissile.lab.run import Bar, run
from fissile.lab.stats import summary
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES

if TYPE_CHECKING:
    from pandas import DataFrame

_STUDY = STUDIES["codes"]
_COLUMNS = {
    "accuracy": ("accuracy %", 1),
    "nonzeros": ("non-zeros", 0),
    "capacity": ("capacity", 2),
    "absolute_cosine": ("|cosine|", 2),
    "collisions": ("collisions", 2),
}


def main(
    trials: Annotated[int, typer.Option(min=1, help="Independent trials.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs before and after the split.")] = 200,
    to: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("fissile-demo"),
) -> None:
    """Run the case study of the paper on generated data."""
    console = Console()
    console.print(
        f"{number_of(trials, 'network')} warm up for {number_of(epochs, 'epoch')}, then go on in "
        f"{len(_STUDY.arms)} arms for {epochs} more."
    )
    try:
        results = trained(trials, epochs)
        figure = draw(_STUDY, results.frame, results.pictures)
        assert figure is not None
        paths = save(figure, to, "codes")
    except KeyboardInterrupt:
        console.print("Stopped; for a quicker look: python -m fissile.cli.demo --epochs 25")
        raise typer.Exit(130) from None
    except FissileError as error:
        console.print(f"error: {error}")
        raise typer.Exit(1) from None
    console.print(_table(results.frame, epochs, trials))
    console.print(verdict(results.frame))
    png = next(path for path in paths if path.suffix == ".png")
    console.print(f"The picture of W1 and its Gram matrix (trial 0) is in {png}", soft_wrap=True)


def trained(trials: int, epochs: int) -> Results:
    """Run the study in a store of its own, which is gone afterwards."""
    changes: dict[str, object] = {"warm_up": epochs, "fine_tune": epochs}
    works = _STUDY.works("paper", trials, changes)
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        with Bar() as bar:
            run(works, store, watcher=bar)
        keys = [work.key for work in works]
        rows, arrays = store.rows(keys), store.arrays(keys)
    made = Run("codes", "paper", trials, changes, "make demo", "")
    return Results(_STUDY, made, works, rows, arrays=arrays)


def _table(frame: DataFrame, epochs: int, trials: int) -> Table:
    table = Table(
        title=f"8 clauses of 4 literals, 8 neurons, alpha 2; {epochs} + {epochs} epochs, "
        f"{number_of(trials, 'trial')}",
        caption="mean ± standard error; the paper trained 1000 + 1000 epochs for this example",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("arm", "paper", *(title for title, _ in _COLUMNS.values())):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    paper = _STUDY.published[0].values[8]
    for arm in _STUDY.arms:
        part, cells = frame[frame["arm"] == arm.name], []
        for name, (_, digits) in _COLUMNS.items():
            mean, error, _ = astuple(summary(part[name]))
            spread = f" ± {error:.{digits}f}" if error > 0 else ""
            cells.append(f"{mean:.{digits}f}{spread}")
        table.add_row(arm.split, f"{paper[arm.name]:.1f}", *cells)
    return table


def verdict(frame: DataFrame) -> str:
    """Return in words whether the arms came out in the paper's order."""
    means = frame.groupby("arm")["accuracy"].mean()
    order = list(means.sort_values().index)
    if order == ["dense", "random-2", "clause-2"]:
        return "As in the paper: dense is below random, and random below clause."
    return f"Not as in the paper: from worst to best the arms came out as {', '.join(order)}."


if __name__ == "__main__":
    typer.run(main)
