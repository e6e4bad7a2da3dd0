"""Who takes part in sklearn_table.py: classifiers that keep to a budget of non-zero parameters.

Every network trains for the same number of epochs in batches of 64 with Adam, at 1e-3 but for the
default recipe, whose plans have their own rates and are chosen on a held-out tenth of the training
set. No choice is made on a test set.
"""

import copy
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import fissile
from fissile.bank import Bank, Data, Spec
from fissile.expansion.budget import keep_together
from fissile.expansion.optimizer import Move, carried
from fissile.sklearn import FissileClassifier
from fissile.sklearn.search import dense_size
from fissile.sklearn.two_phase import width

BATCH, ALPHA = 64, 4


@dataclass(frozen=True)
class Task:
    """A training and a test set, and the epochs before the split (as many follow it)."""

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    epochs: int

    def width(self, budget):
        return width(budget, None, self.x.shape[1], self.classes)

    def nonzeros(self, budget):
        return dense_size(self.x.shape[1], self.width(budget), self.classes)

    @property
    def classes(self):
        return int(self.y.max()) + 1


def digits(seed):
    """scikit-learn's digits; a seed decides what is held out to test on."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, stratify=y, random_state=seed)
    x, x_test, y, y_test = parts
    return Task("digits", x.astype(np.float32), y, x_test.astype(np.float32), y_test, 100)


def features():
    """CIFAR-100 as features of a frozen EfficientNet-Lite2, with the official test set."""
    found = fissile.data.load("cifar100-efficientnet-lite2")
    x, x_test = (np.asarray(x, np.float32) for x in (found.x, found.x_test))
    return Task("CIFAR-100", x, found.y, x_test, found.y_test, 25)


# --- networks: each returns its accuracy and its non-zeros


def best(task, budget, seed):
    """The default: the recommended recipe, with all its plans."""
    classifier = FissileClassifier(
        budget, warm_up=task.epochs, fine_tune=task.epochs, random_state=seed
    )
    classifier.fit(task.x, task.y)
    return classifier.score(task.x_test, task.y_test), classifier.nonzeros_


def expanded(task, budget, seed, alpha=ALPHA):
    """The paper's recipe: warm-up, split, fine-tuning."""
    classifier = FissileClassifier(
        budget, alpha=alpha, recipe="paper", warm_up=task.epochs, fine_tune=task.epochs,
        random_state=seed,
    )  # fmt: skip
    classifier.fit(task.x, task.y)
    return classifier.score(task.x_test, task.y_test), classifier.nonzeros_


def unsplit(task, budget, seed):
    """The same engine, recipe and first weights, and no split."""
    return expanded(task, budget, seed, alpha=1)


