"""FissileClassifier's short search beside the full one, on data mostly not used to choose it.

    FISSILE_DATA=... python benchmarks/sklearn_search.py
    python benchmarks/sklearn_search.py --only digits --seeds 2     # writes no file

The short search tries plans for half the epochs, the full one for all of them; both take the best
and train it on all samples from the same seed, so a pair differs only where their plans do. Every
seed draws other samples. Seconds are those of processors. The last line is one JSON object.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
from about import made
from sklearn.datasets import load_digits, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler

from fissile.data import load
from fissile.sklearn import FissileClassifier, search

TO = Path(__file__).parents[1] / "docs" / "parts" / "classifier-search.md"


def drawn(separation):
    def make(seed):
        return make_classification(
            12_000, 64, n_informative=24, n_redundant=16, n_classes=16, n_clusters_per_class=2,
            class_sep=separation, random_state=100 + seed,
        )  # fmt: skip

    return make


def digits(change):
    def make(seed):
        x, y = load_digits(return_X_y=True)
        return change(x / 16, np.random.default_rng(seed)), y

    return make


def parity(seed):
    x, y = load_digits(return_X_y=True)
    return x / 16, y % 2


def kept(name):
    def make(seed):
        held = load(name)
        x = np.concatenate([held.x, held.x_test]).astype(np.float32)
        return x.reshape(len(x), -1), np.concatenate([held.y, held.y_test])

    return make


#: For each data set: who makes it, samples to train on, the budget.
DATA = {
    "generated, classes far apart (2.0)": (drawn(2.0), 3_000, 4_000),
    "generated, classes closer (1.2)": (drawn(1.2), 3_000, 4_000),
    "generated, classes close (0.7)": (drawn(0.7), 3_000, 4_000),
    "digits with noise": (digits(lambda x, r: x + r.normal(0, 0.3, x.shape)), 1_300, 2_000),
    "digits, a third of pixels missing, permuted": (
        digits(lambda x, r: (x * (r.random(x.shape) > 1 / 3))[:, r.permutation(64)]),
        1_300,
        2_000,
    ),
    "digits, odd or even": (parity, 1_300, 1_000),
    "FashionMNIST": (kept("fashionmnist"), 3_000, 5_000),
    "CLINC150": (kept("clinc150-minilm"), 5_000, 20_000),
}  # fmt: skip


def fitted(x, y, rows, budget, seed, share):
    """Return the test accuracy in %, the plan and the processor's seconds of a fit."""
    usual, search._TRIED_SHARE = search._TRIED_SHARE, share
    held = np.setdiff1d(np.arange(len(x)), rows)
    scaler = StandardScaler().fit(x[rows])
    begin = time.process_time()
    try:
        model = FissileClassifier(nonzeros=budget, random_state=seed)
        model.fit(scaler.transform(x[rows]), y[rows])
    finally:
        search._TRIED_SHARE = usual
    taken = time.process_time() - begin
    return 100 * model.score(scaler.transform(x[held]), y[held]), str(model.plan_), taken


def compared(name, seeds):
    """Return both searches' accuracies, whether they agree, and their seconds, seed by seed."""
    make, count, budget = DATA[name]
    found = []
    for seed in range(seeds):
        x, y = make(seed)
        rows = np.random.default_rng(seed).permutation(len(x))[:count]
        short, full = (
            fitted(x, y, rows, budget, seed, share) for share in (search._TRIED_SHARE, 1.0)
        )
        found.append({"short": short[0], "full": full[0], "same": short[1] == full[1],
                      "seconds": [short[2], full[2]]})  # fmt: skip
        print(name, found[-1], flush=True)
    return found


def row(name, found):
    """Return a line of the table: means and the paired difference with its standard error."""
    short, full = (np.array([one[kind] for one in found]) for kind in ("short", "full"))
    differences = short - full
    error = differences.std(ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.nan
    seconds = np.mean([one["seconds"] for one in found], axis=0)
    same = sum(one["same"] for one in found)
    return (
        f"| {name} | {len(found)} | {full.mean():.2f} | {short.mean():.2f} | "
        f"{differences.mean():+.2f} ± {error:.2f} | {differences.min():+.2f} | {same} | "
        f"{seconds[1]:.0f} | {seconds[0]:.0f} |"
    )


def page(found, about):
    """Return the table, and what all pairs come to."""
    every = [one["short"] - one["full"] for each in found.values() for one in each]
    lines = [
        "| data | seeds | full search, % | short search, % | short less full, points | worst seed "
        "| same plan | full, s | short, s |",
        "| --- " * 9 + "|",
        *(row(name, each) for name, each in found.items()),
        "",
        f"All {len(every)} pairs: {np.mean(every):+.2f} points on average, "
        f"{sum(one < -0.05 for one in every)} lower by more than 0.05, "
        f"{sum(one > 0.05 for one in every)} higher. Seconds of processor for a fit. "
        f"{about['machine']}; {about['date']}, commit {about['commit']}: `{about['command']}`",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="data sets with this in their names; no file")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    about = made()
    found = {name: compared(name, options.seeds) for name in DATA if options.only in name}
    print(text := page(found, about))
    if not options.only:
        TO.write_text(text, "utf-8")
    print(json.dumps(about | {"found": found}))


if __name__ == "__main__":
    main()
