"""What goes into a bank: data, networks, and the arms they branch into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fissile.errors import FissileError, whole
from fissile.split import Random, Split
from fissile.train import Recipe

__all__ = ["Arm", "Data", "Dense", "DropConnect", "Dynamic", "Expand", "Spec"]

Array = Tensor | NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test set, held once for all networks that use it.

    >>> data = Data(x, y, x_test, y_test)

    ``x`` may be a memory-mapped NumPy array (``np.load(path, mmap_mode="r")``): its rows are then
    read as they are needed, so a data set may be larger than memory.
    """

    x: Array
    y: Tensor
    x_test: Array
    y_test: Tensor

    def __post_init__(self) -> None:
        for x, y, name in ((self.x, self.y, "training"), (self.x_test, self.y_test, "test")):
            if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
                raise FissileError(
                    f"the {name} set needs a matrix of samples and one label for each; "
                    f"got shapes {tuple(x.shape)} and {tuple(y.shape)}"
                )
            if y.is_floating_point() or int(y.min()) < 0:
                raise FissileError(f"the {name} labels must be whole numbers from 0 on")
        if self.x.shape[1] != self.x_test.shape[1]:
            raise FissileError("the training and the test set have different numbers of inputs")

    @property
    def inputs(self) -> int:
        """Count the inputs of a sample."""
        return int(self.x.shape[1])

    def shapes(self) -> tuple[object, ...]:
        """Return what two data sets must share to be stacked; one that is streamed stands alone."""
        streamed = id(self) if isinstance(self.x, np.memmap) else None
        return len(self.x), len(self.x_test), self.inputs, streamed

    @property
    def classes(self) -> int:
        """Count the classes that occur."""
        return 1 + int(torch.maximum(self.y.max(), self.y_test.max()))


@dataclass(frozen=True)
class Dense:
    """The arm that goes on as it is."""


@dataclass(frozen=True)
class Expand:
    """The arm that is expanded: ``Expand(2, Groups(...))``; see :func:`fissile.expand`."""

    alpha: int
    split: Split = field(default_factory=Random)
    budget: Literal["weights", "all"] = "weights"


@dataclass(frozen=True)
class DropConnect:
    """The control with a fresh mask at every step; see :func:`fissile.dropconnect`."""

    alpha: int


@dataclass(frozen=True)
class Dynamic:
    """The expanded arm whose masks move; see :class:`fissile.Rewire`."""

    alpha: int
    split: Split = field(default_factory=Random)
    every: int = 100
    fraction: float = 0.1
    grow: Literal["random", "gradient"] = "random"


Arm = Dense | Expand | DropConnect | Dynamic


@dataclass(frozen=True)
class Spec:
    """One network of a bank: its shape, its data, its seed and how it is trained.

    >>> Spec([32, 8, 1], data, seed=0, recipe=Recipe(lr=3e-3))

    The seed decides the initial weights, the order of batches and the splits, alone or in company.
    """

    sizes: tuple[int, ...] | list[int]
    data: Data
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    embedding: int | None = None
    layer_norm: bool = False
    activation: str = "relu"

    def __post_init__(self) -> None:
        if self.sizes[0] != self.data.inputs:
            raise FissileError(
                f"the network takes {self.sizes[0]} inputs, its data has {self.data.inputs}"
            )
        fits = 2 if self.sizes[-1] == 1 else self.sizes[-1]
        if self.data.classes > fits:
            raise FissileError(
                f"{self.sizes[-1]} outputs tell {fits} classes apart, the data has "
                f"{self.data.classes}"
            )
        whole("seed", self.seed, least=0)
        whole("batch", self.recipe.batch, least=1)
