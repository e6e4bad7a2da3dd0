"""Does what `fissile.diagnose` measures foretell the gain? Does capacity rise with the split?

And do splits that features guide beat others? On real features, at a small scale.

    python benchmarks/foretell.py --data DIR --data DIR     (some minutes on two cores)

Six data sets (those that are not in the folders are left out), five widths, three seeds. Each
network warms up, is diagnosed, and goes on dense and in four splits of alpha 4, at equal non-zeros.
Features are class means around their common mean, and the atoms of a dictionary that scikit-learn
learns from the inputs. A guided split keeps inputs together whose largest part is in one feature.

What counts as foretelling was written down before the first run: with one data set left out at a
time, a straight line through the others in (log of features per neuron, capacity per feature) must
explain at least half of the variance of the random split's gain (R² of 0.5 against the mean gain of
the other sets), and say rightly for 80 % of the points whether the gain is above one point.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from about import made
from sklearn.datasets import load_digits
from sklearn.decomposition import MiniBatchDictionaryLearning

import fissile
from fissile import measure
from fissile.bank import Bank, Data, Dense, Expand, Spec
from fissile.bank.loop import Recipe
from fissile.data import catalogue
from fissile.data.features import read_features
from fissile.data.sets import Labelled
from fissile.lab.stats import interval, line

TO = Path(__file__).parent / "results" / "foretell.json"
SETS = {
    "digits": None,
    "fashionmnist": "fashionmnist",
    "cifar100": "cifar100-efficientnet-lite2",
    "cifar100-coarse": "cifar100-coarse-efficientnet-lite2",
    "clinc150": "clinc150-minilm",
    "banking77": "banking77-minilm",
}
WIDTHS, SEEDS, EPOCHS, ALPHA = (4, 8, 16, 32, 64), 3, 15, 4
MOST, ATOMS = 4_000, 64
#: What is regressed on, each alone and then those of the criterion together.
BEFORE = {
    "load": lambda c: [np.log(c["features"] / c["neurons"])],
    "capacity": lambda c: [c["own"]],
    "dictionary": lambda c: [c["own_atoms"]],
    "rank": lambda c: [np.log(c["demand"] / c["neurons"])],
    "load and capacity": lambda c: [np.log(c["features"] / c["neurons"]), c["own"]],
    "warm accuracy (not diagnose)": lambda c: [c["warm"]],
}


def loaded(name, folders):
    """Return a data set of at most MOST samples, its training samples of mean length 10."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        data = Labelled(x.astype(np.float32), y, x[:1].astype(np.float32), y[:1]).held_out(0.25)
    else:
        key = SETS[name]
        place = next((f for f in folders if catalogue.find(key, f) is not None), None)
        files = [file for f in folders for file in f.glob(f"{name}*.safetensors")]
        if place is None and not files:
            return None
        data = catalogue.load(key, place) if place else read_features(files[0])
        data = data.flat()
    few = data.held_out(MOST) if len(data.y) > MOST else None
    x, y = (few.x_test, few.y_test) if few else (data.x, data.y)
    every = -(-len(data.y_test) // 3000)  # not the first ones, which may be of few classes
    x_test, y_test = np.asarray(data.x_test[::every]), data.y_test[::every]
    return Labelled(np.asarray(x), y, x_test, y_test).scaled("length-10")


def directions(x, y):
    """Return centred class means and the atoms of a dictionary, as rows."""
    means = torch.stack([x[y == k].mean(0) for k in y.unique()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learned = MiniBatchDictionaryLearning(ATOMS, max_iter=30, batch_size=256, random_state=0)
        atoms = learned.fit((x - x.mean(0)).numpy()).components_
    atoms = torch.tensor(atoms[np.abs(atoms).sum(1) > 0], dtype=torch.float32)
    return means - means.mean(0), atoms


def groups(features):
    """Return for every input the feature that has the largest part of itself there."""
    unit = torch.nn.functional.normalize(features, dim=1)
    return unit.abs().argmax(0).unique(return_inverse=True)[1].tolist()


def cells(name, data):
    """Train every network of a data set; return a cell for each width and seed."""
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(one)) for one in
                            (data.x, data.y, data.x_test, data.y_test))  # fmt: skip
    ready = Data(x, y, x_test, y_test)
    means, atoms = directions(x, y)
    arms = {
        "dense": Dense(),
        "random": Expand(ALPHA),
        "gram": Expand(ALPHA, fissile.Gram()),
        "guided by means": Expand(ALPHA, fissile.Groups(groups(means))),
        "guided by atoms": Expand(ALPHA, fissile.Groups(groups(atoms))),
    }
    specs = [
        Spec([data.inputs, width, data.classes], ready, seed=seed, recipe=Recipe(lr=3e-3))
        for width in WIDTHS
        for seed in range(SEEDS)
    ]
    bank = Bank(specs)
    bank.train(until=EPOCHS)
    wide = bank.branch(arms)
    wide.train(until=2 * EPOCHS)
    counts = wide.nonzeros.view(len(bank), len(arms))
    assert (counts == counts[:, :1]).all(), "the budget is the same in all arms"
    found = []
    for i, spec in enumerate(specs):
        warm = bank.take(i)[0]
        [row] = fissile.diagnose(warm, (x, y), draws=2)
        [of_atoms] = fissile.diagnose(warm, x, features=atoms, draws=2)
        cell = {"set": name, "neurons": spec.sizes[1], "seed": spec.seed, "features": row.features}
        cell |= {"own": row.total / row.features, "own_atoms": of_atoms.total / of_atoms.features}
        cell |= {"cosine": row.cosine, "demand": row.demand, "rank": row.rank}
        cell |= {"warm": float(bank.last[i]), "accuracy": {}, "capacity": {}, "capacity_atoms": {}}
        for a, arm in enumerate(arms):
            number = i * len(arms) + a
            first = wide.take(number)[0].layers[0]
            weight = first.weight if arm == "dense" else first.dense_weight()
            cell["accuracy"][arm] = float(wide.last[number])
            for key, features in (("capacity", means), ("capacity_atoms", atoms)):
                cell[key][arm] = float(measure.total_capacity(weight.detach() @ features.mT))
        found.append(cell)
    return found


def gain(cell, arm="random"):
    """Return the gain over dense, in points."""
    return 100 * (cell["accuracy"][arm] - cell["accuracy"]["dense"])


def points(found):
    """Return a point for each data set and width: the means over seeds."""
    keys = sorted({(c["set"], c["neurons"]) for c in found})
    some = [[c for c in found if (c["set"], c["neurons"]) == key] for key in keys]
    numbers = ("features", "own", "own_atoms", "demand", "warm")
    return [
        {"set": s[0]["set"], "neurons": s[0]["neurons"], "gain": float(np.mean([*map(gain, s)]))}
        | {name: float(np.mean([c[name] for c in s])) for name in numbers}
        for s in some
    ]


def left_out(found, predictors):
    """Return how well lines through all other sets foretell each set."""
    errors, plain, right = [], [], []
    for name in sorted({p["set"] for p in found}):
        known = [p for p in found if p["set"] != name]
        asked = [p for p in found if p["set"] == name]
        rows, gains = np.array([[1, *predictors(p)] for p in known]), [p["gain"] for p in known]
        line_ = np.linalg.lstsq(rows, np.array(gains), rcond=None)[0]
        for p in asked:
            said = float(np.array([1, *predictors(p)]) @ line_)
            errors.append((said - p["gain"]) ** 2)
            plain.append((np.mean(gains) - p["gain"]) ** 2)
            right.append((said > 1) == (p["gain"] > 1))
    return {"r2": 1 - sum(errors) / sum(plain), "right": float(np.mean(right)),
            "error": float(np.mean(errors) ** 0.5)}  # fmt: skip


def summary(found):
    """Return what came out: foretelling, capacity and gain, guided splits."""
    means = points(found)
    foretold = {name: left_out(means, how) for name, how in BEFORE.items()}
    criterion = foretold["load and capacity"]
    splits = [arm for arm in found[0]["accuracy"] if arm != "dense"]
    interference = {}
    for key in ("capacity", "capacity_atoms"):
        folds = [np.log(c[key]["random"] / c[key]["dense"]) for c in found]
        fit = line(folds, [*map(gain, found)])
        interference[key] = {
            "fold": float(np.exp(np.mean(folds))),
            "rises": float(np.mean(np.array(folds) > 0)),
            "slope": fit.slope, "r2": fit.r2, "p": fit.p,
        }  # fmt: skip
    guided = []
    for name in dict.fromkeys(c["set"] for c in found):
        for arm in splits[1:]:
            some = [c for c in found if c["set"] == name]
            over = [gain(c, arm) - gain(c) for c in some]
            low, high = interval(over)
            guided.append({"set": name, "split": arm, "over_random": float(np.mean(over)),
                           "low": low, "high": high})  # fmt: skip
    return {
        "foretells": bool(criterion["r2"] >= 0.5 and criterion["right"] >= 0.8),
        "left_out": foretold, "interference": interference, "guided": guided, "points": means,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", default=[], help="a folder of data")
    parser.add_argument("--to", type=Path, default=TO)
    options = parser.parse_args()
    since, found, held = time.perf_counter(), [], []
    for name in SETS:
        data = loaded(name, [*options.data, catalogue.SYSTEM])
        if data is None:
            print(f"{name} is not here")
            continue
        held.append(f"{name}: {data.x.shape}, {data.classes} classes")
        found += cells(name, data)
        print(held[-1], f"{time.perf_counter() - since:.0f} s", flush=True)
    command = {"command": "python benchmarks/foretell.py --data DIR"}
    about = made() | command | {"sets": held, "seconds": round(time.perf_counter() - since)}
    parts = {"about": about, "summary": summary(found), "cells": found}
    options.to.write_text(json.dumps(parts, indent=1) + "\n", "utf-8")
    print(json.dumps(parts["summary"]["left_out"] | {"foretells": parts["summary"]["foretells"]}))


if __name__ == "__main__":
    main()
