"""The width in a model's config after expansion: the wide model can be built from it anew."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import torch
from torch import nn

from fissile.layers import SparseConv2d, SparseLayer, SparseLinear
from fissile.surgery.trace import quietly

__all__ = ["dense_shapes", "widen_config"]

_KEYS = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
    "dim_feedforward", "hidden_dim", "ffn_hidden_size", "mlp_dim",
)  # fmt: skip


def widen_config(model: nn.Module, widths: set[int], alpha: int) -> None:
    """Multiply those widths in an expanded model's config by alpha, if that describes it exactly.

    The proof is a model built from the changed config on the meta device: it must have the shapes
    of the expanded one written out. Any doubt leaves the config alone.
    """
    config = getattr(model, "config", None)
    if config is None or isinstance(config, nn.Module | dict) or alpha == 1:
        return
    found = {key: width for key in _KEYS if (width := _width(config, key)) in widths}
    shapes = dense_shapes(model) if found else {}
    for count in range(len(found), 0, -1):
        for keys in combinations(found, count):
            wide = {key: found[key] * alpha for key in keys}
            if _shapes_with(model, config, wide) == shapes:
                for key, width in wide.items():
                    setattr(config, key, width)
                return


def dense_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes of a model as ``to_dense`` would write it, without writing."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, layer in model.named_modules():
        key = f"{name}.weight" if name else "weight"
        if isinstance(layer, SparseLinear):
            shape = (layer.out_features, layer.in_features)
            shapes[key] = shape[::-1] if layer.transposed else shape
        elif isinstance(layer, SparseConv2d):
            shapes[key] = (layer.out_channels, layer.in_channels, *layer.kernel_size)
        else:
            assert not isinstance(layer, SparseLayer)
    return shapes


def _width(config: Any, key: str) -> int | None:
    width = getattr(config, key, None)
    if width is None and key == "n_inner" and hasattr(config, key):  # GPT-2's word for four times
        embedding = getattr(config, "n_embd", None)
        return 4 * embedding if isinstance(embedding, int) else None
    return width if type(width) is int else None


def _shapes_with(
    model: nn.Module, config: Any, wide: dict[str, int]
) -> dict[str, tuple[int, ...]] | None:
    """Build the architecture from a changed config, without tensors; None if that fails."""
    try:
        with quietly(), torch.device("meta"):
            other = copy.deepcopy(config)
            for key, width in wide.items():
                setattr(other, key, width)
            return {name: tuple(p.shape) for name, p in type(model)(other).named_parameters()}
    except Exception:  # foreign code: whatever goes wrong, the config stays as it is
        return None
