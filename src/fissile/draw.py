"""Where random numbers come from: a `Draw` gives uniform numbers in [0, 1) of any shape.

A function takes its numbers from a `Draw` and never asks for a number of them that depends on
data, so that networks can be stacked while each one keeps the random stream it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fissile.errors import FissileError
from fissile.shapes import Bool, Float, Int

__all__ = ["Draw", "choose", "drawer", "ranks", "seeded", "stacked"]

Draw = Callable[..., Tensor]


def drawer(generator: torch.Generator) -> Draw:
    """A draw from one CPU generator, always in float64.

    >>> draw = drawer(torch.Generator().manual_seed(0))
    >>> draw(2, 3).shape
    torch.Size([2, 3])
    """
    # Numbers come from the CPU even for networks elsewhere: a seed then means one thing.
    if generator.device.type != "cpu":
        raise FissileError(
            f"The generator lives on {generator.device}; give a torch.Generator() on the CPU."
        )

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return draw


def stacked(drawers: Sequence[Draw]) -> Draw:
    """A draw for a stack of networks: `draw(n, *shape)` stacks what each of n drawers gives.

    >>> one, two = (drawer(torch.Generator().manual_seed(seed)) for seed in (1, 2))
    >>> stacked([one, two])(2, 5).shape
    torch.Size([2, 5])
    """
    drawers = tuple(drawers)

    def draw(*shape: int) -> Tensor:
        if not drawers or shape[:1] != (len(drawers),):
            raise FissileError(
                f"A draw of shape {shape} was asked of {len(drawers)} stacked drawers; "
                "its first dimension must count them, and there must be at least one."
            )
        return torch.stack([each(*shape[1:]) for each in drawers])

    return draw


def seeded(seed: int | Int[Tensor, " networks"]) -> Draw:
    """A draw from a seed, or from one seed for each of a stack of networks.

    >>> seeded(0)(5).shape, seeded(torch.tensor([0, 1]))(2, 5).shape
    (torch.Size([5]), torch.Size([2, 5]))
    """
    if isinstance(seed, Tensor) and seed.ndim:
        return stacked([drawer(torch.Generator().manual_seed(one)) for one in seed.tolist()])
    return drawer(torch.Generator().manual_seed(int(seed)))


def ranks(noise: Float[Tensor, "*batch entries"]) -> Int[Tensor, "*batch entries"]:
    """The place of every entry in the order of its row, smallest first: a random permutation.

    >>> ranks(torch.tensor([0.3, 0.9, 0.1]))
    tensor([1, 2, 0])
    """
    return noise.argsort(dim=-1, stable=True).argsort(dim=-1)


def choose(
    noise: Float[Tensor, "*batch entries"], count: Int[Tensor, "*batch"]
) -> Bool[Tensor, "*batch entries"]:
    """Mark ``count`` entries of each row, those with the smallest noise: a random choice.

    >>> choose(torch.tensor([0.3, 0.9, 0.1]), torch.tensor(2))
    tensor([ True, False,  True])
    """
    return ranks(noise) < count.unsqueeze(-1)
