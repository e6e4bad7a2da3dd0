"""Packed layers as the tensors of a file, and back, with nothing in the file believed.

Layout ``inline`` is written as the weights that exist, one row of numbers for each layer: where
they go is in their lowest bits (see ``bits``). Only where a pattern is too long for that, as in
the smallest of layers, it is a tensor of its own.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError
from fissile.expansion.structure import read_pairs
from fissile.layers import Masked, Partitioned, SparseConv2d, SparseLayer
from fissile.packed.bits import (
    MANTISSA,
    Carrier,
    Reader,
    exists,
    from_bytes,
    owner_bits,
    read_groups,
    read_mask,
    to_bytes,
)
from fissile.packed.convert import (
    inline_layers,
    living,
    masked_like,
    partitioned_like,
    settled,
    stream_of,
)
from fissile.packed.format import Layout, check_layout
from fissile.packed.layers import Packed, PackedMasked, PackedPartitioned

# --- the recipe in few bytes

#: What to say of a file that this version knows nothing about.
NEWER = "written by a newer fissile; update it"

#: Part of the format: what it holds must never change, or files can no longer be read.
_WORDS = (
    b'"transposed":true,"partitioned-conv","masked-conv","layer_norm":true,"embedding":512,'
    b'"settings":{"approximate":"none"}},"name":"gelu","name":"silu","layout":"plane","group":8'
    b'"model.layers.0.mlp.gate_proj":"encoder.layer.0.intermediate.dense":"output.dense",'
    b'"frozen":["layers.0.weight","layers.0.bias"],"norms":{"layers.1":'
    b'{"version":1,"mlp":{"sizes":[784,512,100,32,10],"embedding":null,"layer_norm":false,'
    b'"dropout":0.0,"activation":{"name":"relu","settings":{"inplace":false}}},"frozen":[],'
    b'"layers":{"layers.0":{"kind":"partitioned","inputs":512,"outputs":128,"alpha":4,'
    b'"layout":"inline"},"layers.2":{"kind":"masked","inputs":128,"outputs":100,'
    b'"layout":"inline","group":4}},"norms":{},"pairs":[{"firsts":["layers.0"],"between":[],'
    b'"second":"layers.2"}],"crc32":'
)
#: The first character of a shortened recipe, and those of one that is not; others are yet to come.
_MARK, _PLAIN = "z", frozenset("{[ 0123456789abcdef")
#: No recipe is longer, nor so many times longer than what it was shortened to: reading JSON takes
#: up to 25 times its length, and a small file shall not ask for much memory.
LONGEST, _GRANTED, _TIMES = 2**24, 2**20, 64


def shortened(text: str) -> str:
    """Write a recipe in fewer characters, if it can be lengthened again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, _WORDS)
    raw = text.encode()
    short = _MARK + base64.b85encode(packer.compress(raw) + packer.flush()).decode()
    return short if len(raw) <= _most(short) else text


def lengthened(text: str) -> str:
    """Return a recipe as it was, shortened or not; a damaged one is a ``ValueError``."""
    if not text or text[0] in _PLAIN:
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} characters")
        return text
    if text[0] != _MARK:
        raise FileError(f"its recipe begins with {text[0]!r}: {NEWER}")
    unpacker = zlib.decompressobj(-15, _WORDS)
    try:
        whole = unpacker.decompress(base64.b85decode(text[1:]), _most(text))
    except zlib.error as error:
        raise ValueError(f"it is not deflated: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it does not end where it should")
    return whole.decode()


def sealed(text: str) -> str:
    """Put a checksum before a text, in which one letter may make another activation."""
    return f"{zlib.crc32(text.encode()):08x}{text}"


def opened(text: str) -> str:
    """Return what :func:`sealed` was given; what has changed since is a ``ValueError``."""
    if sealed(text[8:]) != text:
        raise ValueError("its checksum differs")
    return text[8:]


def _most(short: str) -> int:
    return min(LONGEST, _GRANTED + _TIMES * len(short))


# --- tensors

#: The tensor of a pattern that is in no weights.
PATTERN = "fissile.pattern"
#: Places for every weight that is written, and some for a model that has none left: a recipe of
#: more is not believed. Expansion makes alpha places for a weight, over all layers.
_SPARSEST, _ALWAYS = 256, 2**20
#: What a packed layer's entry has besides that of the expanded one.
_OURS = ("layout", "group", "kernel")


