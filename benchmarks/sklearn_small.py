"""FissileClassifier as it comes, beside scikit-learn's classifiers, on scikit-learn's own data.

    python benchmarks/sklearn_small.py            # four small data sets, 5-fold cross-validation
    python benchmarks/sklearn_small.py --large    # 9,000 samples of 384 features, 64 classes
    python benchmarks/sklearn_small.py --seeds 3  # folds and networks from three seeds

All see standardized features and the same folds. Networks without a budget have 100 hidden neurons
before a split; with recipe="best" the budget is what a dense network of 100 takes. The others may
run until they converge, so that none is cut short. The large set is drawn by make_classification,
in the size of sentence embeddings; it is no text. The last line is one JSON object.
"""

import argparse
import json
import time
import warnings

import numpy as np
from about import made
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    load_iris,
    load_wine,
    make_classification,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fissile.sklearn import FissileClassifier

OTHERS = {
    "LogisticRegression": lambda seed: LogisticRegression(max_iter=2000),
    "MLPClassifier": lambda seed: MLPClassifier(max_iter=2000, random_state=seed),
}
OURS = {
    "FissileClassifier()": lambda seed: FissileClassifier(random_state=seed),
    'FissileClassifier(recipe="best", hidden=100)': lambda seed: FissileClassifier(
        recipe="best", hidden=100, random_state=seed
    ),
}
LARGE = {
    "MLPClassifier": lambda seed: MLPClassifier(random_state=seed),
    "FissileClassifier(nonzeros=20_000)": lambda seed: FissileClassifier(
        nonzeros=20_000, random_state=seed
    ),
}


def small():
    """Yield data sets, each with its folds for a seed."""
    for load in (load_iris, load_wine, load_breast_cancer, load_digits):
        x, y = load(return_X_y=True)
        folds = StratifiedKFold(5, shuffle=True, random_state=0)
        yield load.__name__.removeprefix("load_"), x, y, folds


def large():
    """Yield a drawn data set, a quarter of it to test on."""
    x, y = make_classification(
        12_000, 384, n_informative=64, n_redundant=128, n_classes=64, n_clusters_per_class=1,
        class_sep=2.0, random_state=0,
    )  # fmt: skip
    rows = np.arange(12_000)

    class Once:
        def split(self, x, y):
            return [(rows[:9000], rows[9000:])]

    yield "9,000 x 384, 64 classes", x.astype(np.float32), y, Once()


def measured(make, x, y, folds, seeds):
    """Return the mean accuracy in %, its error, and seconds for a fit: passed, of processors."""
    scores, seconds = [], []
    for seed in range(seeds):
        folds.random_state = seed
        for rows, held in folds.split(x, y):
            model = make_pipeline(StandardScaler(), make(seed))
            begin = np.array([time.perf_counter(), time.process_time()])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(x[rows], y[rows])
            seconds.append([time.perf_counter(), time.process_time()] - begin)
            scores.append(100 * model.score(x[held], y[held]))
    error = np.std(scores, ddof=1) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
    return float(np.mean(scores)), float(error), *np.median(seconds, 0).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="one large data set instead")
    parser.add_argument("--seeds", type=int, default=1, help="of the folds and of the networks")
    options = parser.parse_args()
    models, found = LARGE if options.large else OTHERS | OURS, {}
    print("| data | classifier | accuracy in % | seconds of a fit | of processors |")
    print("| --- " * 5 + "|")
    for name, x, y, folds in large() if options.large else small():
        for model, make in models.items():
            mean, error, *seconds = found[f"{name}: {model}"] = measured(
                make, x, y, folds, options.seeds
            )
            times = " | ".join(f"{one:.2f}" for one in seconds)
            print(f"| {name} | {model} | {mean:.1f} ± {error:.1f} | {times} |", flush=True)
        best = max(found[f"{name}: {model}"][0] for model in models if model not in OURS)
        for model in models.keys() & OURS.keys():
            behind = best - found[f"{name}: {model}"][0]
            print(f"  {model}: {behind:+.1f} points behind the better of the others")
    print(json.dumps(made() | {"found": found}))


if __name__ == "__main__":
    main()
