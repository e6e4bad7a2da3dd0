"""What a saved model holds, read without the code that made it: its file says what is expanded.

The layers are made from the file's tensors, each by itself. How a convolution moves over an image
does not matter for that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, needs
from fissile.expansion.structure import read_pairs
from fissile.io import safetensors
from fissile.layers import (
    MaskedConv2d,
    MaskedLinear,
    PartitionedConv2d,
    PartitionedLinear,
    SparseLayer,
)
from fissile.packed.files import from_file, is_packed, kernel_in, verify

__all__ = ["Content", "read", "tree_of"]


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
    with _named(path):
        if is_packed(recipe):
            return _packed(tensors, recipe)
        return _expanded(tensors, _known(recipe))


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a file that fits nothing runs into into one clear error."""
    try:
        yield
    except FissileError as error:
        raise FileError(f"{path}: {error}") from None
    except safetensors.MISFITS as error:
        raise FileError(f"{path}: the recipe and the tensors do not fit: {error}") from None


def _known(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of an expanded model, in the order in which it is written."""
    known = {"version": recipe["version"], "mlp": recipe.get("mlp")}
    known |= {"frozen": safetensors.names_in(recipe.get("frozen", []))}
    read_pairs(recipe)  # if they are none, it says so now
    parts = ("layers", "norms", "pairs")
    return known | {key: recipe[key] for key in parts if key in recipe}


def _expanded(tensors: dict[str, Tensor], recipe: dict[str, Any]) -> Content:
    entries = recipe["layers"]
    safetensors.check_sizes(entries, tensors)
    layers = {name: _layer(name, entry, tensors) for name, entry in entries.items()}
    tree = tree_of(layers)
    parts = tree.state_dict()
    safetensors.check_tensors(tree, {key: tensors[key] for key in parts})
    safetensors.check_patterns(tree, tensors)
    return Content(layers, {key: t for key, t in tensors.items() if key not in parts}, recipe)


def _layer(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseLayer:
    """Make an expanded layer from a file's tensors."""
    kind, weight, bias = entry["kind"], tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if weight.ndim != (4 if kind.endswith("-conv") else 2):
        raise FileError(f"{name}.weight has not the shape of a layer that is {kind}")
    if bias is not None and bias.shape != (entry["outputs"],):
        raise FileError(f"{name}.bias is not what the recipe says")
    if kind == "dropconnect":
        raise FissileError(f"{name!r} is DropConnect: it uses all its weights, nothing to pack")
    alpha = entry.get("alpha", 1)
    if type(alpha) is not int or not 1 <= alpha <= entry["inputs"]:
        raise FileError(f"{name!r} has alpha={alpha!r} in the recipe")
    turned = entry.get("transposed", False) is True
    if kind.startswith("partitioned"):
        owner = _like(tensors[f"{name}.owner"], weight, f"{name}.owner")
        if weight.ndim == 4:
            return PartitionedConv2d(weight, owner, alpha, bias)
        return PartitionedLinear(weight, owner, alpha, bias, transposed=turned)
    if kind.startswith("masked"):
        mask = _like(tensors[f"{name}.mask"], weight, f"{name}.mask").bool()
        if weight.ndim == 4:
            return MaskedConv2d(weight, mask, bias)
        return MaskedLinear(weight, mask, bias, transposed=turned)
    raise FileError(f"{name!r} has the unknown kind {kind!r}")


def _like(tensor: Tensor, weight: Tensor, name: str) -> Tensor:
    if tensor.shape != weight.shape:
        raise FileError(f"{name} is not of the shape of its weight")
    return tensor


def _packed(tensors: dict[str, Tensor], recipe: dict[str, Any]) -> Content:
    verify(tensors, recipe)
    tree = tree_of({name: _empty(name, e, tensors) for name, e in recipe["layers"].items()})
    found = from_file(tensors, recipe, tree)
    layers = {name: m for name, m in tree.named_modules() if isinstance(m, SparseLayer)}
    parts = tree.state_dict().keys()
    return Content(layers, {key: t for key, t in found.items() if key not in parts}, recipe)


def _empty(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseLayer:
    """Make an expanded layer that holds no memory, for a packed one to take its place."""
    if "layout" not in entry:
        return _layer(name, entry, tensors)
    rows, kernel = entry["outputs"] // entry.get("alpha", 1), _kernel(name, entry)
    if rows * entry.get("alpha", 1) != entry["outputs"]:
        raise FileError(f"{name!r} has outputs={entry['outputs']!r} in the recipe")
    shape = rows, entry["inputs"], *kernel
    parts = {"weight": torch.empty(shape, device="meta")}
    if f"{name}.bias" in tensors:
        parts["bias"] = torch.empty(entry["outputs"], device="meta")
    if entry["kind"].startswith("partitioned"):
        parts["owner"] = torch.empty(shape, dtype=torch.int32, device="meta")
    else:
        parts["mask"] = torch.empty(shape, dtype=torch.bool, device="meta")
    return _layer(name, entry, {f"{name}.{key}": part for key, part in parts.items()})


def _kernel(name: str, entry: Mapping[str, Any]) -> list[int]:
    """Return the size of a packed convolution's filters; a linear layer has none."""
    if not entry["kind"].endswith("-conv"):
        return []
    kernel = kernel_in(name, entry)
    if kernel is None:
        raise FileError(f"{name!r} is a packed convolution without a kernel in the recipe")
    return kernel


def tree_of(layers: Mapping[str, SparseLayer]) -> nn.Module:
    """Return a module that has the layers under their dotted names, and nothing else."""
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
