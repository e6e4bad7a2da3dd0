"""Accuracy at a budget of non-zero parameters: FissileClassifier and what one would use instead.

    python benchmarks/sklearn_table.py          # half an hour on two idle cores
    python benchmarks/sklearn_table.py --quick  # digits alone, two seeds, writes nothing

Writes docs/parts/classifier-table.md. CIFAR-100's features are looked for as `fissile data` says.
The last line it prints is one JSON object.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import sklearn
import torch
from about import commit, machine
from joblib import Parallel, delayed
from sklearn_rivals import BEST, LOGISTIC, NETWORKS, digits, features, job

import fissile

TO = Path(__file__).parents[1] / "docs" / "parts" / "classifier-table.md"


def jobs(quick):
    """Cut the work into pieces, the longest first."""
    few = [500, 1000, 2000, 5000]
    if not quick:
        task, many = features(), [5000, 10_000, 20_000, 50_000]
        yield LOGISTIC, task, many, 0
        for name in (BEST, *(one for one in reversed(NETWORKS) if one != BEST)):
            yield from ((name, task, [budget], s) for budget in reversed(many) for s in range(3))
    for seed in range(2 if quick else 5):
        task = digits(seed)
        yield LOGISTIC, task, few, seed
        yield from ((name, task, few, seed) for name in NETWORKS)


def statistics(rows):
    """Return mean and standard error (none for one run) and the non-zeros of every cell."""
    cells = {}
    for task, budget, name, accuracy, nonzeros in rows:
        cells.setdefault((task, budget, name), []).append((100 * accuracy, nonzeros))
    found = {}
    for key, values in cells.items():
        accuracy = np.array([value for value, _ in values])
        error = accuracy.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
        found[key] = float(accuracy.mean()), error, max(count for _, count in values)
    return found


def cell(value):
    mean, error, _ = value
    return f"{mean:.1f}" + ("" if error is None else f" ± {error:.1f}")


ABOUT = {
    "digits": (
        "Digits: 8 x 8 pixels, 10 classes, 1,347 samples to train on and 450 to test with, split "
        "anew for every seed; 100 + 100 epochs, five seeds."
    ),
    "CIFAR-100": (
        "CIFAR-100: 512 features of a frozen EfficientNet-Lite2 (ImageNet-supervised, PCA; not "
        "CLIP), 100 classes, 50,000 samples to train on and 10,000 to test with; 25 + 25 epochs, "
        "three seeds. Logistic regression draws no random numbers and runs once."
    ),
}


def table(name, cells):
    """Lay out a task: first those who spend what they like of the budget, each with its count."""
    own, alike = (BEST, LOGISTIC), [one for one in NETWORKS if one != BEST]
    heads = ["budget", *(part for one in own for part in (one, "its non-zeros")), *alike]
    heads.append("their non-zeros")
    lines = [ABOUT[name], "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for budget in sorted({b for task, b, _ in cells if task == name}):
        row = {one: cells[name, budget, one] for one in (*own, *alike)}
        used = {row[one][2] for one in alike}
        assert len(used) == 1, "the networks differ in their non-zeros"
        assert max(value[2] for value in row.values()) <= budget, "somebody spent too much"
        values = [f"{budget:,}"]
        for one in own:
            values += [cell(row[one]), f"{row[one][2]:,}"]
        values += [*(cell(row[one]) for one in alike), f"{used.pop():,}"]
        lines.append(f"| {' | '.join(values)} |")
    return [*lines, ""]


def verdicts(name, cells):
    """Say who is best at every budget, and who cannot be told apart from the best."""
    for budget in sorted({b for task, b, _ in cells if task == name}):
        row = {one: v for (task, b, one), v in cells.items() if (task, b) == (name, budget)}
        best = max(row, key=lambda one: row[one][0])
        near = [
            one
            for one, value in row.items()
            if one != best
            and row[best][0] - value[0] < 2 * np.hypot(value[1] or 0, row[best][1] or 0)
        ]
        level = f"; within two standard errors of it: {', '.join(near)}" if near else ""
        yield f"- {name}, {budget:,}: best is {best} ({cell(row[best])}){level}."


def page(cells, about):
    tasks = [name for name in ABOUT if any(name == task for task, _, _ in cells)]
    lines = ["Test accuracy in %, mean ± standard error.", ""]
    for name in tasks:
        lines += table(name, cells)
    lines += ["Who is best:", ""]
    lines += [line for name in tasks for line in verdicts(name, cells)]
    lines += ["", f"{about['machine']}; {about['date']}, commit {about['commit']}, fissile "]
    lines[-1] += f"{about['fissile']}, scikit-learn {about['scikit-learn']}, torch {about['torch']}"
    lines[-1] += f", {about['minutes']} minutes: `{about['command']}`"
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits alone, two seeds; no file")
    options = parser.parse_args()
    begin, source = time.perf_counter(), commit()  # it may move on while this runs
    run = Parallel(n_jobs=os.cpu_count())
    rows = [
        row for part in run(delayed(job)(*work) for work in jobs(options.quick)) for row in part
    ]
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": source,
        "fissile": fissile.__version__,
        "scikit-learn": sklearn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        "command": " ".join(["python", "benchmarks/sklearn_table.py", *sys.argv[1:]]),
    }
    text = page(statistics(rows), about)
    print(text)
    if not options.quick:
        TO.write_text(text, "utf-8")
    print(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
