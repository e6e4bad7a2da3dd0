"""Plans for large budgets, tried on held-out training samples: where the recipe's came from.

    python benchmarks/recipe_search.py banking77 coarse cifar100 fashionmnist --device cuda

A budget is large if it holds a whole linear classifier. Each of 136 plans is trained on nine tenths
of the training samples, with seeds that no trial has, and judged by the rest; test samples are
not read. Writes a line for each plan: its accuracy at every point and seed, and the most non-zeros.

The kept results (benchmarks/results/recipe-search.json) have four plans more, which split a hidden
layer of 128 neurons in four on the way; that split did not help, and they are not in this script.
"""

import argparse
import datetime
import json
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from about import commit, machine
from contests import percent, written

from fissile.bank.sparse import Plan, Prune, Rewire, train
from fissile.lab.budget_methods import OURS
from fissile.lab.classifier import arrays_on, load
from fissile.lab.studies.frontier import FRONTIERS
from fissile.lab.task import HELD_OUT
from fissile.lab.trial import SEARCHED

TO = Path("recipe-search.json")
#: The dense networks whose budgets are searched, by their neurons. CLINC150 takes no part.
POINTS = {
    "banking77": (86, 216),
    "coarse": (75, 188),
    "cifar100": (163,),
    "fashionmnist": (50, 126),
}
#: One of Banking77's thousand held-out samples is 0.1 points, so it takes more seeds than two.
SEEDS = {"banking77": 4}
PRUNE = Prune(0.1, 0.75, "second-order", 5.0)


def grid(budget):
    """Return the plans: with and without direct weights, in several widths, and changes of one."""
    plans = []
    for lr, dropout in product((1e-3, 3e-3), (0.0, 0.2)):
        dials = {"lr": lr, "decay": 0.3, "dropout": dropout, "smooth": 0.1}
        for direct, widths in ((True, (256, 512, 1024)), (False, (512, 1024, 2048))):
            first = Plan(budget, 512 if direct else 1024, direct=direct, prune=PRUNE, **dials)
            plans += [replace(first, hidden=width) for width in widths]
            plans += [replace(first, hidden=width, smooth=0.0) for width in (512, 1024)]
            plans += [replace(first, **change) for change in changes(first)]
    return plans


def changes(plan):
    """Yield what is changed of a plan, one thing at a time."""
    for prune in (
        Prune(),
        Prune(0.1, 0.75, power=5.0),
        Prune(0.2, 0.75, "second-order"),
        Prune(0.1, 0.9, "second-order", 5.0),
        Prune(0.1, 0.5, "second-order", 3.0),
    ):
        yield {"prune": prune}
    yield {"rewire": Rewire(0.2, grow="gradient", until=0.95)}
    yield {"start": "erdos-renyi", "prune": None, "rewire": Rewire(grow="gradient")}  # RigL
    yield from ({"decay": decay} for decay in (0.1, 1.0))
    yield from ({"lr": plan.lr * times} for times in (0.5, 2.0))
    if plan.dropout:
        yield from ({"dropout": rate} for rate in (0.1, 0.4))


def told(plan):
    """Return a plan's fields: those that every plan has to say, and others that are not usual."""
    fields, usual = asdict(plan), asdict(Plan(plan.budget, 1))
    always = ("hidden", "direct", "lr", "decay", "dropout", "smooth", "prune")
    return {
        name: fields[name]
        for name in (*always, "start", "rewire", "splits")
        if name in always or fields[name] != usual[name]
    }


def cells(names):
    """Return the recipe's cell of the study for every point to be searched."""
    found = []
    for study in FRONTIERS:
        short = study.id.removeprefix("frontier-")
        wanted = POINTS[short] if short in names else ()
        found += [
            (short, cell)
            for cell in study.scales["paper"].settings
            if cell.method == OURS and cell.neurons in wanted
        ]
    return found


def searched(cell, plans, seeds, epochs, device):
    """Return the held-out accuracies of every plan, and the most non-zeros it was left with."""
    x, y, x_held, y_held = arrays_on(load(cell.task).held_out(HELD_OUT).flat(), device)
    accuracy, nonzeros = [None] * len(plans), [0] * len(plans)
    sizes = {"outputs": cell.task.outputs, "epochs": epochs, "batch": cell.batch}
    for stack, places in train(plans, seeds, x, y, **sizes, device=device):
        right, left = stack.accuracy(x_held, y_held).cpu(), stack.nonzeros().cpu()
        for column, place in enumerate(places):
            accuracy[place] = [percent(one) for one in right[:, column].tolist()]
            nonzeros[place] = int(left[:, column].max())
    return accuracy, nonzeros


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", choices=POINTS, help="data sets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--only", type=int, metavar="N", help="the first N plans")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    points, lines = [], {}
    for short, cell in cells(options.sets):
        seeds = [SEARCHED[0] + number for number in range(SEEDS.get(short, 2))]
        plans = grid(cell.budget)[: options.only]
        print(f"{short}, {cell.budget:,} non-zeros: {len(plans)} plans", flush=True)
        points.append({"set": short, "budget": cell.budget, "seeds": seeds})
        found = searched(cell, plans, seeds, options.epochs, options.device)
        for plan, accuracy, nonzeros in zip(plans, *found, strict=True):
            fields = told(plan)
            line = lines.setdefault(
                json.dumps(fields), {"plan": fields, "held_out": [], "nonzeros": []}
            )
            line["held_out"].append(accuracy)
            line["nonzeros"].append(nonzeros)
    about = {
        "command": " ".join(["python", "benchmarks/recipe_search.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": machine(options.device),
        "commit": commit(),
        "torch": torch.__version__,
        "epochs": options.epochs,
    }
    parts = {"about": about, "points": points, "plans": list(lines.values())}
    options.to.write_text(written(parts), "utf-8")
    print(f"{len(lines)} plans at {len(points)} points written to {options.to}")


if __name__ == "__main__":
    main()
