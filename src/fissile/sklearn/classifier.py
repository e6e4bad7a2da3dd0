"""The estimator: a network of one hidden layer whose non-zero parameters fit a budget."""

from __future__ import annotations

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
from torch import nn
from torch.optim import Adam

from fissile._common.errors import FissileError, whole
from fissile._common.random import hash32
from fissile.bank import Data, check_device
from fissile.bank.loop import Recipe
from fissile.bank.sparse.plan import Plan
from fissile.bank.step import guess
from fissile.expansion.budget import nonzeros
from fissile.expansion.split import Split, resolve_split
from fissile.layers import SparseLinear
from fissile.sklearn import files, search, two_phase

Array = NDArray[Any]


def _can_go_on(classifier: FissileClassifier) -> bool:
    """Return True if a part of the data is enough to go on with; raise an error otherwise."""
    if classifier.early_stopping or isinstance(classifier.class_weight, str):
        raise FissileError(
            "partial_fit sees only a part of the data: give class_weight as a dict, not "
            '"balanced", and leave early_stopping=False'
        )
    if getattr(classifier, "plan_", None) is not None:
        raise FissileError(
            "partial_fit cannot go on with a network that was pruned while it was trained: fit "
            'again with all samples, or with recipe="paper"'
        )
    return True


class FissileClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A sparse network of at most one hidden layer that keeps to a budget of non-zero parameters.

    >>> clf = FissileClassifier(nonzeros=2_000, random_state=0).fit(X, y)
    >>> clf.nonzeros_ <= 2_000
    True

    There are two recipes. ``"best"``, the default with a budget, is the one we recommend: a linear
    classifier, alone or beside a hidden layer, begins with all its weights and is pruned gradually;
    of six plans for that, the one that does best on held-out samples is trained on all of them.
    ``"paper"`` is the paper's: a dense network is trained (the warm-up), its neurons are split into
    sparse children, which are pruned back to the same number of non-zeros, and trained on (the
    fine-tuning). It alone knows ``alpha``, ``split``, ``lr``, ``l1``, ``l2``, ``early_stopping``,
    ``patience`` and ``n_jobs``; plans have their own rates, and train side by side. A parameter
    that the recipe does not use is refused.

    Args:
        nonzeros: the budget. Weights and biases of the whole network count.
        hidden: instead of a budget, the neurons before the split; 100 if neither is given. For
            ``"best"`` the budget is then what a dense network of that width takes.
        alpha: children per neuron, 4 if it is None; at most one for each feature.
        split: who inherits which input: a name such as ``"random"`` or ``"gram"``, or a
            :class:`fissile.Split`.
        recipe: ``"best"`` or ``"paper"``; None is ``"best"`` where ``nonzeros`` is given and
            ``early_stopping`` is not asked for.
        tries: how many of the six plans are tried; 1 takes the first and holds nothing out, and so
            it is if a class has too few samples for ``validation_fraction`` to be one of them.
        warm_up, fine_tune: epochs before the split, and after it; ``"best"`` trains their sum. None
            is 25, and more where a phase, or the course of ``"best"``, would have under 500 steps.
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
        hidden_: its hidden neurons, before a split into ``alpha_`` children each.
        alpha_: children per neuron; 1 for ``"best"``.
        classes_: the labels.
        plan_: the plan that was taken; None for ``"paper"``.
        tried_: the plans that were tried, each with its held-out accuracy.
        n_iter_: epochs trained.
        loss_curve_: the mean training loss of every epoch; for ``"best"`` only the last one.
        validation_scores_: the held-out accuracy after every epoch; None without early stopping.
        n_features_in_, feature_names_in_: features of a sample, and their names if they have any.
    """

    model_: nn.Module
    plan_: Plan | None
    tried_: search.Tried
    loss_curve_: list[float]
    validation_scores_: list[float] | None
    _adam: Adam | None

    def __init__(
        self,
        nonzeros: int | None = None,
        hidden: int | None = None,
        alpha: int | None = None,
        split: str | Split = "random",
        *,
        recipe: Literal["best", "paper"] | None = None,
        tries: int = 6,
        warm_up: int | None = None,
        fine_tune: int | None = None,
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
        self.recipe = recipe
        self.tries = tries
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
        """Train a network from the start, as the recipe says.

        >>> clf.fit(X, y).score(X_test, y_test)
        """
        x, labels = self._validated(X, y, reset=True)
        self._know(labels)
        random = check_random_state(self.random_state)
        seeds = random.randint(2**31 - 1, size=whole("restarts", self.restarts, least=1)).tolist()
        self._seed, hold = seeds[0], random.randint(2**31 - 1)
        best = search.is_best(self.recipe, self.nonzeros, self.early_stopping)
        self._refuse_unused("best" if best else "paper")
        if best:
            return self._fit_best(x, labels, seeds, hold)
        trained = self._fit_paper(x, labels, seeds, hold)
        if not trained.diverged and not self.early_stopping:
            search.check_converged(search.STEPS, [epoch.loss for epoch in trained.epochs])
        return self._keep(trained, [])

    def _fit_best(self, x: Array, labels: Array, seeds: list[int], hold: int) -> Self:
        outputs = search.outputs_for(len(self.classes_))
        budget = search.budget_for(self.nonzeros, self.hidden, x.shape[1], outputs)
        batch, epochs = whole("batch", self.batch, least=1), sum(self._epochs(len(x), phases=1))
        if not epochs:
            raise FissileError('recipe="best" prunes while it trains; let warm_up + fine_tune be 1')
        check_device(self.device)
        steps = epochs * (len(x) // min(batch, len(x)))
        plans = search.plans_for(budget, x.shape[1], outputs, self.tries, steps)
        search.check_converged(steps)
        weights, share = self._class_weights(labels), self.validation_fraction
        result = search.PlanSearch(
            plans, outputs, epochs, batch, share, weights, self.device, bool(self.verbose)
        ).run(x, _numbered(labels, self.classes_), seeds, hold)
        self.model_, self._adam = result.module.eval(), None
        self.plan_, self.tried_ = result.plan, result.tried
        self.hidden_, self.alpha_ = result.module.neurons, 1
        self.nonzeros_, self.n_iter_ = nonzeros(self.model_).all, epochs
        self.loss_curve_, self.validation_scores_ = [result.loss], None
        return self

    def _fit_paper(
        self, x: Array, labels: Array, seeds: list[int], hold: int
    ) -> two_phase.TrainedNetwork:
        self._shape(x.shape[1])
        share = self.validation_fraction if self.early_stopping else None
        data = two_phase.to_data(x, _numbered(labels, self.classes_), share, hold)
        task = self._task(data, labels)
        phases = two_phase.TwoPhase(
            *self._epochs(len(data.y), phases=2),
            alpha=self.alpha_,
            split=resolve_split(self.split),
            patience=whole("patience", self.patience, least=1) if self.early_stopping else None,
            verbose=bool(self.verbose),
        )
        jobs = self.n_jobs if task.device == "cpu" else 1
        return phases.best([two_phase.make(task, seed) for seed in seeds], jobs)

    @available_if(_can_go_on)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Train one pass over these samples and keep what was learned before.

        This follows the paper's course, whatever ``recipe`` says: the first ``warm_up`` calls train
        the dense network; the next one splits it before it trains, and from then on the sparse
        network learns. Both have the same number of non-zeros. After a ``fit`` by the paper's
        recipe the network is split already, and learns on; after one by ``"best"`` it cannot.

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
        elif classes is not None and not np.array_equal(now := np.unique(classes), self.classes_):
            raise FissileError(
                f"classes are now {now.tolist()}, and were {self.classes_.tolist()} in the first "
                "call of partial_fit; give the same again, or none"
            )
        passes = len(self.loss_curve_)
        task = self._task(two_phase.to_data(x, _numbered(labels, self.classes_)), self.classes_)
        trainer = two_phase.make(task, int(hash32(self._seed, passes)))
        if not begins:
            assert self._adam is not None
            trainer.put(two_phase.Network(self.model_, self._adam))
        split = not begins and any(isinstance(m, SparseLinear) for m in self.model_.modules())
        warm_up = search.EPOCHS if self.warm_up is None else whole("warm_up", self.warm_up, least=0)
        if passes >= warm_up and not split:
            trainer.split(self.alpha_, resolve_split(self.split))
        trained = two_phase.TrainedNetwork()
        trained.train(trainer, 1)
        trained.network = trainer.take()
        return self._keep(trained, self.loss_curve_)

    def _begin(self, classes: ArrayLike | None, inputs: int) -> None:
        if classes is None:
            raise FissileError("the first call of partial_fit must be given all classes")
        self._know(np.asarray(classes))
        self._shape(inputs)
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.loss_curve_ = []

    def _validated(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[Array, Array]:
        x, labels = validate_data(self, X, y, reset=reset, dtype=np.float32, order="C")
        check_classification_targets(labels)
        return x, labels

    def _know(self, labels: Array) -> None:
        """Take the classes down; refuse a single one, and a budget together with a width."""
        if self.nonzeros is not None and self.hidden is not None:
            raise FissileError(
                f"nonzeros={self.nonzeros!r} and hidden={self.hidden!r} both decide the width; "
                "give one of them"
            )
        self.classes_ = np.unique(labels)
        if len(self.classes_) < 2:
            raise FissileError(f"y holds one class only, {self.classes_[0]!r}; give at least two")

    def _shape(self, inputs: int) -> None:
        """Decide on the shape of the paper's network."""
        outputs = search.outputs_for(len(self.classes_))
        self.hidden_ = two_phase.width(self.nonzeros, self.hidden, inputs, outputs)
        self.alpha_ = min(4 if self.alpha is None else whole("alpha", self.alpha, least=1), inputs)

    def _refuse_unused(self, recipe: str) -> None:
        """Refuse a parameter that only the other recipe uses, unless it is left as it was."""
        other, names = search.USED_ONLY_BY[recipe]
        usual = type(self)()
        for name in names:
            if (value := getattr(self, name)) != getattr(usual, name):
                raise FissileError(
                    f'only recipe="{other}" uses {name}={value!r}, and this is recipe="{recipe}"; '
                    f'leave {name} out, or give recipe="{other}"'
                )

    def _epochs(self, samples: int, phases: int) -> tuple[int, int]:
        """Return the epochs before and after the split, which may be one phase or two."""
        steps = max(1, samples // whole("batch", self.batch, least=1))
        usual = max(search.EPOCHS, -(-search.STEPS * phases // (2 * steps)))
        given = ((name, getattr(self, name)) for name in ("warm_up", "fine_tune"))
        before, after = (usual if k is None else whole(name, k, least=0) for name, k in given)
        return before, after

    def _class_weights(self, labels: Array) -> Array | None:
        """Return how much each class counts; "balanced" counts the labels."""
        if self.class_weight is None:
            return None
        weights: Array = compute_class_weight(self.class_weight, classes=self.classes_, y=labels)
        search.check_weights(weights)
        return weights

    def _task(self, data: Data, labels: Array) -> two_phase.Task:
        counts = self._class_weights(labels)
        weights = None if counts is None else torch.tensor(counts, dtype=torch.float32)
        sizes = (data.inputs, self.hidden_, search.outputs_for(len(self.classes_)))
        recipe = Recipe(lr=self.lr, batch=self.batch, l1=self.l1, l2=self.l2)
        check_device(self.device)
        return two_phase.Task(sizes, data, recipe, weights, self.device)

    def _keep(self, trained: two_phase.TrainedNetwork, earlier: list[float]) -> Self:
        if trained.diverged:
            warnings.warn(
                "the network diverged and is kept as it was after its last finite epoch; "
                "standardize the features or use a smaller lr",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.model_, self._adam = trained.network
        self.model_.eval()
        self.nonzeros_ = nonzeros(self.model_).all
        self.plan_, self.tried_ = None, []
        self.loss_curve_ = [*earlier, *(epoch.loss for epoch in trained.epochs)]
        scores = [epoch.score for epoch in trained.epochs]
        self.validation_scores_ = scores if self.early_stopping else None
        self.n_iter_ = len(self.loss_curve_)
        return self

    # --- prediction

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the logits: one per sample for two classes, else one per sample and class."""
        found = self._logits(X).numpy()
        return found[:, 0] if found.shape[1] == 1 else found

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of every class, in the order of ``classes_``."""
        found = self._logits(X)
        if found.shape[1] > 1:
            return found.softmax(1).numpy()
        return torch.cat([(-found).sigmoid(), found.sigmoid()], 1).numpy()

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class of every sample."""
        numbers = guess(self._logits(X)).numpy()
        return np.take(self.classes_, numbers)

    def _logits(self, X: ArrayLike) -> torch.Tensor:
        check_is_fitted(self, "model_")
        x = validate_data(self, X, reset=False, dtype=np.float32, order="C")
        return search.logits(self.model_, x)

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


def _numbered(labels: Array, classes: Array) -> NDArray[np.int64]:
    """Return the number of every label among the sorted classes."""
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise FissileError(
            f"y holds {unknown.tolist()}, which the classes {classes.tolist()} lack; "
            "name all classes in the first call of partial_fit"
        )
    return np.searchsorted(classes, labels)
