"""Saving and loading: safetensors with a recipe in the metadata, and never a pickle.

The recipe says how the layers were expanded and, for a ``fissile.MLP``, how the model is built, so
that loading needs no code of the user's. A file is checked before anything is made of it.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fissile.chain import NORMS
from fissile.errors import FileError, needs
from fissile.layers import (
    REMOVED,
    DropConnectLinear,
    MaskedLinear,
    PartitionedLinear,
    SparseLinear,
)
from fissile.network import MLP

__all__ = ["load", "save"]

_VERSION = 1
# Whatever a recipe that fits no model runs into, it becomes one clear error.
_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
_KINDS = {
    "partitioned": PartitionedLinear,
    "masked": MaskedLinear,
    "dropconnect": DropConnectLinear,
}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model to a safetensors file; a file already there is replaced whole or not at all.

    >>> save(expand(model, 2), "wide.safetensors")
    """
    needs("safetensors", "files")
    from safetensors.torch import save_file

    tensors = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FileError(f"cannot save {key!r}: it is a {type(value).__name__}, not a tensor")
        tensors[key] = value.detach().cpu().clone().contiguous()  # tied tensors become two
    recipe = {
        "version": _VERSION,
        "mlp": model.recipe() if type(model) is MLP else None,
        "layers": {name: _layer_recipe(layer) for name, layer in _sparse_layers(model).items()},
    }
    _replace(Path(path), lambda temporary: save_file(tensors, temporary, _metadata(recipe)))


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
        model: for anything but a ``fissile.MLP``, a model of the same architecture, dense or
            expanded; a filled copy is returned, in the given model's dtype.
        device: where the new model shall live, if no model is given.
    """
    needs("safetensors", "files")
    tensors, recipe = _read(Path(path))
    try:
        built = _empty_mlp(recipe) if model is None else copy.deepcopy(model)
        for name, layer in recipe["layers"].items():
            built.set_submodule(name, _sparse_layer(name, layer, tensors, built))
        _resize_norms(built, tensors)
        _check_tensors(built, tensors)
        built.load_state_dict(tensors, assign=model is None)
        if model is None:
            _try_out(built)
            built.requires_grad_(True).to(device)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except _MISFITS as error:
        raise FileError(f"{path}: the recipe and the tensors do not fit: {error}") from None
    return built


def _metadata(recipe: dict[str, Any]) -> dict[str, str]:
    return {"fissile": json.dumps(recipe)}


def _sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}


def _layer_recipe(layer: SparseLinear) -> dict[str, Any]:
    kind = next(name for name, known in _KINDS.items() if type(layer) is known)
    return {"kind": kind} | ({"alpha": layer.alpha} if isinstance(layer, PartitionedLinear) else {})


def _replace(path: Path, write: Callable[[str], None]) -> None:
    """Write beside the file and rename: a full disk or a crash never costs what was there."""
    from safetensors import SafetensorError

    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"could not write {path}: {error}") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "fissile" not in metadata:
                raise FileError(f"{path}: not a fissile file: it has no recipe in its metadata")
            recipe = json.loads(metadata["fissile"])
            # Cloned: tensors that lie askew in the file's buffer round a little differently.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the recipe is damaged: {error}") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("layers"), dict):
        raise FileError(f"{path}: the recipe is damaged: it names no layers")
    if recipe.get("version") != _VERSION:
        raise FileError(
            f"{path}: written in version {recipe.get('version')!r} of the format, this is "
            f"version {_VERSION}; update fissile"
        )
    return tensors, recipe


def _empty_mlp(recipe: dict[str, Any]) -> nn.Module:
    if recipe.get("mlp") is None:
        raise FileError("the file does not say how the model is built; give load() the model")
    # On the meta device nothing is allocated, whatever sizes a hostile recipe claims.
    return MLP.from_recipe(recipe["mlp"], device="meta")


def _sparse_layer(
    name: str, layer: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module
) -> SparseLinear:
    """Build an expanded layer from its tensors, after checking that they make one."""
    old = model.get_submodule(name)
    if not isinstance(old, nn.Linear | SparseLinear):
        raise FileError(f"{name!r} is a {type(old).__name__} in the model, not a linear layer")
    like = old.weight
    meta = like.device.type == "meta"
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise FileError(f"{name}.weight is no matrix of floats")
    if (bias is None) != (old.bias is None):
        raise FileError(f"{name!r} has a bias in only one of the file and the model")
    if not meta:
        weight = weight.to(like)
        bias = None if bias is None else bias.to(like)
    new: SparseLinear
    if layer["kind"] == "partitioned":
        owner, alpha = tensors[f"{name}.owner"], layer["alpha"]
        _check_owner(name, owner, weight, alpha)
        new = PartitionedLinear(weight, owner.to(weight.device), alpha, bias)
    elif layer["kind"] == "masked":
        mask = tensors[f"{name}.mask"]
        if mask.dtype is not torch.bool or mask.shape != weight.shape:
            raise FileError(f"{name}.mask is no mask for its weight")
        new = MaskedLinear(weight, mask.to(weight.device), bias)
    elif layer["kind"] == "dropconnect":
        degree = tensors[f"{name}.degree"]
        if degree.shape != weight.shape[:1] or bool(
            (degree < 0).any() | (degree > weight.shape[1]).any()
        ):
            raise FileError(f"{name}.degree does not fit its weight")
        stream = tensors[f"{name}.stream"]
        if stream.shape != (2,) or stream.dtype is not torch.int64:
            raise FileError(f"{name}.stream is no seed and count")
        new = DropConnectLinear(weight, degree.to(weight.device), bias)
    else:
        raise FileError(f"{name!r} has the unknown kind {layer['kind']!r}")
    _check_grown(name, old, new)
    if new.bias is not None and new.bias.shape != (new.out_features,):
        raise FileError(f"{name}.bias does not fit its weight")
    return new.train(old.training)


def _check_grown(name: str, old: nn.Linear | SparseLinear, new: SparseLinear) -> None:
    """Refuse a layer that cannot have grown out of the model's: one side may be a multiple."""
    mine, file = (old.in_features, old.out_features), (new.in_features, new.out_features)
    if isinstance(old, SparseLinear):
        fits = mine == file
    elif isinstance(new, PartitionedLinear):
        fits = new.weight.shape == old.weight.shape
    else:
        sides = list(zip(mine, file, strict=True))
        fits = all(b % a == 0 and b >= a for a, b in sides) and any(a == b for a, b in sides)
    if not fits:
        raise FileError(f"{name!r} maps {mine} features in the model and {file} in the file")


