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
from fissile.data.catalogue import load as load_set
from fissile.data.sets import Labelled
from fissile.lab.task import HELD_OUT, Features, Images
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
def _found(name: str) -> tuple[Labelled, str]:
    """Return the arrays of a data set, and what tells them apart from any others."""
    samples = load_set(name)
    return samples, samples.fingerprint()


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
    whole = load(first.task, arrays)
    if first.task.classes:
        whole = whole.some_classes(first.task.classes)
    tell, scaling = on_steps or (lambda share: None), first.task.scaling
    cells = list(dict.fromkeys(work.network() for work in contenders))
    searched = _trained(
        first, device, lambda share: tell(share / 2),
        [plan for cell in cells for plan in cell.plans],
        SEARCHED, whole.held_out(HELD_OUT).flat().scaled(scaling),
    )  # fmt: skip
    best = _best_settings(cells, searched[0].mean(0))
    numbers = sorted({work.number for work in contenders})
    tested = _trained(
        first, device, lambda share: tell(0.5 + share / 2), [plan for plan, _, _ in best],
        numbers, whole.flat().scaled(scaling),
    )  # fmt: skip
    budgets = torch.tensor([cell.budget for cell in cells])
    assert bool((tested[1] <= budgets).all()), "a budget was exceeded"
    measures = {}
    for work in contenders:
        cell = cells.index(work.network())
        _, setting, held_out = best[cell]
        accuracy, nonzeros, sound = tested[:, numbers.index(work.number), cell].tolist()
        measures[work] = {
            "accuracy": accuracy,
            "nonzeros": nonzeros,
            "setting": float(setting),
            "held_out": held_out,
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
    """Train plans as the contenders of a data set are trained; tell the share that is done.

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
        tested[:, :, places] = torch.stack([each.cpu().double() for each in measures])
    return tested


def _best_settings(cells: Sequence[Contender], accuracy: Tensor) -> list[tuple[Plan, int, float]]:
    """Return, for every cell, its best setting's plan and number, and its held-out accuracy."""
    best = []
    for cell, own in zip(cells, accuracy.split([len(cell.plans) for cell in cells]), strict=True):
        setting = int(own.argmax())
        best.append((cell.plans[setting], setting, float(own[setting])))
    return best


def arrays_on(data: Labelled, device: str) -> tuple[Tensor, Int[Tensor, ...], Tensor, Tensor]:
    """Return the arrays on the device, divided by one number so that inputs vary by one."""
    x, x_test = (_single(one) for one in (data.x, data.x_test))
    scale = float(x.std())
    y, y_test = (torch.tensor(one, dtype=torch.long) for one in (data.y, data.y_test))
    return (x / scale).to(device), y.to(device), (x_test / scale).to(device), y_test.to(device)
