"""How long FissileClassifier should try its plans: each course's choice, and what it comes to.

    python benchmarks/sklearn_trials.py --features DIR   # banking77 and clinc150, .safetensors
    python benchmarks/sklearn_trials.py --only D0        # one drawn set

All six plans are trained on nine tenths of a training set for 4 to 50 epochs, and the best on the
held-out tenth is taken. What it comes to after 50 epochs on all of the training set is counted on
3,000 other samples; those of real sets are from their training parts too, so no test set is seen.
Prints points above (or below) the choice after 50 epochs. The last line is one JSON object.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from about import made
from safetensors.numpy import load_file
from sklearn.datasets import make_classification
from sklearn.preprocessing import StandardScaler

from fissile.bank.sparse.plan import recommended_plans
from fissile.bank.sparse.train import train
from fissile.sklearn.search import held_out, scale_of

EPOCHS, JUDGED = (4, 6, 10, 16, 25, 50), 3_000
#: Samples to train on, budget, and the drawn sets' features and classes.
SETS = {
    "A": (9_000, 12_000, (320, 50), {"n_informative": 50, "n_redundant": 100,
          "n_clusters_per_class": 1, "class_sep": 2.0}),
    "B": (6_000, 7_000, (200, 40), {"n_informative": 40, "n_redundant": 60,
          "n_clusters_per_class": 2, "class_sep": 1.6}),
    "C": (4_000, 10_000, (100, 20), {"n_informative": 30, "n_redundant": 30,
          "n_clusters_per_class": 2, "class_sep": 1.5}),
    "D": (8_000, 600, (64, 10), {"n_informative": 20, "n_redundant": 10,
          "n_clusters_per_class": 4, "class_sep": 1.5}),
    "F": (12_000, 30_000, (512, 100), {"n_informative": 100, "n_redundant": 100,
          "n_clusters_per_class": 1, "class_sep": 2.5}),
    "K": (7_000, 15_000, "banking77", {}),
    "L": (9_000, 20_000, "clinc150", {}),
}  # fmt: skip
PAIRS = ("A0", "A1", "B0", "B1", "C0", "C1", "D0", "D1", "F0", "K0", "K1", "L0", "L1")


def samples(name, seed, folder):
    """Return the samples of a set with their labels, and which are to train on and to judge by."""
    count, _, what, settings = SETS[name]
    if isinstance(what, str):
        held = load_file(folder / f"{what}.safetensors")
        x, y = held["x_train"], held["y_train"]
    else:
        x, y = make_classification(
            count + JUDGED, what[0], n_classes=what[1], random_state=1000 + seed, **settings
        )
    rows = np.random.default_rng(seed).permutation(len(x))
    return x.astype(np.float32), y, rows[:count], rows[count : count + JUDGED]


def accuracies(plans, seed, data, judge, outputs, epochs):
    """Return the accuracy of every plan, trained on some samples, on others."""
    found = dict[int, float]()
    x, y, x_judge, y_judge = map(torch.from_numpy, (*data, *judge))
    for stack, places in train(plans, [seed], x, y, outputs=outputs, epochs=epochs):
        found |= dict(zip(places, stack.accuracy(x_judge, y_judge)[0].tolist(), strict=True))
    return [found[place] for place in range(len(plans))]


def compared(pair, folder):
    """Return, for each length of the trials, what its choice comes to, in %."""
    name, seed = pair[0], int(pair[1:])
    x, y, rows, others = samples(name, seed, folder)
    x = StandardScaler().fit(x[rows]).transform(x).astype(np.float32)
    x /= scale_of(x[rows])
    outputs = int(y[rows].max()) + 1
    plans = recommended_plans(SETS[name][1], x.shape[1], outputs)
    parts = held_out(x[rows], y[rows], 0.1, seed + 50)
    tenth = parts.x_test, parts.y_test
    final = accuracies(plans, seed, (x[rows], y[rows]), (x[others], y[others]), outputs, 50)
    tried = {e: accuracies(plans, seed, (parts.x, parts.y), tenth, outputs, e) for e in EPOCHS}
    return {e: 100 * final[scores.index(max(scores))] for e, scores in tried.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, default=Path(), help="a folder")
    parser.add_argument("--only", default="", help="pairs that begin so, such as D or D0")
    options = parser.parse_args()
    found = {}
    for pair in PAIRS:
        if pair.startswith(options.only):
            found[pair] = compared(pair, options.features)
            print(pair, {e: round(one - found[pair][50], 2) for e, one in found[pair].items()})
    for epochs in EPOCHS:
        less = [one[epochs] - one[50] for one in found.values()]
        print(f"| {epochs} | {np.mean(less):+.2f} | {min(less):+.2f} |")
    print(json.dumps(made() | {"found": found}))


if __name__ == "__main__":
    main()
