"""A table of a model that a person likes to read, alone or beside what it was before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

from torch import nn

from fissile.budget import NonZeros, nonzeros
from fissile.errors import FissileError
from fissile.layers import DropConnectLinear, Partitioned, SparseConv2d, SparseLayer, is_transposed

__all__ = ["summary"]

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

    Args:
        model: a model, or what it was before expansion.
        after: the expanded model, to be shown beside it; of a large one only what has changed.
        file: where to print; standard output by default.
    """
    lines = _alone(model) if after is None else _both(model, after)
    print("\n".join(lines), file=file or sys.stdout)


def _alone(model: nn.Module) -> list[str]:
    counts = nonzeros(model)
    rows = [_row(name, module, counts) for name, module in _layers(model)]
    total = f"{counts.weights:,} non-zero weights, {counts.all:,} non-zero parameters in all"
    return [*_table([_HEADER, *rows], left=3), total]


def _both(before: nn.Module, after: nn.Module) -> list[str]:
    olds, news = dict(_layers(before)), dict(_layers(after))
    if olds.keys() != news.keys():
        raise FissileError("the two models have other layers; give one model before and after")
    counts = nonzeros(before), nonzeros(after)
    rows = [_row_of_both(name, olds[name], news[name], counts) for name in olds]
    rest = 0
    if len(rows) > _ROWS:
        changed = [row for row in rows if any("→" in cell for cell in row[3:]) or row[1] != row[2]]
        rest, rows = len(rows) - len(changed), changed
    lines = _table([_BESIDE, *rows], left=3)
    if rest:
        lines.append(f"and {rest} layers that are as they were")
    weights = " → ".join(f"{count.weights:,}" for count in counts)
    everything = " → ".join(f"{count.all:,}" for count in counts)
    return [*lines, f"{weights} non-zero weights, {everything} non-zero parameters in all"]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(True for _ in module.named_parameters(recurse=False)):
            yield name or "(model)", module


def _counts(name: str, counts: NonZeros) -> tuple[int, int]:
    """Return a layer's weights, and what it has besides."""
    mine = [count for count in counts.counts if count.layer == name]
    weights = sum(count.count for count in mine if count.kind == "weight")
    return weights, sum(count.count for count in mine) - weights


def _row(name: str, module: nn.Module, counts: NonZeros) -> tuple[str, ...]:
    weights, other = _counts(name, counts)
    kind, shape, slots = _describe(module)
    density = f"{weights / slots:.1%}" if slots else ""
    return name, kind, shape, f"{weights:,}" if slots else "", density, f"{other:,}"


def _row_of_both(
    name: str, old: nn.Module, new: nn.Module, counts: tuple[NonZeros, NonZeros]
) -> tuple[str, ...]:
    (weights, other), (new_weights, new_other) = (_counts(name, count) for count in counts)
    shapes = (_describe(module)[1] or _describe(module)[0] for module in (old, new))
    slots = _describe(old)[2]
    return name, *shapes, _change(weights, new_weights) if slots else "", _change(other, new_other)


def _change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _describe(module: nn.Module) -> tuple[str, str, int]:
    """Return a layer's kind, its shape and how many weights it could have."""
    kind = type(module).__name__.removesuffix("Linear").lower()
    if isinstance(module, SparseLayer):
        kind = kind.removesuffix("conv2d")
        neurons, slots = str(module.outputs), module.pattern().numel()
        if isinstance(module, Partitioned):
            neurons = f"{module.outputs // module.alpha}×{module.alpha} = {neurons}"
        if isinstance(module, DropConnectLinear):
            kind = f"{kind}, {module.active():,} active"
        return kind, f"{module.inputs} → {neurons}{_kernel(module)}", slots
    slots = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
    if isinstance(module, nn.Linear):
        return kind or "dense", f"{module.in_features} → {module.out_features}", slots
    if isinstance(module, nn.Conv2d):
        shape = f"{module.in_channels} → {module.out_channels}{_kernel(module)}"
        return kind, shape, slots
    if is_transposed(module):
        weight = module.get_parameter("weight")
        return kind, f"{weight.shape[0]} → {weight.shape[1]}", slots
    return kind, "", slots


def _kernel(module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d | SparseConv2d):
        return ", " + "×".join(str(size) for size in module.kernel_size)
    return ""


def _table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Align the columns, the first few to the left and the numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
