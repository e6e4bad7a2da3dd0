"""Packing a saved model without the code that made it: its file says which layers are expanded.

The layers are packed each by itself and written the way ``fissile.save`` writes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError
from fissile.io import safetensors
from fissile.io.inspect import Content, read, tree_of
from fissile.layers import SparseLayer
from fissile.packed.convert import inline_layers, packed_layer, stream_of, unpacked_layer
from fissile.packed.files import (
    PATTERN,
    dense_bytes,
    entries_of,
    expanded_entry,
    for_file,
)
from fissile.packed.format import Layout, cast, refuse_overflow
from fissile.packed.layers import Packed

__all__ = ["Content", "Packing", "pack_file", "read", "unpack_file"]


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
