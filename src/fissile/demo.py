"""The case study as a demonstration: ``python -m fissile.demo``.

Trains the paper's example on generated data, prints the arms side by side with the paper's
numbers, and draws its Figure 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fissile.bank import Progress
from fissile.lab.case_study import PAPER, CaseStudy, Outcome, run
from fissile.lab.plots import weights_and_gram

__all__ = ["main"]

Trials = list[list[Outcome]]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit code is 0 unless it was interrupted."""
    options = _options(arguments)
    console = Console()
    study = CaseStudy(warm_up=options.epochs, fine_tune=options.epochs, trials=options.trials)
    console.print(
        f"{study.trials} networks warm up for {study.warm_up} epochs, then go on in "
        f"{len(study.arms())} arms for {study.fine_tune} more."
    )
    begin = time.perf_counter()
    try:
        trials = run(study, Progress())
    except KeyboardInterrupt:
        console.print("Stopped; for a quicker look: python -m fissile.demo --epochs 25")
        return 130
    console.print(_table(trials, study))
    console.print(_verdict(trials))
    console.print(f"{_steps(study):,} training steps in {time.perf_counter() - begin:.0f} s.")
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
    parser.add_argument("--trials", type=int, default=10, help="independent trials (default 10)")
    parser.add_argument(
        "--epochs", type=int, default=1000, help="epochs before and after the split (default 1000)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fissile-demo"), help="folder for the picture"
    )
    options = parser.parse_args(arguments)
    if options.trials < 1 or options.epochs < 1:
        parser.error("--trials and --epochs must be at least 1")
    return options


def _steps(study: CaseStudy) -> int:
    epochs = study.warm_up + len(study.arms()) * study.fine_tune
    return study.trials * epochs * -(-study.train // 64)


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
