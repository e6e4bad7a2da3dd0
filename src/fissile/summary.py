"""A table of a model that a person likes to read."""

from __future__ import annotations

import sys
from typing import TextIO

from torch import nn

from fissile.budget import NonZeros, nonzeros
from fissile.layers import DropConnectLinear, PartitionedLinear, SparseLinear

__all__ = ["summary"]

_HEADER = ("layer", "kind", "inputs → neurons", "weights", "density", "other")


def summary(model: nn.Module, *, file: TextIO | None = None) -> None:
    """Print a model's layers, their non-zero weights and how dense they are.

    >>> summary(expand(MLP([32, 8, 1]), 2))
    layer     kind         inputs → neurons  weights  density  other
    layers.0  partitioned  32 → 8×2 = 16         248    48.4%     16
    layers.2  masked       16 → 1                 16   100.0%      1
    264 non-zero weights, 281 non-zero parameters in all
    """
    counts = nonzeros(model)
    rows = [
        _row(name, module, counts)
        for name, module in model.named_modules()
        if any(True for _ in module.named_parameters(recurse=False))
    ]
    table = [_HEADER, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEADER))]
    lines = [_line(row, widths) for row in table]
    lines.append(f"{counts.weights:,} non-zero weights, {counts.all:,} non-zero parameters in all")
    print("\n".join(lines), file=file or sys.stdout)


def _row(name: str, module: nn.Module, counts: NonZeros) -> tuple[str, ...]:
    mine = [count for count in counts.counts if count.layer == (name or "(model)")]
    weights = sum(count.count for count in mine if count.kind == "weight")
    other = sum(count.count for count in mine if count.kind != "weight")
    kind, shape, slots = _describe(module)
    density = f"{weights / slots:.1%}" if slots else ""
    return name or "(model)", kind, shape, f"{weights:,}" if slots else "", density, f"{other:,}"


def _describe(module: nn.Module) -> tuple[str, str, int]:
    kind = type(module).__name__.removesuffix("Linear").lower()
    if not isinstance(module, SparseLinear | nn.Linear):
        return kind, "", sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
    inputs, neurons = module.in_features, module.out_features
    slots = inputs * neurons
    if isinstance(module, PartitionedLinear):
        parents = neurons // module.alpha
        return kind, f"{inputs} → {parents}×{module.alpha} = {neurons}", slots
    if isinstance(module, DropConnectLinear):
        return f"{kind}, {module.active():,} active", f"{inputs} → {neurons}", slots
    return kind or "dense", f"{inputs} → {neurons}", slots


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
    return "  ".join([*left, *right]).rstrip()
