"""The case study as a demonstration: ``python -m fissile.cli.demo``.

Trains the paper's example on generated data, prints the arms side by side with the paper's
numbers, and draws its Figure 1. It is the study ``codes`` of the lab, in a store of its own, with a
fifth of the paper's epochs: a demonstration should take a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from fissile._common.errors import FissileError
from fissile.lab.plots import draw, save
from fissile.lab.results import Results
from fissile.lab.run import Bar, run
from fissile.lab.stats import summary
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.trial import Trial

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["main"]

_STUDY = STUDIES["codes"]
_COLUMNS = {
    "accuracy": ("accuracy %", 1),
    "nonzeros": ("non-zeros", 0),
    "capacity": ("capacity", 2),
    "absolute_cosine": ("|cosine|", 2),
    "collisions": ("collisions", 2),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit code is 0 unless it failed or was interrupted."""
    options, console = _options(arguments), Console()
    console.print(
        f"{options.trials} networks warm up for {options.epochs} epochs, then go on in "
        f"{len(_STUDY.arms)} arms for {options.epochs} more."
    )
    begin = time.perf_counter()
    try:
        results = _run(options.trials, options.epochs)
        console.print(_table(results.frame, options.epochs, options.trials))
        console.print(_verdict(results.frame))
        console.print(f"{_steps(results):,} steps in {time.perf_counter() - begin:.0f} s.")
        figure = draw(_STUDY, results.frame, results.pictures)
        assert figure is not None
        paths = save(figure, options.out, "codes")
    except KeyboardInterrupt:
        console.print("Stopped; for a quicker look: python -m fissile.cli.demo --epochs 25")
        return 130
    except FissileError as error:
        console.print(f"error: {error}")
        return 1
    png = next(path for path in paths if path.suffix == ".png")
    console.print(f"The picture of W1 and its Gram matrix (trial 0) is in {png}", soft_wrap=True)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fissile.cli.demo",
        description="Run the case study of the paper on generated data.",
        epilog="example: python -m fissile.cli.demo --trials 3 --epochs 100",
    )
    parser.add_argument("--trials", type=int, default=10, help="independent trials (default 10)")
    parser.add_argument(
        "--epochs", type=int, default=200, help="epochs before and after the split (default 200)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fissile-demo"), help="folder for the picture"
    )
    options = parser.parse_args(arguments)
    if options.trials < 1 or options.epochs < 1:
        parser.error("--trials and --epochs must be at least 1")
    return options


def _run(trials: int, epochs: int) -> Results:
    changes: dict[str, object] = {"warm_up": epochs, "fine_tune": epochs}
    works = _STUDY.works("paper", trials, changes)
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        with Bar() as bar:
            run(works, store, watcher=bar)
        rows = store.rows([work.key for work in works])
    return Results(_STUDY, Run("codes", "paper", trials, changes, "make demo", ""), works, rows)


def _steps(results: Results) -> int:
    """Count the steps that were made: the arms of a trial share its warm-up."""
    first = results.works[0]
    assert isinstance(first, Trial)
    dense = first.steps // 2
    return dense * (len(results.works) + len(results.works) // len(_STUDY.arms))


def _table(frame: DataFrame, epochs: int, trials: int) -> Table:
    table = Table(
        title=f"8 clauses of 4 literals, 8 neurons, alpha 2; {epochs} + {epochs} epochs, "
        f"{trials} trials",
        caption="mean ± standard error; the paper trained 1000 + 1000 epochs for this example",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("arm", "paper", *(title for title, _ in _COLUMNS.values())):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    paper = _STUDY.published[0].values[8]
    for arm in _STUDY.arms:
        part = frame[frame["arm"] == arm.name]
        cells = [_spread(part[name], digits) for name, (_, digits) in _COLUMNS.items()]
        table.add_row(arm.split, f"{paper[arm.name]:.1f}", *cells)
    return table


def _spread(values: DataFrame, digits: int) -> str:
    found = summary(values)
    if not found.error > 0:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} ± {found.error:.{digits}f}"


def _verdict(frame: DataFrame) -> str:
    """Say plainly whether the arms came out in the paper's order."""
    means = frame.groupby("arm")["accuracy"].mean()
    order = list(means.sort_values().index)
    if order == ["dense", "random-2", "clause-2"]:
        return "As in the paper: dense is below random, and random below clause."
    return f"Not as in the paper: from worst to best the arms came out as {', '.join(order)}."


if __name__ == "__main__":
    sys.exit(main())
