"""Training one network with the paper's recipe: a plain loop, read it top to bottom.

The bank trains thousands of networks as one program; this loop is what it must agree with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from fissile._common.random import order
from fissile._common.shapes import Float, Int
from fissile.bank.step import guess
from fissile.layers import all_weights
from fissile.layers.mlp import first_hidden


@dataclass(frozen=True)
class Recipe:
    """How the paper trains: Adam and batches of 64, L1 on W1, L2 on everything.

    >>> Recipe(lr=1e-2).batch
    64
    """

    lr: float = 1e-3
    batch: int = 64
    l1: float = 1e-7
    l2: float = 1e-5
    orthogonal: float = 0.0


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    x: Float[Tensor, "samples inputs"],
    y: Int[Tensor, " samples"],
    *,
    epochs: int,
    seed: int,
    start: int = 0,
    recipe: Recipe | None = None,
    after_step: Callable[[], object] | None = None,
    after_epoch: Callable[[], object] | None = None,
) -> None:
    """Train a model in place for some epochs; seed and epoch alone decide the order of batches.

    >>> fit(model, adam, x, y, epochs=25, seed=0)  # the warm-up
    >>> fit(model, adam, x, y, epochs=25, seed=0, start=25)  # and on from there
    """
    recipe = recipe or Recipe()
    model.train()
    for epoch in range(start, start + epochs):
        for rows in batches(len(x), recipe.batch, seed, epoch):
            loss = task_loss(model(x[rows]), y[rows]) + penalty(model, recipe)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if after_step is not None:
                after_step()
        if after_epoch is not None:
            after_epoch()


def batches(samples: int, batch: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Yield the rows of every batch in the order of the epoch; the last may be smaller.

    >>> [len(rows) for rows in batches(10, 4, seed=0, epoch=0)]
    [4, 4, 2]
    """
    yield from order(seed, epoch, samples).split(batch)


def task_loss(logits: Float[Tensor, "batch outputs"], y: Int[Tensor, " batch"]) -> Tensor:
    """Return the cross-entropy: binary for one logit, over classes for several.

    >>> task_loss(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]))
    tensor(0.6931)
    """
    if logits.shape[-1] == 1:
        target = y.to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits.squeeze(-1), target)
    return functional.cross_entropy(logits, y)


def penalty(model: nn.Module, recipe: Recipe) -> Tensor:
    """Return what the recipe adds to the loss: L1 on W1, L2 on all, optionally orthogonality.

    >>> loss = task_loss(model(x), y) + penalty(model, Recipe(l2=1e-4))
    """
    layer = first_hidden(model)
    total = recipe.l1 * layer.get_parameter("weight").abs().sum()
    total = total + recipe.l2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
    if recipe.orthogonal:
        first = all_weights(layer)
        identity = torch.eye(len(first), dtype=first.dtype, device=first.device)
        total = total + recipe.orthogonal * (first @ first.mT - identity).square().sum()
    return total


@torch.no_grad()
def accuracy(
    model: nn.Module, x: Float[Tensor, "samples inputs"], y: Int[Tensor, " samples"]
) -> float:
    """Return the share of samples a model classifies rightly, in evaluation mode.

    >>> accuracy(model, x_test, y_test)
    """
    was_training = model.training
    logits = model.eval()(x)
    model.train(was_training)
    return float((guess(logits) == y).double().mean())