def is_packed(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe is that of a packed model."""
    return any(isinstance(e, Mapping) and "layout" in e for e in recipe["layers"].values())


def entries_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a recipe says of packed layers besides what it says of the expanded ones."""
    return {
        name: {"layout": layer.layout}
        | ({"group": layer.group} if isinstance(layer, PackedMasked) else {})
        | ({"kernel": [*layer.kernel_size]} if isinstance(layer, SparseConv2d) else {})
        for name, layer in model.named_modules()
        if isinstance(layer, Packed)
    }


def expanded_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe said of a layer before it was packed."""
    return {key: value for key, value in entry.items() if key not in _OURS}


def kernel_in(name: str, entry: Mapping[str, Any]) -> list[int] | None:
    """Return the size of a convolution's filters as the recipe has it; None if it has none."""
    if "kernel" not in entry:
        return None
    kernel = entry["kernel"]
    sizes = kernel if isinstance(kernel, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise FileError(f"{name!r} has kernel={kernel!r} in the recipe")
    return sizes


def for_file(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a packed model's tensors as a file holds them."""
    layers = inline_layers(model)
    parts = {f"{name}.{part}" for name in layers for part in ("weight", "live")}
    kept = {key: tensor for key, tensor in tensors.items() if key not in parts}
    alive = {name: living(layer) for name, layer in layers.items()}
    cells = sum(
        layer.weight.numel() if isinstance(layer, PackedPartitioned) else prod(layer.matrix_shape)
        for layer in layers.values()
    )
    if cells > places_for(alive.values()):
        raise FileError(
            f"{cells:,} places have too few weights for a file of layout inline; "
            'pack the model with layout="plane"'
        )
    if (values := settled(layers)) is None:
        values, kept[PATTERN] = alive, to_bytes(stream_of(layers))
    return kept | {f"{name}.weight": weight for name, weight in values.items()}


def from_file(
    tensors: Mapping[str, Tensor], recipe: Mapping[str, Any], model: nn.Module
) -> dict[str, Tensor]:
    """Put packed layers in place of empty expanded ones, and return the tensors they need."""
    entries = {name: e for name, e in recipe["layers"].items() if "layout" in e}
    inline = {name: e for name, e in entries.items() if e["layout"] == "inline"}
    kept = {key: tensor for key, tensor in tensors.items() if key != PATTERN}
    bits = {name: owner_bits(e.get("alpha", 1)) for name, e in inline.items()}
    carriers = [Carrier(_living_in(kept, name), count) for name, count in bits.items()]
    reader = Reader(carriers)
    if (pattern := tensors.get(PATTERN)) is not None:
        if pattern.dtype is not torch.uint8 or pattern.ndim != 1:
            raise FileError(f"{PATTERN} is no row of bytes")
        reader = Reader([], from_bytes(pattern, 8 * len(pattern)))
    room = places_for(layer.weight for layer in carriers)
    for name, entry in entries.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, SparseLayer)
        written = kernel_in(name, entry)
        kernel = [*layer.kernel_size] if isinstance(layer, SparseConv2d) else None
        if written != kernel:
            raise FileError(f"{name!r} has kernel={written} in the recipe, not {kernel}")
        if name in inline:
            rows, columns = layer.rows(layer.weight).shape
            room -= rows * columns
            if room < 0:
                raise FileError(f"{name!r} has {rows} × {columns} places for too few weights")
            _restore(kept, name, layer, entry, reader)
        new = _packed_from(kept, name, layer, entry)
        new.pair = layer.pair
        model.set_submodule(name, new)
    return kept


def check_layouts(recipe: Mapping[str, Any]) -> None:
    """Refuse layouts that are not known here."""
    for name, entry in recipe["layers"].items():
        layout = entry.get("layout", "inline")
        if not isinstance(layout, str):
            raise FileError(f"{name!r} has layout={layout!r} in the recipe")
        if layout not in get_args(Layout):
            raise FileError(f"{name!r} has the layout {layout!r}: {NEWER}")


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC-32 over all tensors, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        raw, what = tensor.flatten().view(torch.uint8), f"{name} {tensor.dtype} {[*tensor.shape]}"
        crc = zlib.crc32(raw.numpy().data, zlib.crc32(what.encode(), crc))
    return crc


def frozen_in(model: nn.Module) -> list[str]:
    """Name what does not learn; in a packed model, what would not if it were unpacked."""
    learns = getattr(model, "learns", None)
    named = model.named_parameters()
    return [n for n, p in named if not (p.requires_grad if learns is None else n in learns)]


def ties_in(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [many for many in names.values() if len(many) > 1]


def tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Share one parameter again among all the names under which a file holds it."""
    for first, *others in ties:
        shared = model.get_parameter(first)
        for name in others:
            if not _same_bits(shared, model.get_parameter(name)):
                raise FileError(f"{first} and {name} are one in the model and two in the file")
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, shared)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same bit by bit: NaN, too, is what it was."""
    if x.dtype is not y.dtype or x.shape != y.shape:
        return False
    return torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (x, y)))


def places_for(weights: Iterable[Tensor]) -> int:
    """Return how many places the given weights may have."""
    return _ALWAYS + _SPARSEST * sum(weight.numel() for weight in weights)


def _living_in(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the weights of an inline layer as a file has them."""
    weight = tensors[f"{name}.weight"]
    if weight.ndim != 1 or weight.dtype not in MANTISSA or not bool(exists(weight).all()):
        raise FileError(f"{name}.weight is no row of packed weights")
    return weight


def _restore(
    tensors: dict[str, Tensor], name: str, layer: SparseLayer, entry: Mapping[str, Any],
    reader: Reader,
) -> None:  # fmt: skip
    """Put the weights of an inline layer where the stream says they go."""
    values = tensors[f"{name}.weight"]
    rows, columns = layer.rows(layer.weight).shape
    if isinstance(layer, Partitioned):
        mask = read_mask(reader, rows * columns, len(values)).view(rows, columns)
    else:
        group = _group(name, entry, columns)
        some, mask = read_groups(reader, rows * columns // group, group, len(values))
        tensors[f"{name}.live"] = to_bytes(some.view(rows, -1))
    weight = values.new_zeros(mask.shape)
    weight.masked_scatter_(mask, values)
    tensors[f"{name}.weight"] = weight if isinstance(layer, Partitioned) else weight.flatten()


def _packed_from(
    tensors: Mapping[str, Tensor], name: str, layer: SparseLayer, entry: Mapping[str, Any]
) -> Packed:
    """Return a packed layer with a file's tensors, if they are what packing makes."""
    layout = check_layout(entry["layout"])
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if (bias is None) != (layer.bias is None):
        raise FileError(f"{name!r} has a bias in the file or in the model, not in both")
    rows, columns = layer.rows(layer.weight).shape
    new: Packed
    if isinstance(layer, Partitioned):
        planes = tensors[f"{name}.planes"] if layout == "plane" else None
        if weight.shape != (rows, columns):
            raise FileError(f"{name}.weight is not the matrix of the recipe")
        new = partitioned_like(layer, weight, planes, bias)
    else:
        assert isinstance(layer, Masked)
        live, group = tensors[f"{name}.live"], _group(name, entry, columns)
        if live.ndim != 2 or 8 * live.shape[1] < columns // group or len(live) != rows:
            raise FileError(f"{name}.live is no bitmap of its groups")
        new = masked_like(layer, weight, live, group, bias, layout)
    if wrong := new.misfit():
        raise FileError(f"{name!r} is damaged: {wrong}")
    return new


def _group(name: str, entry: Mapping[str, Any], columns: int) -> int:
    group = entry.get("group")
    if type(group) is not int or group < 1 or columns % group:
        raise FileError(f"{name!r} has groups of {group!r} in the recipe")
    return group


# --- the dense network's size, from the recipe


def dense_sizes(recipe: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs that layers had before the split, where the recipe says so.

    >>> dense_sizes(recipe_of(expand(MLP([32, 8, 1]), 2)))
    {'layers.0': (32, 8), 'layers.2': (8, 1)}
    """
    copies, sizes = _copies(recipe), dict[str, tuple[int, int]]()
    for name, entry in recipe["layers"].items():
        if name in copies:
            sizes[name] = entry["inputs"] // copies[name], entry["outputs"]
        elif "alpha" in entry:
            sizes[name] = entry["inputs"], entry["outputs"] // entry["alpha"]
    return sizes


def dense_bytes(
    layers: Mapping[str, Packed], others: Mapping[str, Tensor], recipe: Mapping[str, Any]
) -> int | None:
    """Count the bytes of the dense network's tensors; None if the recipe does not tell its size."""
    sizes, copies = dense_sizes(recipe), _copies(recipe)
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
    layers, copies = recipe["layers"], {}
    for pair in read_pairs(recipe) or ():
        alphas = {layers[name].get("alpha") for name in pair.firsts if name in layers}
        if len(alphas) == 1 and None not in alphas and pair.second in layers:
            copies[pair.second] = alphas.pop()
    return copies
