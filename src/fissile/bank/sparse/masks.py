"""Which weights exist: counted strictly, kept within a budget, sown at random.

Masks come by name: ``first`` (hidden x inputs), ``second`` (outputs x hidden), ``direct`` (outputs
x inputs), each with a leading dimension for the network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fissile._common.shapes import Bool, Float, Int
from fissile.expansion.budget import keep_largest

__all__ = ["alive", "count", "effective", "sown", "within"]

Masks = dict[str, Bool[Tensor, "networks rows columns"]]
#: The bits of infinity: those of every finite positive float are smaller, in the same order.
_INFINITY = 0x7F800000


def alive(masks: Mapping[str, Tensor]) -> Bool[Tensor, "networks hidden"]:
    """Tell which neurons see an input and are seen by an output."""
    return masks["first"].any(-1) & masks["second"].any(-2)


def effective(masks: Masks) -> Masks:
    """Remove the weights of neurons that see nothing or that nobody sees."""
    if "first" not in masks:
        return masks
    on = alive(masks)
    kept = {
        "first": masks["first"] & on.unsqueeze(-1),
        "second": masks["second"] & on.unsqueeze(-2),
    }
    return masks | kept


def count(masks: Mapping[str, Tensor], *, bias: bool) -> Int[Tensor, " networks"]:
    """Count the weights of every network, and the biases of neurons that are alive."""
    total = torch.stack([mask.sum((-2, -1)) for mask in masks.values()]).sum(0)
    return total + alive(masks).sum(-1) if bias and "first" in masks else total


def within(
    scores: Mapping[str, Float[Tensor, "networks rows columns"]],
    room: Int[Tensor, " networks"],
    *,
    bias: bool,
) -> Masks:
    """Keep what scores highest, over all layers together, as much as there is room for.

    A neuron's bias takes room while it is alive, and its weights go with it when it is not; so what
    fits is not a rank but a threshold, found by bisecting its bits. What scores zero is not kept.
    """
    # A network that has diverged keeps what can still be ranked.
    sound = {name: score.float().nan_to_num(0.0) for name, score in scores.items()}
    keys = {name: score.contiguous().view(torch.int32) for name, score in sound.items()}
    low = torch.full_like(room, -1)  # too much, or never to be asked for: zeros too
    high = torch.full_like(room, _INFINITY)  # nothing always fits
    for _ in range(_INFINITY.bit_length()):
        middle = (low + high + 1) // 2
        fits = _left(_above(keys, middle), bias) <= room
        high = torch.where(fits, middle, high)
        low = torch.where(fits, low, middle)
    return effective(_above(keys, high))


def _left(masks: Masks, bias: bool) -> Int[Tensor, " networks"]:
    """Count what is left of masks without dead neurons, looking at every weight once."""
    total = torch.zeros((), dtype=torch.long)
    if "first" in masks:
        sees, seen = masks["first"].sum(-1), masks["second"].sum(-2)
        total = ((sees + seen + bias) * ((sees > 0) & (seen > 0))).sum(-1)
    if "direct" in masks:
        total = total + masks["direct"].sum((-2, -1))
    return total


def _above(keys: Mapping[str, Tensor], threshold: Int[Tensor, " networks"]) -> Masks:
    cut = threshold.to(torch.int32).view(-1, 1, 1)
    return {name: key > cut for name, key in keys.items()}


def sown(
    noise: Mapping[str, Float[Tensor, "networks rows columns"]],
    room: Int[Tensor, " networks"],
    *,
    erdos_renyi: bool,
) -> Masks:
    """Draw masks of exactly so many weights, shared among the layers by a rule.

    Uniform gives every layer the same density; Erdos and Renyi's rule gives it weights in
    proportion to its rows and columns. What a layer has no place for goes to the others.
    """
    sizes = torch.tensor([one[0].numel() for one in noise.values()], device=room.device)
    shares = sizes
    if erdos_renyi:
        shares = torch.tensor([sum(one.shape[1:]) for one in noise.values()], device=room.device)
    wanted = torch.minimum((room.unsqueeze(-1) * shares / shares.sum()).long(), sizes)
    for layer in range(len(sizes)):  # in turn, whatever is left over
        left = room - wanted.sum(-1)
        wanted[:, layer] += torch.minimum(left, sizes[layer] - wanted[:, layer])
    return {
        name: keep_largest(one.flatten(1), wanted[:, layer]).view(one.shape)
        for layer, (name, one) in enumerate(noise.items())
    }
