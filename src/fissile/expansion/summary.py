"""A table of a model that a person likes to read, alone or beside what it was before."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TextIO

from torch import nn

from fissile._common.errors import FissileError
from fissile._common.progress import aligned
from fissile.expansion.budget import NonZeros, nonzeros
from fissile.layers import DropConnectLinear, SparseConv2d, SparseLayer, is_transposed

_HEADER = ("layer", "kind", "inputs → neurons", "weights", "density", "other")
_BESIDE = ("layer", "before", "after", "weights", "other")
#: The longest table of two models that is shown whole.
_ROWS = 40


def summary(
    model: nn.Module, after: nn.Module | None = None, *, file: TextIO | None = None
) -> None:
    """Print a model's layers, their non-zero weights and how dense they are.

    >>> summary(expand(MLP([32, 8, 1]), 2))
    layer     kind         inputs → neurons  weights  density  other
    layers.0  partitioned  32 → 8×2 = 16         248    48.4%     16
    layers.2  masked       16 → 1                 16   100.0%      1
    264 non-zero weights, 281 non-zero parameters in all
    >>> summary(dense, wide)
    layer     before  after            weights   other
    layers.0  32 → 8  32 → 8×2 = 16  256 → 248  8 → 16
    layers.2  8 → 1   16 → 1            8 → 16       1
    264 → 264 non-zero weights, 273 → 281 non-zero parameters in all
    (biases and norms come with the neurons; budget="all" counts them)

    Args:
        model: a model, or what it was before expansion.
        after: the expanded model, to be shown beside it; of a large one only what has changed.
        file: where to print; standard output by default.
    """
    lines = _alone(model) if after is None else _both(model, after)
    print("\n".join(lines), file=file or sys.stdout)


def _alone(model: nn.Module) -> list[str]:
    counts = nonzeros(model)
    mine = _by_layer(counts)
    rows = [_row(name, module, *mine[name]) for name, module in _layers(model)]
    total = f"{counts.weights:,} non-zero weights, {counts.all:,} non-zero parameters in all"
    return [*aligned([_HEADER, *rows], right=range(3, 6)), total]


def _both(before: nn.Module, after: nn.Module) -> list[str]:
    olds, news = dict(_layers(before)), dict(_layers(after))
    if olds.keys() != news.keys():
        raise FissileError("the two models have other layers; give one model before and after")
    counts = nonzeros(before), nonzeros(after)
    was, now = (_by_layer(count) for count in counts)
    rows = [_row_of_both(name, olds[name], news[name], was[name], now[name]) for name in olds]
    shown = rows
    if len(rows) > _ROWS:
        shown = [row for row in rows if any("→" in cell for cell in row[3:]) or row[1] != row[2]]
    lines = aligned([_BESIDE, *shown], right=range(3, 5))
    if rest := len(rows) - len(shown):
        lines.append(f"and {rest} layers that are as they were")
    weights = " → ".join(f"{count.weights:,}" for count in counts)
    everything = " → ".join(f"{count.all:,}" for count in counts)
    lines.append(f"{weights} non-zero weights, {everything} non-zero parameters in all")
    if counts[0].weights == counts[1].weights and counts[0].all < counts[1].all:
        lines.append('(biases and norms come with the neurons; budget="all" counts them)')
    return lines


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(True for _ in module.named_parameters(recurse=False)):
            yield name or "(model)", module


def _by_layer(counts: NonZeros) -> dict[str, tuple[int, int]]:
    """Return every layer's weights, and what it has besides; nothing of its own is (0, 0)."""
    layers: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in counts.counts:
        weights, other = layers[row.layer]
        is_weight = row.kind == "weight"
        layers[row.layer] = weights + is_weight * row.count, other + (not is_weight) * row.count
    return layers


def _row(name: str, module: nn.Module, weights: int, other: int) -> tuple[str, ...]:
    kind, shape, slots = _describe(module)
    density = f"{weights / slots:.1%}" if slots else ""
    return name, kind, shape, f"{weights:,}" if slots else "", density, f"{other:,}"


def _row_of_both(
    name: str, old: nn.Module, new: nn.Module, was: tuple[int, int], now: tuple[int, int]
) -> tuple[str, ...]:
    shapes = (_describe(module)[1] or _describe(module)[0] for module in (old, new))
    slots = _describe(old)[2]
    weights, other = (_change(*both) for both in zip(was, now, strict=True))
    return name, *shapes, weights if slots else "", other


def _change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _describe(module: nn.Module) -> tuple[str, str, int]:
    """Return a layer's kind, its shape and how many weights it could have."""
    kind = type(module).__name__.removesuffix("Linear").lower()
    if isinstance(module, SparseLayer):
        kind = kind.removesuffix("conv2d").replace("packed", "packed ")
        neurons, slots = str(module.outputs), module.pattern().numel()
        if (alpha := getattr(module, "alpha", None)) is not None:
            neurons = f"{module.outputs // alpha}×{alpha} = {neurons}"
        if isinstance(module, DropConnectLinear):
            kind = f"{kind}, {module.active():,} active"
        return kind, f"{module.inputs} → {neurons}{_kernel(module)}", slots
    slots = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
    if isinstance(module, nn.Linear):
        return kind or "dense", f"{module.in_features} → {module.out_features}", slots
    if isinstance(module, nn.Conv2d):
        return kind, f"{module.in_channels} → {module.out_channels}{_kernel(module)}", slots
    if is_transposed(module):
        return kind, "{} → {}".format(*module.get_parameter("weight").shape), slots
    return kind, "", slots


def _kernel(module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d | SparseConv2d):
        return ", " + "×".join(str(size) for size in module.kernel_size)
    return ""
