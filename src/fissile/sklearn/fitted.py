"""What a trained classifier can do: predict, and go into a file and come back."""

from __future__ import annotations

import copy
import os
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn
from torch.optim import Adam

from fissile.bank.sparse.plan import Plan
from fissile.sklearn import files
from fissile.sklearn.samples import logits
from fissile.sklearn.search import Tried

__all__ = ["Fitted"]

Array = NDArray[Any]


class Fitted(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier once it has been trained; a subclass trains it."""

    model_: nn.Module
    nonzeros_: int
    hidden_: int
    alpha_: int
    classes_: Array
    plan_: Plan | None
    tried_: Tried
    n_iter_: int
    loss_curve_: list[float]
    validation_scores_: list[float] | None
    _seed: int
    _adam: Adam | None

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