def _check_owner(name: str, owner: Tensor, weight: Tensor, alpha: Any) -> None:
    if type(alpha) is not int or not 1 <= alpha <= weight.shape[1]:
        raise FileError(f"{name!r} has alpha={alpha!r} in the recipe")
    if owner.dtype not in (torch.int8, torch.int16, torch.int32) or owner.shape != weight.shape:
        raise FileError(f"{name}.owner does not fit its weight")
    if bool(((owner < REMOVED) | (owner >= alpha)).any()):
        raise FileError(f"{name}.owner names a child outside 0 .. {alpha - 1}")


def _resize_norms(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give norms and slopes the width they have in the file."""
    for name, module in model.named_modules():
        if not isinstance(module, (*NORMS, nn.PReLU)):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, value in own:
            found = tensors.get(f"{name}.{key}")
            if found is None or found.shape == value.shape or value.ndim != 1:
                continue
            fresh = torch.zeros(found.shape, dtype=value.dtype, device=value.device)
            setattr(module, key, nn.Parameter(fresh) if key in module._parameters else fresh)
            width = found.numel()
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.normalized_shape = (width,)
            elif isinstance(module, nn.BatchNorm1d):
                module.num_features = width
            else:
                module.num_parameters = width


def _check_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = model.state_dict()
    if missing := expected.keys() - tensors.keys():
        raise FileError(f"the tensor {min(missing)!r} is missing")
    if foreign := tensors.keys() - expected.keys():
        raise FileError(f"the tensor {min(foreign)!r} has no place in the model")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            raise FileError(
                f"the tensor {key!r} has shape {tuple(tensors[key].shape)}, "
                f"the model needs {tuple(value.shape)}"
            )


def _try_out(model: nn.Module) -> None:
    """Pass the shape of one row through, so that layers that do not fit are found now."""
    assert isinstance(model, MLP)
    weight = next(model.parameters())
    row = torch.zeros(1, model.sizes[0], dtype=weight.dtype, device="meta")
    with torch.no_grad():
        out = copy.deepcopy(model).to("meta").eval()(row)
    if out.shape != (1, model.sizes[-1]):
        raise FileError("the layers do not fit each other")
