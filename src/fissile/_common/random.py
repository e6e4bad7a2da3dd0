"""Random numbers: drawn from a seed, or hashed from a seed and a counter.

A function takes its numbers from a `Draw` and never asks for a count that depends on data, so that
stacked networks see what they would see alone. The order of batches is hashed: it needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int

Draw = Callable[..., Tensor]
#: A whole number, such as a seed or a count of steps, or one for each network.
Whole = int | Int[Tensor, "*batch"]


def drawer(generator: torch.Generator) -> Draw:
    """Return a draw from one CPU generator, always in float64.

    >>> draw = drawer(torch.Generator().manual_seed(0))
    >>> draw(2, 3).shape
    torch.Size([2, 3])
    """
    # Numbers come from the CPU even for networks elsewhere: a seed then means one thing.
    if generator.device.type != "cpu":
        raise FissileError(f"The generator is on {generator.device}; give one on the CPU.")

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return draw


def stacked(drawers: Sequence[Draw]) -> Draw:
    """Return a draw for a stack of networks: `draw(n, *shape)` stacks what each of n drawers gives.

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
    """Return a draw from a seed, or from one seed for each of a stack of networks.

    >>> seeded(0)(5).shape, seeded(torch.tensor([0, 1]))(2, 5).shape
    (torch.Size([5]), torch.Size([2, 5]))
    """
    if isinstance(seed, Tensor) and seed.ndim:
        return stacked([drawer(torch.Generator().manual_seed(each)) for each in seed.tolist()])
    return drawer(torch.Generator().manual_seed(int(seed)))


def ranks(noise: Float[Tensor, "*batch entries"]) -> Int[Tensor, "*batch entries"]:
    """Return every entry's place in the order of its row, smallest first: a random permutation.

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


_WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
#: How often a position is scrambled; fewer rounds leave neighbours correlated.
ROUNDS = 4


def hash32(*parts: Whole) -> Int[Tensor, "*batch"]:
    """Mix whole numbers into one that looks random, 0 <= h < 2**32, elementwise.

    >>> hash32(7, torch.arange(2))
    tensor([1996066732, 3477029455])
    """
    if all(part.is_cpu for part in parts if isinstance(part, Tensor)):
        found = _hashed(*parts).astype(np.int64)
        shapes = (part.shape for part in parts if isinstance(part, Tensor))
        return torch.from_numpy(found).reshape(np.broadcast_shapes(*shapes))
    state: int | Tensor = GOLDEN
    for part in parts:
        # A seed may have 64 bits: its upper half is mixed in too.
        for word in (part & _WORD, (part >> 32) & _WORD):
            state = _scramble(((state ^ word) + GOLDEN) & _WORD)
    return torch.as_tensor(state)


def _scramble(h: int | Tensor) -> int | Tensor:
    """Apply the finaliser of MurmurHash3; int64 products wrap, and their low 32 bits are right."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _hashed(*parts: Whole) -> NDArray[np.uint32]:
    """Return the hash of numbers on the processor, in words of 32 bits; it has a dimension."""
    state = np.full(1, GOLDEN, np.uint32)
    for part in parts:
        whole = part.long().numpy() if isinstance(part, Tensor) else part
        for word in (whole & _WORD, (whole >> 32) & _WORD):
            state = _mixed(state, np.asarray(word).astype(np.uint32))
    return state


def _mixed(state: NDArray[np.uint32], word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Mix a word into a state, as :func:`hash32` does, but in place of masks the sums overflow."""
    h = state ^ word
    h += np.uint32(GOLDEN)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    return h


def noise(seed: Whole, counter: Whole, *shape: int) -> Float[Tensor, "*batch ..."]:
    """Return uniform numbers in [0, 1) for each seed: the same for the same counter.

    >>> noise(torch.tensor([1, 2]), 0, 3).shape
    torch.Size([2, 3])
    """
    return spread(hash32(torch.as_tensor(seed), counter), *shape)


def spread(keys: Int[Tensor, "*batch"], *shape: int) -> Float[Tensor, "*batch ..."]:
    """Return the uniform numbers of every key: ``noise`` is that of ``hash32(seed, counter)``.

    >>> spread(hash32(torch.tensor([1, 2]), 0), 3).shape
    torch.Size([2, 3])
    """
    entries = torch.Size(shape).numel()
    if keys.is_cpu and entries <= _WORD:  # eight times as fast: the upper words are zero
        state = _mixed(_hashed(keys.unsqueeze(-1)), np.arange(entries, dtype=np.uint32))
        hashes = torch.from_numpy(_mixed(state, np.zeros(1, np.uint32)))
    else:
        hashes = hash32(keys.unsqueeze(-1), torch.arange(entries, device=keys.device))
    uniform: Tensor = hashes.to(torch.get_default_dtype()) / 2**32
    return uniform.reshape(*keys.shape, *shape)


def order_keys(seed: Whole, epoch: Whole) -> Int[Tensor, "*batch rounds two"]:
    """Return the multiplier and addend of every round, for epochs of seeds, elementwise.

    >>> order_keys(torch.tensor([[1], [2]]), torch.arange(25)).shape
    torch.Size([2, 25, 4, 2])
    """
    seeds = torch.as_tensor(seed).unsqueeze(-1)
    epochs = torch.as_tensor(epoch, device=seeds.device).unsqueeze(-1)
    keys = hash32(seeds, epochs, torch.arange(2 * ROUNDS, device=seeds.device))
    keys = keys.reshape(*keys.shape[:-1], ROUNDS, 2)
    odd = torch.tensor([1, 0], device=keys.device)  # a multiplier must be odd to be invertible
    return keys | odd


def order_shape(samples: int) -> tuple[int, int]:
    """Return how many bits number the samples, and how far each round shifts them."""
    bits = max(1, (samples - 1).bit_length())
    return bits, (bits + 1) // 2


def order(
    seed: Whole, epoch: int, samples: int, start: int = 0, stop: int | None = None
) -> Int[Tensor, "*batch positions"]:
    """Return the order in which each network sees its samples in an epoch: a permutation.

    >>> order(seed=0, epoch=0, samples=5)
    tensor([1, 4, 0, 3, 2])
    >>> order(seed=0, epoch=0, samples=5, start=1, stop=3)  # any part of it, at the same price
    tensor([4, 0])

    Positions are scrambled by steps that can each be undone, on the next power of two; a position
    that lands beyond the samples is scrambled again until it lands within.
    """
    keys = order_keys(seed, epoch)  # (*batch, rounds, 2)
    bits, shift = order_shape(samples)
    positions = torch.arange(start, samples if stop is None else stop, device=keys.device)
    keys = keys.unsqueeze(-3)
    place = _place(positions, keys, bits, shift)  # (*batch, positions)
    keys = keys.expand(*place.shape, ROUNDS, 2)
    while bool((outside := place >= samples).any()):
        place[outside] = _place(place[outside], keys[outside], bits, shift)
    return place


def _place(position: Tensor, keys: Tensor, bits: int, shift: int) -> Tensor:
    for multiplier, addend in (pair.unbind(-1) for pair in keys.unbind(-2)):
        position = (position * multiplier + addend) & ((1 << bits) - 1)
        position = position ^ (position >> shift)
    return position