def dense(task, budget, seed):
    """scikit-learn's MLPClassifier of the width that the budget allows, otherwise as it comes."""
    epochs = 2 * task.epochs
    classifier = MLPClassifier(
        (task.width(budget),), batch_size=BATCH, max_iter=epochs, n_iter_no_change=epochs,
        random_state=seed,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(task.x, task.y)
    assert classifier.n_iter_ == epochs
    held = sum(part.size for part in (*classifier.coefs_, *classifier.intercepts_))
    return classifier.score(task.x_test, task.y_test), held


def pruned(task, budget, seed):
    """A network four times as wide, pruned by magnitude where the other one is split."""
    arrays = (task.x, task.y, task.x_test, task.y_test)
    data = Data(*(torch.tensor(array) for array in arrays))
    wide = ALPHA * task.width(budget)
    bank = Bank([Spec([data.inputs, wide, task.classes], data, seed=seed)])
    bank.train(until=task.epochs)
    weights = task.nonzeros(budget) - wide - task.classes  # what the biases leave
    bank.put(0, *smaller(*bank.take(0), weights))
    bank.train(until=2 * task.epochs)
    return float(bank.last[0]), fissile.nonzeros(bank.take(0)[0]).all


@torch.no_grad()
def smaller(model, adam, weights):
    """Keep the largest weights of both layers together, with their moments."""
    new = copy.deepcopy(model)
    magnitudes = (model.layers[place].weight.abs() for place in (0, 2))
    masks = keep_together(*magnitudes, weights)
    for place, mask in zip((0, 2), masks, strict=True):
        layer = model.layers[place]
        new.layers[place] = fissile.MaskedLinear(layer.weight, mask, layer.bias)
    moves = []
    for old, layer in ((model.layers[0], new.layers[0]), (model.layers[2], new.layers[2])):
        moves.append(Move(old.weight, layer.weight, lambda t, mask=layer.mask: t * mask))
        moves.append(Move(old.bias, layer.bias, lambda t: t))
    carried(adam, moves)()
    return new, adam


def logistic(task, budgets):
    """Logistic regression with L1, whose penalty decides how many non-zeros there are.

    Of the penalties that keep to a budget, the one with the best accuracy on a held-out tenth of
    the training set is taken, and fitted to all of it; intercepts count. The solver is our own,
    because scikit-learn's would take hours on 50,000 x 512 x 100.
    """
    rows, held = train_test_split(
        np.arange(len(task.y)), test_size=0.1, stratify=task.y, random_state=0
    )
    part = Logistic(task.x[rows], task.y[rows], task.classes)
    path = [Point(part.top, part.nothing(), 0.0)]
    for penalty in np.geomspace(part.top / 2, part.top / 3000, 14):
        path.append(part.point(penalty, path[-1].weight, task.x[held], task.y[held]))
    whole, found = Logistic(task.x, task.y, task.classes), {}
    for budget in budgets:
        fits = [point for point in path if point.nonzeros <= budget]
        fits = sorted(fits, key=lambda point: -point.penalty)
        over = [point.penalty for point in path if point.nonzeros > budget]
        for _ in range(3 if over else 0):  # closer to the budget
            middle = (fits[-1].penalty * max(over)) ** 0.5
            point = part.point(middle, fits[-1].weight, task.x[held], task.y[held])
            if point.nonzeros <= budget:
                fits.append(point)
            else:
                over.append(middle)
        best = max(fits, key=lambda point: point.score)
        penalty, nonzeros = best.penalty, budget + 1
        while nonzeros > budget:  # more samples may need a little more
            final = whole.point(penalty, best.weight, task.x_test, task.y_test)
            penalty, nonzeros = 1.03 * penalty, final.nonzeros
        found[budget] = final.score, final.nonzeros
    return found


@dataclass(frozen=True)
class Point:
    """A solution for one penalty, and its accuracy on samples that were held out."""

    penalty: float
    weight: torch.Tensor
    score: float

    @property
    def nonzeros(self):
        return int((self.weight != 0).sum())


class Logistic:
    """Multinomial logistic regression with L1 by an accelerated proximal gradient.

    Inside, features have mean 0 and variance 1 and each its own penalty, which is the same problem
    and converges sooner.
    """

    def __init__(self, x, y, classes):
        x = torch.tensor(x)
        self.shift, self.scale = x.mean(0), x.std(0)
        self.scale[self.scale == 0] = 1
        self.x = self._inside(x)
        self.y = torch.nn.functional.one_hot(torch.tensor(y), classes).float()
        gram = self.x.T @ self.x / len(x)
        self.rate = 2 / float(torch.linalg.eigvalsh(gram)[-1])
        wrong = self.y.mean(0) - self.y
        self.top = float(((self.x.T @ wrong / len(x))[:-1].abs() * self.scale[:, None]).max())

    def _inside(self, x):
        return torch.cat([(x - self.shift) / self.scale, torch.ones(len(x), 1)], 1)

    def nothing(self):
        return torch.zeros(self.x.shape[1], self.y.shape[1])

    def point(self, penalty, start, x, y):
        """Solve for a penalty, beginning somewhere, and look at how well it does on samples."""
        weight = self.descended(penalty, start, 40 if len(self.x) > 10_000 else 300)
        right = (self._inside(torch.tensor(x)) @ weight).argmax(1) == torch.tensor(y)
        return Point(penalty, weight, float(right.double().mean()))

    def descended(self, penalty, start, steps):
        weight, ahead, momentum = start, start, 1.0
        shrink = torch.zeros(len(start), 1)  # the last row, the intercepts, is free
        shrink[:-1, 0] = self.rate * penalty / self.scale
        for _ in range(steps):
            wrong = (self.x @ ahead).softmax(1) - self.y
            new = ahead - self.rate * (self.x.T @ wrong) / len(wrong)
            new = new.sign() * (new.abs() - shrink).clamp(min=0)
            if ((ahead - new) * (new - weight)).sum() > 0:  # it overshoots: begin anew
                momentum = 1.0
            after = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            ahead, weight = new + (momentum - 1) / after * (new - weight), new
            momentum = after
        return weight


BEST, LOGISTIC = "FissileClassifier", "L1 logistic regression"
NETWORKS = {
    BEST: best,
    'FissileClassifier(recipe="paper")': expanded,
    "the same, not split": unsplit,
    "MLPClassifier": dense,
    "4x wide, pruned": pruned,
}


def job(name, task, budgets, seed):
    """Do one piece of work; return rows (task, budget, name, accuracy, non-zeros)."""
    begin = time.perf_counter()
    if name == LOGISTIC:
        found = logistic(task, budgets)
    else:
        found = {budget: NETWORKS[name](task, budget, seed) for budget in budgets}
    seconds = time.perf_counter() - begin
    rows = [(task.name, budget, name, *result) for budget, result in found.items()]
    print(f"seed {seed}, {seconds:.0f} s: {rows}", flush=True)
    return rows
