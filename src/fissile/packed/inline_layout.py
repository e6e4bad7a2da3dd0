"""The layers of layout ``inline`` and the stream that says where their weights go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fissile._common.shapes import Bool, Float
from fissile.packed.bits import exists
from fissile.packed.layers import Bitmap, Owned, Packed
from fissile.packed.stream import Carrier, embedded, write_groups, write_places

__all__ = ["inline_layers", "living", "settle", "settled", "stream_of"]


def inline_layers(model: nn.Module) -> dict[str, Packed]:
    """Return the packed layers of layout ``inline`` by their names, in the model's order."""
    named = model.named_modules()
    return {name: m for name, m in named if isinstance(m, Packed) and m.layout == "inline"}


def living(layer: Packed) -> Float[Tensor, " living"]:
    """Return the weights that exist, row after row."""
    weight = layer.weight.detach().cpu()
    return weight[exists(weight)]


def stream_of(layers: Mapping[str, Packed]) -> Bool[Tensor, " bits"]:
    """Write down where the weights of these layers go, apart from their owners."""
    parts = [torch.zeros(0, dtype=torch.bool, device="cpu")]
    for layer in layers.values():
        there = exists(layer.weight.detach().cpu())
        if isinstance(layer, Owned):
            parts.append(write_places(there.flatten()))
        else:
            assert isinstance(layer, Bitmap)
            parts.append(write_groups(_in_groups(layer, there)))
    return torch.cat(parts)


def settled(layers: Mapping[str, Packed]) -> dict[str, Tensor] | None:
    """Return the living weights, rounded to carry the stream; None if it is too long for them.

    Weights that carry it already come back as they are.
    """
    carriers = [Carrier(living(layer), layer.owner_bits) for layer in layers.values()]
    values = embedded(stream_of(layers), carriers)
    return None if values is None else dict(zip(layers, values, strict=True))


def settle(model: nn.Module) -> None:
    """Round a model's weights now to what a file will hold, so that saving changes nothing."""
    layers = inline_layers(model)
    for name, values in (settled(layers) or {}).items():
        weight = layers[name].weight.detach()
        weight[exists(weight)] = values.to(weight.device)


def _in_groups(layer: Bitmap, there: Bool[Tensor, " stored"]) -> Bool[Tensor, "groups size"]:
    """Return which weights exist in all groups of a layer, stored or not."""
    shape = layer.outputs * layer.groups, layer.group
    mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    mask[layer.stored().flatten()] = there.view(-1, layer.group)
    return mask
