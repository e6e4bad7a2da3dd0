"""Read, pack and unpack a saved model without its code: its file says which layers are expanded.

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
from fissile.packed.convert import inline_layers, packed_layer, stream_of, unpacked_layer
from fissile.packed.files import (
    PATTERN,
    check_layouts,
    dense_bytes,
    entries_of,
    expanded_entry,
    for_file,
    from_file,
    is_packed,
    kernel_in,
)
from fissile.packed.format import Layout, cast, refuse_overflow
from fissile.packed.layers import Packed

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


class Packing(NamedTuple):
    """What came of packing a file."""

    #: Bytes of the files, all in all.
    before: int
    after: int
    #: Bytes of their tensors alone.
    tensors_before: int
    tensors_after: int
    #: Bytes of the dense network's tensors in the same dtypes; None if its width is not known.
    narrow: int | None
    #: Weights that exist in the packed layers.
    weights: int
    #: How many of a weight's lowest bits say where it goes, on average.
    bits: float


def pack_file(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layout: Layout = "inline",
) -> Packing:
    """Pack a saved model, whatever its architecture, as :func:`fissile.pack` would.

    >>> pack_file("wide.safetensors", "packed.safetensors", dtype=torch.float16)

    Args:
        path: a file that ``fissile.save`` wrote of an expanded model.
        to: the packed file; it is replaced whole or not at all.
        dtype: of all numbers, as in :func:`fissile.pack`; by default each layer keeps its own.
        layout: where the owners are, as in :func:`fissile.pack`.
    """
    _check_paths(path, to)
    layers, others, recipe = content = read(path)
    if content.packed:
        raise FileError(f"{path}: it is packed already; fissile unpack is the way back")
    news = {name: _pack(name, layer, dtype, layout) for name, layer in layers.items()}
    fellows = {key: _cast(key, tensor, dtype) for key, tensor in others.items()}
    tree = tree_of(news)
    tensors = for_file(tree, fellows | tree.state_dict())
    entries = entries_of(tree)
    recipe["layers"] = {name: recipe["layers"][name] | entry for name, entry in entries.items()}
    _write(tensors, recipe, Path(to))
    return Packing(
        os.path.getsize(path),
        os.path.getsize(to),
        _bytes(others) + sum(_bytes(layer.state_dict()) for layer in layers.values()),
        _bytes(tensors),
        dense_bytes(news, fellows, recipe),
        weights := sum(layer.nonzeros() for layer in news.values()),
        _bits_given(tree, within=PATTERN not in tensors) / max(weights, 1),
    )


def unpack_file(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Write a packed file as one of an expanded model again, which can be trained.

    >>> unpack_file("packed.safetensors", "wide.safetensors")
    """
    _check_paths(path, to)
    layers, others, recipe = content = read(path)
    if not content.packed:
        raise FileError(f"{path}: it is not packed")
    olds = {n: unpacked_layer(m) if isinstance(m, Packed) else m for n, m in layers.items()}
    recipe["layers"] = {name: expanded_entry(e) for name, e in recipe["layers"].items()}
    _write(others | tree_of(olds).state_dict(), recipe, Path(to))


# --- writing


def _check_paths(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    if os.path.isdir(to):
        raise FileError(f"{to} is a folder; give the name of the file to write")
    if os.path.exists(to) and os.path.exists(path) and os.path.samefile(path, to):
        raise FileError(f"{to} is the model itself; give another name, training needs this one")


def _pack(name: str, layer: SparseLayer, dtype: torch.dtype | None, layout: Layout) -> Packed:
    try:
        new = packed_layer(layer, dtype, layout)
        if layer.bias is not None and new.bias is not None:
            refuse_overflow("the bias", layer.bias, new.bias)
        return new
    except FissileError as error:
        raise FissileError(f"{name!r}: {error}") from None


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    new = cast(tensor, dtype)
    refuse_overflow(name, tensor, new)
    return new


def _write(tensors: Mapping[str, Tensor], recipe: dict[str, Any], path: Path) -> None:
    ready = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    safetensors.write(ready, recipe, path)


# --- counting


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bits_given(tree: nn.Module, *, within: bool) -> int:
    """Count the bits that weights give away to say where they go, the stream's if it is in them."""
    inline = inline_layers(tree)
    stream = len(stream_of(inline)) if within else 0
    return stream + sum(layer.owner_bits * layer.nonzeros() for layer in inline.values())
