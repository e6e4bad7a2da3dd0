"""The width in a model's config after expansion: the wide model can be built from it anew."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

import torch
from torch import nn

from fissile.discovery.meta_copy import random_numbers_apart
from fissile.layers import SparseConv2d, SparseLayer, SparseLinear

__all__ = ["config_of", "dense_shapes", "widen_config"]

_KEYS = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
    "dim_feedforward", "hidden_dim", "ffn_hidden_size", "mlp_dim",
)  # fmt: skip


def config_of(model: nn.Module) -> Any:
    """Return a model's config, if it has one that is an object with attributes; else None."""
    config = getattr(model, "config", None)
    return None if isinstance(config, nn.Module | Mapping) else config


def widen_config(model: nn.Module, widths: set[int], alpha: int) -> None:
    """Multiply those widths in an expanded model's config by alpha, if that describes it exactly.

    The proof is a model built from the changed config on the meta device: it must have the shapes
    of the expanded one written out. As few widths change as that takes; any doubt leaves the
    config alone. Copies of it that parts of the model hold are changed alike, and so is what a
    model around this one sees, if it shares the config.
    """
    config = config_of(model)
    if config is None or alpha == 1:
        return
    found = {key: width for key in _KEYS if (width := _width(config, key)) in widths}
    shapes = dense_shapes(model) if found else {}
    for count in range(1, len(found) + 1):
        for keys in combinations(found, count):
            wide = {key: found[key] * alpha for key in keys}
            if _shapes_with(model, config, wide) == shapes:
                for one in (config, *_copies(model, config)):
                    _set(one, {k: found[k] for k in keys if _width(one, k) == found[k]}, alpha)
                return


def _copies(model: nn.Module, config: Any) -> list[Any]:
    """Return the copies of a config that expanded parts of a model hold."""
    held: dict[int, tuple[Any, nn.Module]] = {}
    for part in model.modules():
        own = config_of(part)
        if own is not config and type(own) is type(config):
            held.setdefault(id(own), (own, part))  # the outermost part comes first
    return [
        own
        for own, part in held.values()
        if any(isinstance(module, SparseLayer) for module in part.modules())
    ]


def _set(config: Any, widths: dict[str, int], alpha: int) -> None:
    with suppress(Exception):  # foreign code: a config that will not change stays as it is
        for key, width in widths.items():
            setattr(config, key, width * alpha)


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
        with random_numbers_apart(), torch.device("meta"):
            other = copy.deepcopy(config)
            for key, width in wide.items():
                setattr(other, key, width)
            return {name: tuple(p.shape) for name, p in type(model)(other).named_parameters()}
    except Exception:  # foreign code: whatever goes wrong, the config stays as it is
        return None
