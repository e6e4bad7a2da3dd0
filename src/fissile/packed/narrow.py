"""How large the dense network was, as far as the recipe of an expanded one tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fissile.expansion.structure import read_pairs
from fissile.packed.layers import Packed

__all__ = ["narrow_bytes", "narrow_sizes"]


def narrow_sizes(recipe: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs that layers had before the split, where the recipe says so.

    >>> narrow_sizes(recipe_of(expand(MLP([32, 8, 1]), 2)))
    {'layers.0': (32, 8), 'layers.2': (8, 1)}
    """
    layers = recipe["layers"]
    sizes = {
        name: (entry["inputs"], entry["outputs"] // entry["alpha"])
        for name, entry in layers.items()
        if "alpha" in entry
    }
    for second, alpha in _copies(recipe).items():
        sizes[second] = layers[second]["inputs"] // alpha, layers[second]["outputs"]
    return {name: sizes[name] for name in layers if name in sizes}


def narrow_bytes(
    layers: Mapping[str, Packed], others: Mapping[str, Tensor], recipe: Mapping[str, Any]
) -> int | None:
    """Count the bytes of the dense network's tensors; None if the recipe does not tell its size."""
    sizes, copies = narrow_sizes(recipe), _copies(recipe)
    if sizes.keys() != layers.keys():
        return None
    total = 0
    for name, layer in layers.items():
        inputs, outputs = sizes[name]
        kernel = layer.matrix_shape[1] // layer.inputs
        numbers = inputs * outputs * kernel + (outputs if layer.bias is not None else 0)
        total += numbers * layer.weight.element_size()
    pairs = read_pairs(recipe) or ()
    widened = {norm: copies[pair.second] for pair in pairs for norm in pair.between}
    norms = recipe["norms"]
    for key, tensor in others.items():
        name = key.rpartition(".")[0]
        grown = name in norms and tensor.shape == (norms[name],)
        total += tensor.nbytes // (widened.get(name, 1) if grown else 1)
    return total


def _copies(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Return how many copies of a neuron the second layers of all pairs read."""
    layers, found = recipe["layers"], {}
    for pair in read_pairs(recipe) or ():
        alphas = {layers[name].get("alpha") for name in pair.firsts if name in layers}
        if len(alphas) == 1 and None not in alphas and pair.second in layers:
            found[pair.second] = alphas.pop()
    return found
