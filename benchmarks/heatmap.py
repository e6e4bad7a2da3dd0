"""How long the heat-map of the paper's Figure 3 takes on the bank, and how long a loop would.

    PYTHONPATH=src python benchmarks/heatmap.py [--epochs 25] [--trials 5]

Eight widths by eight numbers of clauses, five trials, the dense arm and both splits at alpha 2 and
4. The loop's time is its measured time per step on networks of the same sizes, times the steps.
"""

import argparse
import datetime
import json
import time

import torch
from bank import commit, machine

import fissile
from fissile.bank import Bank, Data, Dense, Expand, Progress, Spec
from fissile.data import Formula, dnf_task
from fissile.train import Recipe, fit

WIDTHS = CLAUSES = (4, 8, 12, 16, 20, 24, 28, 32)
SAMPLES = 10_000


def heatmap(trials, epochs):
    """Train every network of the figure and return its mean relative improvements, in percent."""
    table = {}
    for clauses in CLAUSES:
        specs = []
        for trial in range(trials):
            train, test = dnf_task(clauses, train=SAMPLES, test=2_000, seed=trial)
            data = Data(train.x, train.y, test.x, test.y)
            specs += [Spec([4 * clauses, width, 1], data, seed=trial) for width in WIDTHS]
        bank = Bank(specs)
        bank.train(until=epochs, progress=Progress())
        by_clause = fissile.Groups(Formula(clauses).groups)
        arms = {"dense": Dense()}
        for alpha in (2, 4):
            arms[f"random {alpha}"] = Expand(alpha)
            arms[f"clause {alpha}"] = Expand(alpha, by_clause)
        branched = bank.branch(arms)
        branched.train(until=2 * epochs, progress=Progress())
        last = branched.last.view(trials, len(WIDTHS), len(arms))
        gain = 100 * (last / last[..., :1] - 1).mean(0)  # (widths, arms)
        for arm, column in zip(list(arms)[1:], gain.T[1:], strict=True):
            table.setdefault(arm, {})[clauses] = [round(v, 1) for v in column.tolist()]
    return table


def loop_seconds_per_step(steps=300):
    """The plain loop's time for a step, averaged over the corners of the figure."""
    total = 0.0
    for clauses, width in ((4, 4), (4, 32), (32, 4), (32, 32)):
        train, _ = dnf_task(clauses, train=64 * steps, test=2)
        model = fissile.MLP([4 * clauses, width, 1])
        adam = torch.optim.Adam(model.parameters(), 1e-3)
        fit(model, adam, train.x[:640], train.y[:640], epochs=1, seed=0)
        begin = time.perf_counter()
        fit(model, adam, train.x, train.y, epochs=1, seed=0, recipe=Recipe())
        total += (time.perf_counter() - begin) / steps
    return total / 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args()
    begin = time.perf_counter()
    table = heatmap(options.trials, options.epochs)
    seconds = time.perf_counter() - begin
    cells = len(WIDTHS) * len(CLAUSES)
    steps = cells * options.trials * 6 * options.epochs * -(-SAMPLES // 64)
    per_step = loop_seconds_per_step()
    for arm, rows in table.items():
        print(f"\nrelative improvement in % of the {arm} split; widths {WIDTHS}")
        for clauses, row in rows.items():
            print(f"{clauses:>4} clauses" + "".join(f"{value:>7.1f}" for value in row))
    print(
        f"\n{steps:,} steps in {seconds:.0f} s; a loop would take {steps * per_step / 3600:.1f} h"
    )
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "commit": commit(),
        "torch": torch.__version__,
        "steps": steps,
        "seconds": round(seconds, 1),
        "loop_us_per_step": round(1e6 * per_step, 1),
        "loop_hours": round(steps * per_step / 3600, 2),
        "loop/bank": round(steps * per_step / seconds, 1),
        "relative_improvement_percent": table,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
