"""Classifiers of real data in the lab: which arrays they see, and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fissile import measure
from fissile._common.errors import FissileError
from fissile.bank import Bank, Data, Spec
from fissile.data.catalogue import load as load_set
from fissile.data.sets import Labelled
from fissile.lab.task import HELD_OUT, Features, Images
from fissile.lab.trial import Trial, Work, changed

__all__ = ["STREAMED", "Arrays", "Classifiers", "bound", "fingerprint", "load", "meant"]

#: Raw features beyond so many bytes are read from their file as they are needed; scaled ones are
#: held in memory.
STREAMED = 1 << 30


class Arrays(NamedTuple):
    """A data set that is handed over, where there may be no files."""

    name: str
    samples: Labelled
    fingerprint: str


@lru_cache(maxsize=2)
def _found(name: str) -> tuple[Labelled, str]:
    found = load_set(name)
    return found, found.fingerprint()


def fingerprint(name: str) -> str:
    """Return what tells the arrays of a data set apart from any others.

    >>> fingerprint("fashionmnist")
    """
    return _found(name)[1]


def meant(name: str) -> dict[str, object]:
    """Return what is to be noted of the arrays that a run will see.

    >>> meant("fashionmnist")
    {'fingerprint': 'ad7b16dc82fbed35'}
    """
    found, held = _found(name)
    return {"fingerprint": held, **({"encoder": found.encoder} if found.encoder else {})}


def bound(works: Iterable[Work]) -> list[Work]:
    """Return trials that say which arrays they mean: those that are here now.

    >>> run(bound(STUDIES["fashionmnist"].works("smoke")), store)
    """
    names = {work: getattr(getattr(work, "task", None), "data", None) for work in works}
    return [work if name is None else changed(work, meant(name)) for work, name in names.items()]


def load(task: Features | Images, arrays: Arrays | None = None) -> Labelled:
    """Return the arrays of a task, handed over or from files, if they are the ones it means."""
    if arrays is not None and arrays.name == task.data:
        found, held = arrays.samples, arrays.fingerprint
    else:
        found, held = _found(task.data)
    if task.fingerprint not in ("", held):
        raise FissileError(
            f"the files of {task.data} have changed since this run began: they now hold {held}, "
            f"not {task.fingerprint}; run again to begin anew with these"
        )
    return found


class Classifiers:
    """The networks of trials on features; those of one task share its arrays."""

    def __init__(self, device: str, arrays: Arrays | None = None) -> None:
        self._device, self._arrays = device, arrays
        self._made: dict[Features, Data] = {}

    def spec(self, trial: Trial) -> Spec:
        """Return a trial's network for the bank."""
        assert isinstance(trial.task, Features)
        data = self._data(trial.task)
        hidden = [trial.neurons] * (trial.depth - 1)
        return Spec(
            [data.inputs, *hidden, trial.task.outputs],
            data,
            seed=trial.number,
            recipe=trial.recipe,
            embedding=trial.embedding,
            layer_norm=trial.layer_norm,
        )

    def _data(self, task: Features) -> Data:
        if task not in self._made:
            found = load(task, self._arrays)
            if task.classes:
                found = found.some_classes(task.classes)
            if task.validation:
                found = found.held_out(HELD_OUT)
            self._made[task] = self._held(found.flat().scaled(task.scaling))
        return self._made[task]

    def _held(self, found: Labelled) -> Data:
        """Hold a set in memory; one that is large stays in its file, unless a GPU has room."""
        on_chip = self._device.startswith("cuda")
        stays = isinstance(found.x, np.memmap) and found.x.nbytes > STREAMED and not on_chip
        x = found.x if stays else _single(found.x)
        return Data(x, torch.tensor(found.y), _single(found.x_test), torch.tensor(found.y_test))

    def measures(self, bank: Bank) -> dict[str, Tensor]:
        """Measure how alike neurons are."""
        return {
            "cosine": bank.measure(lambda group: measure.cosine(group.w1)),
            "absolute_cosine": bank.measure(lambda group: measure.cosine(group.w1, absolute=True)),
        }

    def arrays(self, bank: Bank, row: int, before: Tensor) -> dict[str, Tensor]:
        """Return how the test accuracy grew, the warm-up first."""
        return {"curve": torch.cat([before, bank.accuracy[row]])}


def _single(x: np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(x, dtype=np.float32))
