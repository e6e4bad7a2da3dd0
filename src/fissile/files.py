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

from fissile.children import resize, width_of
from fissile.errors import FileError, needs
from fissile.layers import REMOVED, DropConnectLinear, Partitioned, SparseLayer
from fissile.network import MLP
from fissile.recipe import rebuild, recipe_of

__all__ = ["load", "save"]

_VERSION = 1
# Whatever a recipe that fits no model runs into, it becomes one clear error.
_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


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
    mlp = model.recipe() if type(model) is MLP else None
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    recipe = {"version": _VERSION, "mlp": mlp, "frozen": frozen} | recipe_of(model)
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
        model: for anything but a ``fissile.MLP``, a model of the same architecture, dense (as
            narrow as it was, or as wide) or expanded; a filled copy is returned, in the given
            model's dtype.
        device: where the new model shall live, if no model is given.
    """
    needs("safetensors", "files")
    tensors, recipe = _read(Path(path))
    try:
        built = _empty_mlp(recipe) if model is None else copy.deepcopy(model)
        if model is None:
            _resize_slopes(built, tensors)
        recipe = _completed(recipe, tensors, built)
        _check_sizes(recipe["layers"], tensors)
        rebuild(built, recipe)
        _check_tensors(built, tensors)
        _check_patterns(built, tensors)
        built.load_state_dict(tensors, assign=model is None)
        if model is None:
            _try_out(built)
            built.requires_grad_(True).to(device)
            _freeze(built, recipe.get("frozen", []))
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except _MISFITS as error:
        raise FileError(f"{path}: the recipe and the tensors do not fit: {error}") from None
    return built


def _metadata(recipe: dict[str, Any]) -> dict[str, str]:
    return {"fissile": json.dumps(recipe)}


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


def _freeze(model: nn.Module, names: Any) -> None:
    """Let those parameters not learn that did not."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileError("the recipe is damaged: what does not learn is no list of names")
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def _resize_slopes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give PReLUs the slopes they have in the file: an MLP's settings do not say how many."""
    for name, module in model.named_modules():
        slopes = tensors.get(f"{name}.weight")
        if isinstance(module, nn.PReLU) and slopes is not None and slopes.ndim == 1:
            module.weight = nn.Parameter(torch.empty_like(slopes, device="meta"))
            resize(module, len(slopes))


def _completed(
    recipe: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module
) -> dict[str, Any]:
    """Add what early files leave to their tensors: the layers' sizes and the norms' widths."""
    layers = {name: dict(entry) for name, entry in recipe["layers"].items()}
    for name, entry in layers.items():
        if "inputs" not in entry:
            rows, entry["inputs"] = tensors[f"{name}.weight"].shape[:2]
            entry["outputs"] = rows * entry.get("alpha", 1)
    norms = recipe.get("norms")
    if norms is None:
        norms = {
            name: tensors[f"{name}.weight"].shape[-1]
            for name, module in model.named_modules()
            if width_of(module) is not None and f"{name}.weight" in tensors
        }
    return recipe | {"layers": layers, "norms": norms}


def _check_sizes(layers: dict[str, dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Let no layer be made that is larger than the file's own tensors."""
    for name, entry in layers.items():
        weight = tensors[f"{name}.weight"]
        sizes = weight.shape[1], weight.shape[0] * entry.get("alpha", 1)
        if not weight.is_floating_point() or sizes != (entry["inputs"], entry["outputs"]):
            raise FileError(f"{name}.weight is not what the recipe says")


def _check_patterns(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse owners, masks and streams that no expansion makes."""
    for name, layer in model.named_modules():
        if not isinstance(layer, SparseLayer):
            continue
        for key, buffer in layer.named_buffers():
            if tensors[f"{name}.{key}"].dtype is not buffer.dtype:
                raise FileError(f"{name}.{key} is no tensor of {buffer.dtype}")
        if isinstance(layer, Partitioned):
            owner = tensors[f"{name}.owner"]
            if bool(((owner < REMOVED) | (owner >= layer.alpha)).any()):
                raise FileError(f"{name}.owner names a child outside 0 .. {layer.alpha - 1}")
        elif isinstance(layer, DropConnectLinear):
            degree = tensors[f"{name}.degree"]
            if bool(((degree < 0) | (degree > layer.in_features)).any()):
                raise FileError(f"{name}.degree does not fit its weight")


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
