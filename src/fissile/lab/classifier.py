"""Classifiers of real data: the arrays they see, their measures, and contests for a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fissile import measure
from fissile._common.errors import FissileError
from fissile._common.shapes import Float, Int
from fissile.bank import Bank, Data, Spec
from fissile.bank.sparse import Plan, train
from fissile.data.catalogue import Entry, entry
from fissile.data.catalogue import load as load_set
from fissile.data.sets import Labelled
from fissile.lab.directions import Directions
from fissile.lab.task import HELD_OUT, Features, Images, Text
from fissile.lab.trial import SEARCHED, Contender, Trial, Work, changed

#: Raw features beyond so many bytes are read from their file as they are needed; scaled ones are
#: held in memory.
STREAMED = 1 << 30


class Arrays(NamedTuple):
    """A data set that is handed over, where there may be no files."""

    name: str
    samples: Labelled
    fingerprint: str


@lru_cache(maxsize=2)
def _from_files(entry: Entry) -> Arrays:
    """Return the arrays of a data set, read from its files."""
    samples = load_set(entry)
    return Arrays(entry.name, samples, samples.fingerprint())


def meant_all(entries: Sequence[Entry]) -> dict[str, object]:
    """Return the fingerprints of several data sets that a run will see, in one text."""
    return {"fingerprint": ",".join(f"{e.name}={meant(e)['fingerprint']}" for e in entries)}


def meant(name: str | Entry) -> dict[str, object]:
    """Return the fingerprint of the arrays that a run will see, and their encoder if known."""
    _, samples, fingerprint = _from_files(entry(name))
    encoder = {"encoder": samples.encoder} if samples.encoder else {}
    return {"fingerprint": fingerprint, **encoder}


def bound(works: Iterable[Work]) -> list[Work]:
    """Return trials that say which arrays they mean: those that are here now.

    >>> run(bound(STUDIES["fashionmnist"].works("smoke")), store)
    """
    sets = {work: getattr(getattr(work, "task", None), "entry", None) for work in works}
    return [work if one is None else changed(work, meant(one)) for work, one in sets.items()]


def load(task: Features | Images | Text, arrays: Arrays | None = None) -> Labelled:
    """Return the arrays of a task, handed over or from files, if they are the ones it means."""
    if arrays is None or arrays.name != task.data:
        arrays = _from_files(task.entry)
    if task.fingerprint not in ("", arrays.fingerprint):
        raise FissileError(
            f"the files of {task.data} have changed since this run began: they now hold "
            f"{arrays.fingerprint}, not {task.fingerprint}; run again to begin anew with these"
        )
    return arrays.samples


def _some_classes(task: Features, arrays: Arrays | None) -> Labelled:
    """Return the arrays of the classes that a task keeps."""
    samples = load(task, arrays)
    return samples.some_classes(task.classes) if task.classes else samples


class Classifiers:
    """The networks of trials on features; those of one task share its arrays."""

    def __init__(self, device: str, arrays: Arrays | None = None) -> None:
        self._device, self._arrays = device, arrays
        self._made: dict[Features, Data] = {}
        self._directions: dict[Features, Directions] = {}

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
            samples = _some_classes(task, self._arrays)
            if task.validation:
                samples = samples.held_out(HELD_OUT)
            samples = samples.flat().scaled(task.scaling)
            large = isinstance(samples.x, np.memmap) and samples.x.nbytes > STREAMED
            in_file = large and not self._device.startswith("cuda")  # a GPU has room for it
            x = samples.x if in_file else _single(samples.x)
            y, y_test = torch.tensor(samples.y), torch.tensor(samples.y_test)
            self._made[task] = Data(x, y, _single(samples.x_test), y_test)
        return self._made[task]

    def directions(self, trial: Trial) -> Directions:
        """Return the features of the data that a trial's network learns from."""
        assert isinstance(trial.task, Features)
        if trial.task not in self._directions:
            self._directions[trial.task] = Directions(self._data(trial.task))
        return self._directions[trial.task]

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


# --- contests: search settings on held-out samples, train the best, test once


def contest(
    contenders: Sequence[Contender],
    device: str = "cpu",
    on_steps: Callable[[float], None] | None = None,
    arrays: Arrays | None = None,
) -> dict[Contender, dict[str, float]]:
    """Return what each contender came to; all see the same data, epochs and batches.

    >>> contest([Contender(Features("clinc150-minilm"), 8, "l1")])
    """
    first = contenders[0]
    samples, scaling = _some_classes(first.task, arrays), first.task.scaling
    on_share = on_steps or (lambda share: None)
    cells = list(dict.fromkeys(work.network() for work in contenders))
    searched = _trained(
        first, device, lambda share: on_share(share / 2),
        [plan for cell in cells for plan in cell.plans],
        SEARCHED, samples.held_out(HELD_OUT).flat().scaled(scaling),
    )  # fmt: skip
    accuracies = searched[0].mean(0).split([len(cell.plans) for cell in cells])
    best = [int(accuracy.argmax()) for accuracy in accuracies]
    numbers = sorted({work.number for work in contenders})
    tested = _trained(
        first, device, lambda share: on_share(0.5 + share / 2),
        [cell.plans[setting] for cell, setting in zip(cells, best, strict=True)],
        numbers, samples.flat().scaled(scaling),
    )  # fmt: skip
    budgets = torch.tensor([cell.budget for cell in cells])
    assert bool((tested[1] <= budgets).all()), "a budget was exceeded"
    measures = {}
    for work in contenders:
        cell = cells.index(work.network())
        accuracy, nonzeros, sound = tested[:, numbers.index(work.number), cell].tolist()
        measures[work] = {
            "accuracy": accuracy,
            "nonzeros": nonzeros,
            "setting": float(best[cell]),
            "held_out": float(accuracies[cell][best[cell]]),
            "diverged": 1.0 - sound,
        }
    return measures


def _trained(
    first: Contender,
    device: str,
    on_share: Callable[[float], None],
    plans: Sequence[Plan],
    seeds: Sequence[int],
    data: Labelled,
) -> Float[Tensor, "measures seeds plans"]:
    """Train plans on data as the first contender is trained, and report the share that is done.

    The measures are the accuracy, the non-zero weights, and whether all of them are finite.
    """
    x, y, x_test, y_test = arrays_on(data, device)
    tested = torch.zeros(3, len(seeds), len(plans), dtype=torch.float64)
    stacks = train(
        plans, seeds, x, y, outputs=first.task.outputs, epochs=first.epochs, batch=first.batch,
        device=device, on_epoch=lambda epoch: on_share(epoch / first.epochs),
    )  # fmt: skip
    for stack, places in stacks:
        measures = stack.accuracy(x_test, y_test), stack.nonzeros(), stack.finite()
        tested[:, :, places] = torch.stack([column.cpu().double() for column in measures])
    return tested


def arrays_on(data: Labelled, device: str) -> tuple[Tensor, Int[Tensor, ...], Tensor, Tensor]:
    """Return the arrays on the device, divided by one number so that inputs vary by one."""
    x, x_test = _single(data.x), _single(data.x_test)
    scale = float(x.std())
    y, y_test = (torch.tensor(labels, dtype=torch.long) for labels in (data.y, data.y_test))
    return (x / scale).to(device), y.to(device), (x_test / scale).to(device), y_test.to(device)
