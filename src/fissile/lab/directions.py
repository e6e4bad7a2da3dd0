"""Features of real data as directions: what networks make of them, and splits that they guide.

A feature is a direction in the inputs: the mean of a class around the mean of all (``means``), or
an atom of a dictionary that scikit-learn learns from the training set (``atoms``).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fissile import measure
from fissile._common.errors import needs
from fissile._common.random import Draw
from fissile._common.shapes import Float, Int
from fissile.bank import Bank, Data
from fissile.expansion.split import Groups, Owners, Split, Weights
from fissile.measure.diagnose import effective_rank

#: No more samples are looked at for the means, which are taken evenly; of those, every second for
#: the dictionary, which has no more atoms.
SAMPLES, ATOMS = 4_000, 64
_Rows = Float[Tensor, "features inputs"]


class Directions:
    """The features of a training set.

    >>> Directions(data).rows["means"].shape
    torch.Size([100, 512])
    """

    def __init__(self, data: Data) -> None:
        every = -(-len(data.x) // SAMPLES)
        x, y = torch.as_tensor(np.ascontiguousarray(data.x[::every])), data.y[::every]
        means = torch.stack([x[y == k].mean(0) for k in y.unique()])
        self.rows = {"means": means - means.mean(0), "atoms": atoms(x[::2])}
        self.demand = effective_rank(self.rows["means"])

    def capacity(self, bank: Bank, kind: str) -> Float[Tensor, " networks"]:
        """Return the total capacity of one kind of features in each network of a bank."""
        rows = self.rows[kind]
        return bank.measure(lambda group: measure.total_capacity(group.w1 @ rows.mT))

    def before(self, bank: Bank) -> dict[str, Float[Tensor, " networks"]]:
        """Return what :func:`fissile.diagnose` tells of networks that are not split yet.

        The shares of a dimension that a class mean and an atom have to themselves, and the
        effective rank of the class means per neuron.
        """
        shares = {
            f"before_{k}": self.capacity(bank, k) / len(rows) for k, rows in self.rows.items()
        }
        neurons = bank.measure(lambda group: torch.full((len(group.w1),), group.w1.shape[-2]))
        return {**shares, "before_rank": self.demand / neurons}

    def after(self, bank: Bank) -> dict[str, Float[Tensor, " networks"]]:
        """Return the total capacity of both kinds of features in each network of a bank."""
        return {f"{kind}_capacity": self.capacity(bank, kind) for kind in self.rows}


_LEARNED: dict[str, _Rows] = {}  # by a hash of the samples: batches of trials share them


def atoms(x: Float[Tensor, "samples inputs"]) -> _Rows:
    """Return the atoms of a dictionary of some samples around their mean, those that are used."""
    key = hashlib.sha256(x.numpy().tobytes()).hexdigest()
    if key not in _LEARNED:
        needs("sklearn", "sklearn")
        from sklearn.decomposition import MiniBatchDictionaryLearning

        how = {"max_iter": 3, "batch_size": 256, "fit_algorithm": "cd", "random_state": 0}
        learned = MiniBatchDictionaryLearning(ATOMS, **how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it has not converged
            found = torch.from_numpy(learned.fit((x - x.mean(0)).numpy()).components_).float()
        _LEARNED[key] = found[found.any(-1)]
    return _LEARNED[key]


def strongest(rows: _Rows) -> Int[Tensor, " inputs"]:
    """Return for each input the feature that has the largest part of itself there.

    >>> strongest(torch.tensor([[3.0, 0.0, 4.0], [0.0, 1.0, 0.0]]))
    tensor([0, 1, 0])
    """
    return nn.functional.normalize(rows, dim=-1).abs().argmax(0)


class Guided(Split):
    """The split that keeps inputs together which are strongest in the same feature."""

    def __init__(self, rows: Callable[[], _Rows]) -> None:
        self._rows = rows

    def deal(self, weight: Weights, alpha: int, draw: Draw) -> Owners:
        """Deal whole groups of inputs."""
        return Groups(strongest(self._rows())).deal(weight, alpha, draw)
