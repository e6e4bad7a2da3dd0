"""The case study as a demonstration: ``python -m fissile.demo``.

Trains the paper's example on generated data, prints the arms side by side with the paper's
numbers, and draws its Figure 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fissile.lab.case_study import PAPER, CaseStudy, Outcome, run_trial
from fissile.lab.plots import weights_and_gram

__all__ = ["main"]

Trials = list[list[Outcome]]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit code is 0 unless nothing could be shown."""
    options = _options(arguments)
    console = Console()
    study = CaseStudy(warm_up=options.epochs, fine_tune=options.epochs)
    trials = _run(study, options.trials, console)
    if not trials:
        console.print("Stopped before the first trial was finished; nothing to show.")
        return 1
    console.print(_table(trials, study))
    console.print(_verdict(trials))
    best = max(trials, key=lambda trial: sum(outcome.accuracy for outcome in trial))
    models = {f"{o.arm} ({o.accuracy:.1%})": o.model for o in best}
    path = weights_and_gram(models, study.formula.groups, options.out / "codes.png")
    console.print(f"The picture of W1 and its Gram matrix (trial {best[0].trial}) is in {path}")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fissile.demo",
        description="Run the case study of the paper on generated data.",
        epilog="example: python -m fissile.demo --trials 3 --epochs 100",
    )
    parser.add_argument("--trials", type=int, default=5, help="independent trials (default 5)")
    parser.add_argument(
        "--epochs", type=int, default=25, help="epochs before and after the split (default 25)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fissile-demo"), help="folder for the picture"
    )
    options = parser.parse_args(arguments)
    if options.trials < 1 or options.epochs < 1:
        parser.error("--trials and --epochs must be at least 1")
    return options


def _run(study: CaseStudy, trials: int, console: Console) -> Trials:
    """Run the trials under a progress bar; Ctrl-C keeps those that are finished."""
    epochs = study.warm_up + len(study.arms()) * study.fine_tune
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    done: Trials = []
    with Progress(*columns, TextColumn("epochs"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=trials * epochs)
        try:
            for trial in range(trials):
                bar.update(task, description=f"trial {trial + 1} of {trials}")
                done.append(run_trial(study, trial, lambda: bar.advance(task)))
        except KeyboardInterrupt:
            console.print(f"Stopped; showing the {len(done)} finished trials.")
    return done


def _arm(trials: Trials, arm: str, measure: str) -> list[float]:
    return [float(getattr(o, measure)) for trial in trials for o in trial if o.arm == arm]


def _table(trials: Trials, study: CaseStudy) -> Table:
    table = Table(
        title=f"{study.clauses} clauses of {study.size} literals, {study.neurons} neurons, "
        f"alpha {study.alpha}; {study.warm_up} + {study.fine_tune} epochs, {len(trials)} trials",
        caption="mean ± standard error; the paper trained 1000 + 1000 epochs for this example",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in (
        "arm",
        "accuracy %",
        "paper",
        "non-zeros",
        "capacity",
        "|cosine|",
        "collisions",
    ):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for arm, paper in PAPER.items():
        table.add_row(
            arm,
            _spread([100 * value for value in _arm(trials, arm, "accuracy")], 1),
            f"{100 * paper:.1f}",
            "/".join(str(int(n)) for n in sorted(set(_arm(trials, arm, "nonzeros")))),
            _spread(_arm(trials, arm, "capacity"), 2),
            _spread(_arm(trials, arm, "cosine"), 2),
            _spread(_arm(trials, arm, "collisions"), 2),
        )
    return table


def _spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def _verdict(trials: Trials) -> str:
    """Say plainly whether the arms came out in the paper's order."""
    means = {arm: statistics.fmean(_arm(trials, arm, "accuracy")) for arm in PAPER}
    order = sorted(means, key=lambda arm: means[arm])
    if order == ["dense", "random", "clause"]:
        return "As in the paper: dense is below random, and random below clause."
    return f"Not as in the paper: from worst to best the arms came out as {', '.join(order)}."


if __name__ == "__main__":
    sys.exit(main())
