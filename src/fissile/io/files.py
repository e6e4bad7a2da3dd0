"""Saving and loading: safetensors with a recipe in the metadata, and never a pickle.

The recipe says how the layers were expanded and, for a ``fissile.MLP``, how the model is built. A
file is checked before anything is made of it.
"""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor

from fissile._common.errors import FileError, needs
from fissile.expansion.structure import VERSION, rebuild, recipe_of
from fissile.io.safetensors import (
    check_mlp,
    check_patterns,
    check_sizes,
    check_tensors,
    names_in,
    naming,
    read,
    write,
)
from fissile.layers.mlp import MLP
from fissile.packed import files as packs
from fissile.packed.convert import for_inference
from fissile.packed.layers import Packed


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model to a safetensors file; a file already there is replaced whole or not at all.

    >>> save(expand(model, 2), "wide.safetensors")
    """
    needs("safetensors", "files")
    write(*described(model), Path(path))


def described(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's tensors and its recipe, as a file holds them.

    >>> tensors, recipe = described(expand(model, 2))
    """
    tensors = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FileError(f"cannot save {key!r}: it is a {type(value).__name__}, not a tensor")
        if isinstance(value, SparseSemiStructuredTensor):
            raise FileError(f"cannot save {key!r}, a 2:4 tensor; save the expanded model instead")
        tensors[key] = value.detach().cpu().clone().contiguous()  # tied tensors become two
    mlp = model.recipe() if type(model) is MLP else None
    recipe = {"version": VERSION, "mlp": mlp, "frozen": packs.frozen_in(model)} | recipe_of(model)
    if packed := packs.entries_of(model):
        tensors = packs.for_file(model, tensors)
        for name, entry in packed.items():
            recipe["layers"][name] |= entry
    return tensors, recipe


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Read a model from a file that :func:`save` wrote.

    >>> wide = load("wide.safetensors")  # a fissile.MLP needs nothing else
    >>> wide = load("wide.safetensors", dense)  # others: the dense model, left untouched

    Args:
        path: the file.
        model: for anything but a ``fissile.MLP``, a model of the same architecture, dense (as
            narrow as it was, or as wide) or expanded; a filled copy is returned, in the given
            model's dtype, or in the file's if that is packed.
        device: where the new model shall live, if no model is given, or one on the meta device.
    """
    needs("safetensors", "files")
    tensors, recipe = read(Path(path))
    if model is not None and any(isinstance(module, Packed) for module in model.modules()):
        raise FileError("load() fills a dense or an expanded model, and this one is packed")
    with naming(path):
        built = _empty_mlp(recipe, tensors) if model is None else copy.deepcopy(model)
        if packs.is_packed(recipe):
            return _load_packed(built, tensors, recipe, _home(built, device))
        check_sizes(recipe["layers"], tensors)
        rebuild(built, recipe)
        check_tensors(built.state_dict(), tensors)
        check_patterns(built, tensors)
        built.load_state_dict(tensors, assign=model is None)
        if model is None:
            _try_out(built)
            built.requires_grad_(True).to(device)
            for name in names_in(recipe.get("frozen", [])):
                built.get_parameter(name).requires_grad_(False)
    return built


def _load_packed(
    model: nn.Module,
    tensors: dict[str, Tensor],
    recipe: dict[str, Any],
    device: torch.device | str,
) -> nn.Module:
    """Fill a dense model with a packed file, in the file's dtypes."""
    packs.check_layouts(recipe)
    tied = packs.ties_in(model)
    for name, entry in recipe["layers"].items():
        with suppress(AttributeError):  # rebuild says what is missing
            if "layout" in entry:
                model.get_submodule(name).to("meta")
    rebuild(model, recipe)
    tensors = packs.from_file(tensors, recipe, model)
    check_tensors(model.state_dict(), tensors)
    check_patterns(model, tensors)
    model.load_state_dict(tensors, assign=True)
    packs.tie(model, tied)
    if type(model) is MLP:
        _try_out(model)
    names = frozenset(name for name, _ in model.named_parameters())
    frozen = frozenset(names_in(recipe.get("frozen", [])))
    if unknown := frozen - names:
        raise FileError(f"the recipe is damaged: there is no {min(unknown)!r} that does not learn")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and torch.device(device).type != "meta":
            raise FileError(f"{name} is on the meta device and not in the file; give it values")
    return for_inference(model, names - frozen).to(device)


def _home(model: nn.Module, device: torch.device | str) -> torch.device | str:
    """Return where a model is; one on the meta device is nowhere yet, and goes to ``device``."""
    weight = next(model.parameters(), None)
    return device if weight is None or weight.is_meta else weight.device


def _empty_mlp(recipe: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    if recipe.get("mlp") is None:
        raise FileError("the file does not say how the model is built; give load() the model")
    check_mlp(recipe["mlp"], tensors)
    model = MLP.from_recipe(recipe["mlp"], device="meta")
    for name, module in model.named_modules():
        slopes = tensors.get(f"{name}.weight")
        if isinstance(module, nn.PReLU) and slopes is not None and slopes.ndim == 1:
            # A recipe does not say how many slopes there are.
            module.weight = nn.Parameter(torch.empty_like(slopes, device="meta"))
            module.num_parameters = len(slopes)
    return model


def _try_out(model: nn.Module) -> None:
    """Pass the shape of one row through, so that layers that do not fit are found now."""
    assert isinstance(model, MLP)
    weight = next(model.parameters())
    row = torch.zeros(1, model.sizes[0], dtype=weight.dtype, device="meta")
    with torch.no_grad():
        out = copy.deepcopy(model).to("meta").eval()(row)
    if out.shape != (1, model.sizes[-1]):
        raise FileError("the layers do not fit each other")
