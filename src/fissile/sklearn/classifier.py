"""The estimator: a network of one hidden layer whose non-zero parameters fit a budget."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fissile.bank import Data, check_device
from fissile.budget import nonzeros
from fissile.errors import FissileError, whole
from fissile.order import hash32
from fissile.sklearn import files
from fissile.sklearn.course import Course, Outcome, say
from fissile.sklearn.samples import check_same, held, logits, numbered, watched
from fissile.sklearn.trainer import Network, Task, is_split, make
from fissile.sklearn.width import outputs_for, width
from fissile.split import Split, resolve_split
from fissile.train import Recipe

__all__ = ["FissileClassifier"]

Array = NDArray[Any]


def _can_go_on(classifier: FissileClassifier) -> bool:
    """Tell whether parts of the data suffice, or say why not."""
    if classifier.early_stopping or isinstance(classifier.class_weight, str):
        raise FissileError(
            "partial_fit sees only a part of the data: give class_weight as a dict, not "
            '"balanced", and leave early_stopping=False'
        )
    return True


class FissileClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A sparse network of one hidden layer that keeps to a budget of non-zero parameters.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> clf = FissileClassifier(nonzeros=2_000, random_state=0).fit(X / 16, y)
    >>> clf.hidden_, clf.nonzeros_
    (26, 1960)

    A dense network is trained (the warm-up), its neurons are split into sparse children, which are
    pruned back to the same number of non-zeros, and the result is trained on (the fine-tuning).

    Args:
        nonzeros: the budget; the hidden layer is as wide as it allows. Weights and biases of the
            whole network count.
        hidden: the neurons before the split, instead of a budget; 100 if neither is given.
        alpha: children per neuron, at most one for each feature.
        split: who inherits which input: a name such as ``"random"`` or ``"gram"``, or a
            :class:`fissile.Split`.
        warm_up, fine_tune: epochs before the split, and after it.
        lr: Adam's learning rate.
        batch: samples of a step.
        l1, l2: penalties on the first layer's absolute weights, and on all parameters' squares.
        early_stopping: hold out a part of the training set, end each phase when its accuracy there
            no longer grows, and go back to the phase's best epoch.
        validation_fraction: the share held out, of every class alike.
        patience: epochs without a better score until a phase ends.
        class_weight: how much each class counts in the loss: a dict, or ``"balanced"`` for the
            inverse of its frequency.
        restarts: networks trained from different initial weights; the one with the best validation
            score is kept or, without early stopping, the one with the smallest training loss.
        n_jobs: how many of these are trained at the same time, each in a thread; -1 for all cores.
        random_state: decides initial weights, the order of samples, the split, what is held out.
        verbose: 1 prints every epoch.
        device: where to train; the trained network lives on the CPU.

    Attributes:
        model_: the network, an ordinary PyTorch module.
        nonzeros_: its non-zero parameters, biases included.
        hidden_: its hidden neurons before the split; after it there are ``alpha_`` times as many.
        alpha_: children per neuron.
        classes_: the labels.
        n_iter_: epochs trained.
        loss_curve_: the mean training loss of every epoch.
        validation_scores_: the held-out accuracy after every epoch; None without early stopping.
        n_features_in_, feature_names_in_: features of a sample, and their names if they have any.
    """

    def __init__(
        self,
        nonzeros: int | None = None,
        hidden: int | None = None,
        alpha: int = 4,
        split: str | Split = "random",
        *,
        warm_up: int = 25,
        fine_tune: int = 25,
        lr: float = 1e-3,
        batch: int = 64,
        l1: float = 1e-7,
        l2: float = 1e-5,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        restarts: int = 1,
        n_jobs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
        device: str = "cpu",
    ) -> None:
        self.nonzeros = nonzeros
        self.hidden = hidden
        self.alpha = alpha
        self.split = split
        self.warm_up = warm_up
        self.fine_tune = fine_tune
        self.lr = lr
        self.batch = batch
        self.l1 = l1
        self.l2 = l2
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.class_weight = class_weight
        self.restarts = restarts
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        self.device = device

    # --- training

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a network from the start: warm-up, split, fine-tuning.

        >>> clf.fit(X, y).score(X_test, y_test)
        """
        x, labels = self._validated(X, y, reset=True)
        self._decide(labels, x.shape[1])
        random = check_random_state(self.random_state)
        seeds = random.randint(2**31 - 1, size=whole("restarts", self.restarts, least=1)).tolist()
        numbers = numbered(labels, self.classes_)
        if self.early_stopping:
            data = watched(x, numbers, self.validation_fraction, random.randint(2**31 - 1))
        else:
            data = held(x, numbers)
        outcome = self._best(self._task(data, labels), seeds)
        self._seed = seeds[0]
        return self._hold(outcome, outcome.score if self.early_stopping else None)

    @available_if(_can_go_on)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Train one pass over these samples and keep what was learned before.

        The first ``warm_up`` calls train the dense network; the next one splits it before it
        trains, and from then on the sparse network learns. Both have the same number of non-zeros.
        After ``fit`` the network is split already, and learns on.

        >>> for X, y in stream:
        ...     clf.partial_fit(X, y, classes=[0, 1, 2])

        Args:
            X: samples.
            y: their labels.
            classes: all labels there will ever be; needed in the first call.
        """
        begins = not hasattr(self, "model_")
        x, labels = self._validated(X, y, reset=begins)
        if begins:
            self._begin(classes, x.shape[1])
        elif classes is not None:
            check_same(np.unique(classes), self.classes_)
        passes = len(self.loss_curve_)
        task = self._task(held(x, numbered(labels, self.classes_)), self.classes_)
        trainer = make(task, int(hash32(self._seed, passes)))
        if not begins:
            trainer.put(Network(self.model_, self._adam))
        if passes >= self.warm_up and (begins or not is_split(self.model_)):
            trainer.split(self.alpha_, resolve_split(self.split))
        outcome = Outcome(list(self.loss_curve_))
        outcome.add(trainer.train(1))
        outcome.network = trainer.take()
        return self._hold(outcome, None)

    def _begin(self, classes: ArrayLike | None, inputs: int) -> None:
        if classes is None:
            raise FissileError("the first call of partial_fit must be given all classes")
        self._decide(np.asarray(classes), inputs)
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.loss_curve_: list[float] = []

    def _validated(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[Array, Array]:
        x, labels = validate_data(self, X, y, reset=reset, dtype=np.float32, order="C")
        check_classification_targets(labels)
        return x, labels

    def _decide(self, labels: Array, inputs: int) -> None:
        """Decide on the classes and the shape of the network."""
        self.classes_ = np.unique(labels)
        if len(self.classes_) < 2:
            raise FissileError(f"y holds one class only, {self.classes_[0]!r}; give at least two")
        outputs = outputs_for(len(self.classes_))
        self.hidden_ = width(self.nonzeros, self.hidden, inputs, outputs)
        self.alpha_ = min(whole("alpha", self.alpha, least=1), inputs)

    def _task(self, data: Data, labels: Array) -> Task:
        """Say what is learned, and how; labels are those that "balanced" counts."""
        weights = None
        if self.class_weight is not None:
            found = compute_class_weight(self.class_weight, classes=self.classes_, y=labels)
            weights = torch.tensor(found, dtype=torch.float32)
        sizes = (data.inputs, self.hidden_, outputs_for(len(self.classes_)))
        recipe = Recipe(lr=self.lr, batch=self.batch, l1=self.l1, l2=self.l2)
        check_device(self.device)
        return Task(sizes, data, recipe, weights, self.device)

    def _best(self, task: Task, seeds: list[int]) -> Outcome:
        """Train a network from each seed and return the best."""
        course = Course(
            warm_up=whole("warm_up", self.warm_up, least=0),
            fine_tune=whole("fine_tune", self.fine_tune, least=0),
            alpha=self.alpha_,
            split=resolve_split(self.split),
            patience=whole("patience", self.patience, least=1) if self.early_stopping else None,
            tell=say if self.verbose else None,
        )
        jobs = self.n_jobs if task.device == "cpu" else 1
        return course.best([make(task, seed) for seed in seeds], jobs)

    def _hold(self, outcome: Outcome, scores: list[float] | None) -> Self:
        if outcome.diverged:
            warnings.warn(
                "the network diverged and is kept as it was after its last finite epoch; "
                "standardize the features or use a smaller lr",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.model_, self._adam = outcome.network
        self.model_.eval()
        self.nonzeros_ = nonzeros(self.model_).all
        self.loss_curve_, self.validation_scores_ = outcome.loss, scores
        self.n_iter_ = len(outcome.loss)
        return self

    # --- prediction

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the logits: one per sample for two classes, else one per sample and class."""
        found = self._logits(X)
        return found[:, 0] if found.shape[1] == 1 else found

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of every class, in the order of ``classes_``."""
        found = torch.from_numpy(self._logits(X))
        if found.shape[1] > 1:
            return found.softmax(1).numpy()
        return torch.cat([(-found).sigmoid(), found.sigmoid()], 1).numpy()

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class of every sample."""
        found = self._logits(X)
        numbers = found.argmax(1) if found.shape[1] > 1 else (found[:, 0] > 0).astype(int)
        return np.take(self.classes_, numbers)

    def _logits(self, X: ArrayLike) -> Array:
        check_is_fitted(self, "model_")
        x = validate_data(self, X, reset=False, dtype=np.float32, order="C")
        # In double precision a sample's answer does not depend on its company.
        return logits(copy.deepcopy(self.model_).double(), x)

    # --- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the classifier to a safetensors file, without pickling; see :meth:`load`.

        >>> clf.save("digits.safetensors")

        Adam's moments are not written. Parameters that are neither numbers nor strings (a
        ``Split``, a dict of weights) are their defaults again after loading; predictions need none.
        """
        check_is_fitted(self, "model_")
        files.write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a classifier that :meth:`save` wrote; nothing in the file is ever executed.

        >>> FissileClassifier.load("digits.safetensors").predict(X)
        """
        return files.read(cls, path)
