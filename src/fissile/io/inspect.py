"""What a saved model holds, read without the code that made it: its file says what is expanded.

How a convolution moves over an image is not in the file, and not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, needs
from fissile.expansion.structure import read_pairs, rebuild
from fissile.io import safetensors
from fissile.layers import MaskedConv2d, MaskedLinear, SparseLayer
from fissile.packed.files import check_layouts, from_file, is_packed, kernel_in

#: Modules around the layers: each is some thousand bytes, and a dot in a name is one.
_PARTS = 2**16


class Content(NamedTuple):
    """What a file holds: its expanded or packed layers, its other tensors, and its recipe."""

    layers: dict[str, SparseLayer]
    others: dict[str, Tensor]
    recipe: dict[str, Any]

    @property
    def packed(self) -> bool:
        """Whether the layers are packed."""
        return is_packed(self.recipe)


def read(path: str | os.PathLike[str]) -> Content:
    """Return what a file that ``fissile.save`` wrote holds, layer by layer.

    >>> read("wide.safetensors").layers
    {'layers.0': PartitionedLinear(...), 'layers.2': MaskedLinear(...)}
    """
    needs("safetensors", "files")
    tensors, recipe = safetensors.read(Path(path))
    if not recipe["layers"]:
        raise FileError(f"{path}: a dense model: it has no expanded layers")
    with safetensors.naming(path):
        safetensors.names_in(recipe.get("frozen", []))
        read_pairs(recipe)
        if is_packed(recipe):
            check_layouts(recipe)
        else:
            safetensors.check_sizes(recipe["layers"], tensors)
        tree = tree_of({n: _empty(n, e, tensors) for n, e in recipe["layers"].items()})
        rebuild(tree, {"layers": recipe["layers"]})
        if is_packed(recipe):
            tensors = from_file(tensors, recipe, tree)
        own = {key: tensors[key] for key in tree.state_dict()}
        safetensors.check_tensors(tree.state_dict(), own)
        safetensors.check_patterns(tree, own)
        tree.load_state_dict(own, assign=True)
    layers = {name: m for name, m in tree.named_modules() if isinstance(m, SparseLayer)}
    return Content(layers, {key: t for key, t in tensors.items() if key not in own}, recipe)


def _empty(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseLayer:
    """Return a layer without memory, as wide as the recipe says, for ``rebuild`` to replace."""
    kind, kernel = entry["kind"], []
    if kind == "dropconnect":
        raise FissileError(f"{name!r} is DropConnect: it uses all its weights, nothing to pack")
    convolution = kind.endswith("-conv")
    if convolution and "layout" in entry:
        kernel = kernel_in(name, entry) or []
    elif convolution:
        kernel = [*tensors[f"{name}.weight"].shape[2:]]
    if convolution and len(kernel) != 2:
        raise FileError(f"{name!r} is a convolution without a kernel in the recipe")
    weight = torch.empty(entry["outputs"], entry["inputs"], *kernel, device="meta")
    bias = weight.new_empty(entry["outputs"]) if f"{name}.bias" in tensors else None
    if convolution:
        return MaskedConv2d(weight, weight.bool(), bias)
    turned = entry.get("transposed", False) is True
    return MaskedLinear(weight, weight.bool(), bias, transposed=turned)


def tree_of(layers: Mapping[str, SparseLayer]) -> nn.Module:
    """Return a module that has the layers under their dotted names, and nothing else."""
    if sum(name.count(".") + 1 for name in layers) > _PARTS:
        raise FileError(f"its layers' names have more than {_PARTS:,} parts in all")
    root = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(last, layer)
    return root
