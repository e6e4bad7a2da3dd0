"""Packing a saved model without the code that made it: its file says which layers are expanded.

The layers are made from the file's tensors, each by itself, and written the way ``fissile.save``
writes them. How a convolution moves over an image does not matter for that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fissile import container
from fissile.errors import FileError, FissileError, needs
from fissile.layers import (
    MaskedConv2d,
    MaskedLinear,
    PartitionedConv2d,
    PartitionedLinear,
    SparseLayer,
)
from fissile.packed.files import (
    PATTERN,
    checksum,
    entries_of,
    expanded_entry,
    for_file,
    from_file,
    is_packed,
)
from fissile.packed.format import Layout
from fissile.packed.inline import inline_layers, stream_of
from fissile.packed.layers import Packed
from fissile.packed.make import packed_layer, unpacked_layer
from fissile.packed.narrow import narrow_bytes
from fissile.pairs import read_pairs

__all__ = ["Content", "Packing", "pack_file", "read", "unpack_file"]


class Content(NamedTuple):
    """What a file holds: its expanded or packed layers, its other tensors, and its recipe."""

    layers: dict[str, SparseLayer]
    others: dict[str, Tensor]
    recipe: dict[str, Any]

    @property
    def packed(self) -> bool:
        """Whether the layers are packed."""
        return is_packed(self.recipe)


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


def read(path: str | os.PathLike[str]) -> Content:
    """Return what a file that ``fissile.save`` wrote holds, layer by layer.

    >>> read("wide.safetensors").layers
    {'layers.0': PartitionedLinear(...), 'layers.2': MaskedLinear(...)}
    """
    needs("safetensors", "files")
    tensors, recipe = container.read(Path(path))
    if not recipe["layers"]:
        raise FileError(f"{path}: a dense model: it has no expanded layers")
    with _named(path):
        if is_packed(recipe):
            return _packed(tensors, recipe)
        return _expanded(tensors, _completed(recipe, tensors))


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
    cast = {key: _cast(tensor, dtype) for key, tensor in others.items()}
    tree = _tree(news)
    tensors = for_file(tree, cast | tree.state_dict())
    entries = entries_of(tree)
    recipe["layers"] = {name: recipe["layers"][name] | entry for name, entry in entries.items()}
    _write(tensors, recipe | {"crc32": checksum(tensors)}, Path(to))
    return Packing(
        os.path.getsize(path),
        os.path.getsize(to),
        _bytes(others) + sum(_bytes(layer.state_dict()) for layer in layers.values()),
        _bytes(tensors),
        narrow_bytes(news, cast, recipe),
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
    del recipe["crc32"]
    _write(others | _tree(olds).state_dict(), recipe, Path(to))


# --- reading


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a file that fits nothing runs into into one clear error."""
    try:
        yield
    except FissileError as error:
        raise FileError(f"{path}: {error}") from None
    except container.MISFITS as error:
        raise FileError(f"{path}: the recipe and the tensors do not fit: {error}") from None


def _completed(recipe: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Add what files of the first release leave to their tensors: sizes, and the norms' widths."""
    layers = {name: dict(entry) for name, entry in recipe["layers"].items()}
    for name, entry in layers.items():
        if "inputs" not in entry:
            rows, entry["inputs"] = tensors[f"{name}.weight"].shape[:2]
            entry["outputs"] = rows * entry.get("alpha", 1)
    wide = {entry[key] for entry in layers.values() for key in ("inputs", "outputs")}
    norms = {
        key.removesuffix(".weight"): len(tensor)
        for key, tensor in tensors.items()
        if key.endswith(".weight") and tensor.ndim == 1 and len(tensor) in wide
    }
    known = {"version": recipe["version"], "mlp": recipe.get("mlp")}
    known |= {"frozen": container.names_in(recipe.get("frozen", []))}
    rest = {key: value for key, value in recipe.items() if key in ("norms", "pairs")}
    read_pairs(rest)  # if they are none, it says so now
    return known | {"layers": layers, "norms": norms} | rest


def _expanded(tensors: dict[str, Tensor], recipe: dict[str, Any]) -> Content:
    entries = recipe["layers"]
    container.check_sizes(entries, tensors)
    layers = {name: _layer(name, entry, tensors) for name, entry in entries.items()}
    tree = _tree(layers)
    parts = tree.state_dict()
    container.check_tensors(tree, {key: tensors[key] for key in parts})
    container.check_patterns(tree, tensors)
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
    if recipe.get("crc32") != checksum(tensors):
        raise FileError("the tensors are not those that were written: their checksum differs")
    tree = _tree({name: _empty(name, e, tensors) for name, e in recipe["layers"].items()})
    found = from_file(tensors, recipe, tree)
    layers = {name: m for name, m in tree.named_modules() if isinstance(m, SparseLayer)}
    parts = tree.state_dict().keys()
    return Content(layers, {key: t for key, t in found.items() if key not in parts}, recipe)


def _empty(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseLayer:
    """Make an expanded layer that holds no memory, for a packed one to take its place."""
    if "layout" not in entry:
        return _layer(name, entry, tensors)
    if entry["kind"].endswith("-conv"):
        raise FileError(
            f"{name!r} is a packed convolution, and only the model knows its kernel: use "
            "fissile.load(path, model)"
        )
    rows = entry["outputs"] // entry.get("alpha", 1)
    weight = torch.empty(rows, entry["inputs"], device="meta")
    bias = tensors.get(f"{name}.bias")
    bias = None if bias is None else torch.empty(entry["outputs"], device="meta")
    turned = entry.get("transposed", False) is True
    if entry["kind"] == "partitioned":
        owner = torch.empty_like(weight, dtype=torch.int32)
        return PartitionedLinear(weight, owner, entry["alpha"], bias, transposed=turned)
    return MaskedLinear(weight, torch.empty_like(weight).bool(), bias, transposed=turned)


def _tree(layers: Mapping[str, SparseLayer]) -> nn.Module:
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


# --- writing


def _check_paths(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    if os.path.isdir(to):
        raise FileError(f"{to} is a folder; give the name of the file to write")
    if os.path.exists(to) and os.path.exists(path) and os.path.samefile(path, to):
        raise FileError(f"{to} is the model itself; give another name, training needs this one")


def _pack(name: str, layer: SparseLayer, dtype: torch.dtype | None, layout: Layout) -> Packed:
    try:
        return packed_layer(layer, dtype, layout)
    except FissileError as error:
        raise FissileError(f"{name!r}: {error}") from None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write(tensors: Mapping[str, Tensor], recipe: dict[str, Any], path: Path) -> None:
    ready = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    container.write(ready, recipe, path)


# --- counting


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bits_given(tree: nn.Module, *, within: bool) -> int:
    """Count the bits that weights give away to say where they go, the stream's if it is in them."""
    inline = inline_layers(tree)
    stream = len(stream_of(inline)) if within else 0
    return stream + sum(layer.owner_bits * layer.nonzeros() for layer in inline.values())
