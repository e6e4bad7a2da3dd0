"""From contenders to numbers: search settings on held-out samples, train the best, test once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fissile._common.shapes import Bool, Float, Int
from fissile.bank.sparse import Plan, train
from fissile.data.sets import Labelled
from fissile.lab.classifier import Arrays, load
from fissile.lab.task import HELD_OUT
from fissile.lab.trial import SEARCHED, Contender

__all__ = ["contest"]

OnSteps = Callable[[float], None]
Measures = dict[str, float]


def contest(
    contenders: Sequence[Contender],
    device: str = "cpu",
    on_steps: OnSteps | None = None,
    arrays: Arrays | None = None,
) -> dict[Contender, Measures]:
    """Return what each contender came to; all see the same data, epochs and batches.

    >>> contest([Contender(Features("clinc150-minilm"), 8, "l1")])
    """
    first = contenders[0]
    found = load(first.task, arrays)
    if first.task.classes:
        found = found.some_classes(first.task.classes)
    arena = _Arena(first, device, on_steps)
    cells = list(dict.fromkeys(one.network() for one in contenders))
    scaling = first.task.scaling
    chosen = arena.searched(cells, found.held_out(HELD_OUT).flat().scaled(scaling))
    numbers = sorted({one.number for one in contenders})
    plans = [plan for plan, _, _ in chosen]
    tested = arena.tested(cells, plans, numbers, found.flat().scaled(scaling))
    measures = {}
    for one in contenders:
        cell = cells.index(one.network())
        _, setting, held_out = chosen[cell]
        accuracy, nonzeros, sound = (float(t[numbers.index(one.number), cell]) for t in tested)
        measures[one] = {
            "accuracy": accuracy,
            "nonzeros": nonzeros,
            "setting": float(setting),
            "held_out": held_out,
            "diverged": 1.0 - sound,
        }
    return measures


class _Tested(NamedTuple):
    """What networks came to: a row for every seed, a column for every plan."""

    accuracy: Float[Tensor, "seeds plans"]
    nonzeros: Int[Tensor, "seeds plans"]
    sound: Bool[Tensor, "seeds plans"]  # it has not diverged


class _Arena:
    """Where contenders of one data set are trained."""

    def __init__(self, first: Contender, device: str, on_steps: OnSteps | None) -> None:
        self.first, self.device, self.on_steps = first, device, on_steps
        self.before = 0.0  # the share that was done before this phase

    def searched(self, cells: Sequence[Contender], data: Labelled) -> list[tuple[Plan, int, float]]:
        """Return, for every cell, its best setting's plan and number, and how well it did."""
        found = [cell.plans for cell in cells]
        flat = [plan for plans in found for plan in plans]
        accuracy = self._trained(flat, SEARCHED, data, 0.5).accuracy.mean(0)
        best, begin = [], 0
        for plans in found:
            own = accuracy[begin : begin + len(plans)]
            place = int(own.argmax())
            best.append((plans[place], place, float(own[place])))
            begin += len(plans)
        return best

    def tested(
        self, cells: Sequence[Contender], plans: Sequence[Plan], numbers: Sequence[int],
        data: Labelled,
    ) -> _Tested:  # fmt: skip
        """Train the chosen plans on all training samples, and test what came of them."""
        tested = self._trained(plans, numbers, data, 0.5)
        budgets = torch.tensor([cell.budget for cell in cells])
        assert bool((tested.nonzeros <= budgets).all()), "a budget was exceeded"
        return tested

    def _trained(
        self, plans: Sequence[Plan], seeds: Sequence[int], data: Labelled, share: float
    ) -> _Tested:
        x, y, x_test, y_test = _arrays(data, self.device)
        accuracy = torch.zeros(len(seeds), len(plans), dtype=torch.float64)
        nonzeros = torch.zeros(len(seeds), len(plans), dtype=torch.long)
        sound = torch.zeros(len(seeds), len(plans), dtype=torch.bool)
        stacks = train(
            plans, seeds, x, y, outputs=self.first.task.outputs, epochs=self.first.epochs,
            batch=self.first.batch, device=self.device, on_epoch=self._tell(share),
        )  # fmt: skip
        for stack, places in stacks:
            accuracy[:, places] = stack.accuracy(x_test, y_test).cpu()
            nonzeros[:, places] = stack.nonzeros().cpu()
            sound[:, places] = stack.finite().cpu()
        self.before += share
        return _Tested(accuracy, nonzeros, sound)

    def _tell(self, share: float) -> Callable[[int], None]:
        def tell(epoch: int) -> None:
            if self.on_steps is not None:
                self.on_steps(self.before + share * epoch / self.first.epochs)

        return tell


def _arrays(data: Labelled, device: str) -> tuple[Tensor, Int[Tensor, ...], Tensor, Tensor]:
    """Return the arrays on the device, divided by one number so that inputs vary by one."""
    x, x_test = (torch.tensor(one, dtype=torch.float32) for one in (data.x, data.x_test))
    scale = float(x.std())
    y, y_test = (torch.tensor(one, dtype=torch.long) for one in (data.y, data.y_test))
    return (x / scale).to(device), y.to(device), (x_test / scale).to(device), y_test.to(device)
