"""What goes into a bank: data, networks, and the arms they branch into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fissile._common.errors import FissileError, whole
from fissile._common.shapes import brief
from fissile.bank.loop import Recipe
from fissile.expansion.split import Random, Split

Array = Tensor | NDArray[np.floating]
#: Activations that are more than a function of one number.
_OWN = ("prelu", "rrelu")


def _address(array: Array) -> int:
    return array.data_ptr() if isinstance(array, Tensor) else int(array.ctypes.data)


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

    __repr__ = brief

    def __post_init__(self) -> None:
        for samples, labels, name in (("x", "y", "training"), ("x_test", "y_test", "test")):
            x, y = getattr(self, samples), torch.as_tensor(getattr(self, labels))
            if isinstance(x, Tensor):
                x = x.detach()
                x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            elif not isinstance(x, np.memmap):
                x = torch.as_tensor(np.asarray(x))
            if y.is_floating_point():
                raise FissileError(f"the labels {labels} must be whole numbers, not {y.dtype}")
            if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
                raise FissileError(
                    f"the {name} set needs a matrix of samples and one label for each; "
                    f"got shapes {tuple(x.shape)} and {tuple(y.shape)}"
                )
            if int(y.min()) < 0:
                raise FissileError(f"the {name} labels must be whole numbers from 0 on")
            object.__setattr__(self, samples, x)
            object.__setattr__(self, labels, y.long())
        if self.x.shape[1] != self.x_test.shape[1]:
            raise FissileError("the training and the test set have different numbers of inputs")

    @property
    def inputs(self) -> int:
        """Count the inputs of a sample."""
        return int(self.x.shape[1])

    def key(self) -> tuple[object, ...]:
        """Return what tells data sets apart: where they lie in memory, not who holds them."""
        arrays = (self.x, self.y, self.x_test, self.y_test)
        return tuple((_address(array), tuple(array.shape)) for array in arrays)

    def shapes(self) -> tuple[object, ...]:
        """Return what two data sets must share to be stacked; one that is streamed stands alone."""
        streamed = _address(self.x) if isinstance(self.x, np.memmap) else None
        return len(self.x), len(self.x_test), self.inputs, streamed

    @property
    def classes(self) -> int:
        """Count the classes that occur."""
        return 1 + int(torch.maximum(self.y.max(), self.y_test.max()))


@dataclass(frozen=True)
class Dense:
    """The arm that goes on as it is.

    >>> arms = bank.branch({"dense": Dense(), "split": Expand(2)})
    """


@dataclass(frozen=True)
class Expand:
    """The arm that is expanded; see :func:`fissile.expand`.

    >>> Expand(2, fissile.Blocks(4), moments="fresh")

    ``moments="fresh"`` starts Adam anew at the split instead of carrying its moments over.
    """

    alpha: int
    split: Split = field(default_factory=Random)
    budget: Literal["weights", "all"] = "weights"
    moments: Literal["carry", "fresh"] = "carry"

    def __post_init__(self) -> None:
        if self.moments not in ("carry", "fresh"):
            raise FissileError(f"moments={self.moments!r} is not known; give 'carry' or 'fresh'")


@dataclass(frozen=True)
class DropConnect:
    """The control with a fresh mask at every step; see :func:`fissile.dropconnect`.

    >>> arms = bank.branch({"dense": Dense(), "dropconnect": DropConnect(2)})
    """

    alpha: int


@dataclass(frozen=True)
class Dynamic:
    """The expanded arm whose masks move; see :class:`fissile.Rewire`.

    >>> arms = bank.branch({"fixed": Expand(2), "moving": Dynamic(2, every=50)})
    """

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
    activation: str | nn.Module = "relu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole("seed", self.seed, least=0))
        if self.seed >= 2**63:
            raise FissileError(f"seed={self.seed} needs more than 63 bits; give a smaller one")
        whole("batch", self.recipe.batch, least=1)
        for name in ("lr", "l1", "l2", "orthogonal"):
            if not 0 <= getattr(self.recipe, name) < float("inf"):
                raise FissileError(f"{name}={getattr(self.recipe, name)!r} must be 0 or more")
        if str(getattr(self.activation, "_get_name", lambda: self.activation)()).lower() in _OWN:
            raise FissileError(
                f"a bank cannot train {self.activation!r}: it has parameters or chance of its own"
            )
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
