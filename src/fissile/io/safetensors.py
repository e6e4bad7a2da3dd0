"""A safetensors file with a recipe in its metadata, written whole and checked before it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError
from fissile._common.files import atomic_write
from fissile.layers import REMOVED, DropConnectLinear, Partitioned, SparseLayer
from fissile.packed import files as packs
from fissile.packed.files import lengthened, opened, sealed, shortened
from fissile.packed.layers import Packed

VERSION = 1
#: Whatever a recipe that fits no model runs into, it becomes one clear error.
_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and its recipe, of which no more is known than its version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "fissile" not in metadata:
                raise FileError("not a fissile file: it has no recipe in its metadata")
            recipe = json.loads(opened(lengthened(metadata["fissile"])))
            # Cloned: tensors that lie askew in the file's buffer round a little differently.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the recipe is damaged: {error}") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("layers"), dict):
        raise FileError(f"{path}: the recipe is damaged: it names no layers")
    if recipe.get("version") != VERSION:
        raise FileError(
            f"{path}: written in version {recipe.get('version')!r} of the format, this is "
            f"version {VERSION}; update fissile"
        )
    return tensors, recipe


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error that a file's recipe can cause into a `FileError` that names the file."""
    try:
        yield
    except FissileError as error:
        raise FileError(f"{path}: {error}") from None
    except _MISFITS as error:
        raise FileError(f"{path}: the recipe and the tensors do not fit: {error}") from None


def write(tensors: dict[str, Tensor], recipe: dict[str, Any], path: Path, **notes: str) -> None:
    """Write tensors, a recipe and other notes; a file already there is replaced whole or not."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(recipe, separators=(",", ":"))
    text = shortened(sealed(text)) if packs.is_packed(recipe) else text
    with atomic_write(path) as file:
        try:
            save_file(tensors, file.name, {"fissile": text, **notes})
        except SafetensorError as error:
            raise FileError(f"could not write {path}: {error}") from None


def names_in(names: Any) -> list[str]:
    """Return a recipe's list of what does not learn, if it is one."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileError("the recipe is damaged: what does not learn is no list of names")
    return names


def check_sizes(layers: dict[str, dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Let no layer be made that is larger than the file's own tensors."""
    for name, entry in layers.items():
        weight = tensors[f"{name}.weight"]
        sizes = weight.shape[1], weight.shape[0] * entry.get("alpha", 1)
        if not weight.is_floating_point() or sizes != (entry["inputs"], entry["outputs"]):
            raise FileError(f"{name}.weight is not what the recipe says")


def check_patterns(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse owners, masks and degrees that no expansion makes."""
    for name, layer in model.named_modules():
        if not isinstance(layer, SparseLayer) or isinstance(layer, Packed):
            continue  # packed layers have been looked at
        for key, buffer in layer.named_buffers():
            if tensors[f"{name}.{key}"].dtype is not buffer.dtype:
                raise FileError(f"{name}.{key} is no tensor of {buffer.dtype}")
        if isinstance(layer, Partitioned):
            key, least, most = f"{name}.owner", REMOVED, layer.alpha - 1
        elif isinstance(layer, DropConnectLinear):
            key, least, most = f"{name}.degree", 0, layer.in_features
        else:
            continue
        values = tensors[key]
        if not values.is_meta and bool(((values < least) | (values > most)).any()):
            raise FileError(f"{key} holds numbers outside {least} .. {most}")


def check_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names or shapes than a model's own."""
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
