"""A safetensors file with a recipe in its metadata, written whole and checked before it is used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, first_line
from fissile._common.files import atomic_write, open_regular
from fissile.expansion.structure import VERSION
from fissile.layers import REMOVED, DropConnectLinear, Partitioned, SparseLayer
from fissile.packed import files as packs
from fissile.packed.files import lengthened, opened, sealed, shortened
from fissile.packed.layers import Packed

#: Whatever a recipe that fits no model runs into, it becomes one clear error.
_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and its recipe, of which no more is known than its version."""
    try:
        with opened_file(path) as file:
            metadata = file.metadata() or {}
            if "fissile" not in metadata:
                raise FileError("not a fissile file: it has no recipe in its metadata")
            recipe = _parsed(opened(lengthened(metadata["fissile"])))
            # Cloned: tensors that lie askew in the file's buffer round a little differently.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the recipe is damaged: {first_line(error)}") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("layers"), dict):
        raise FileError(f"{path}: the recipe is damaged: it names no layers")
    if recipe.get("version") != VERSION:
        raise FileError(
            f"{path}: written in version {recipe.get('version')!r} of the format, this is "
            f"version {VERSION}; update fissile"
        )
    with naming(path):
        _check_names(tensors, recipe)
        if recipe.pop("crc32", None) != packs.checksum(tensors):
            raise FileError("the tensors are not those that were written: their checksum differs")
    return tensors, recipe


@contextmanager
def opened_file(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file that is one: the library would wait for a FIFO."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path), safe_open(path, framework="pt") as file:
            yield file
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or first_line(error)}; give another") from None
    except SafetensorError as error:
        raise FileError(f"{path}: not a readable safetensors file: {first_line(error)}") from None


def _parsed(text: str) -> Any:
    """Read a recipe; no number in one is NaN."""
    numbers = {"Infinity": math.inf, "-Infinity": -math.inf}  # NaN is a KeyError
    try:
        return json.loads(text, parse_constant=numbers.__getitem__)
    except KeyError:
        raise ValueError("a number in it is NaN") from None


def _check_names(tensors: Iterable[str], recipe: Mapping[str, Any]) -> None:
    """Refuse names that could be commands to the terminal that they are shown on."""
    if strange := [name for name in (*tensors, *recipe["layers"]) if not name.isprintable()]:
        raise FileError(f"the name {strange[0][:80]!r} is no plain text; rename it")


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error that a file's recipe can cause into a `FileError` that names the file."""
    try:
        yield
    except FissileError as error:
        raise FileError(f"{path}: {error}") from None
    except _MISFITS as error:
        raise FileError(
            f"{path}: the recipe and the tensors do not fit: {first_line(error)}"
        ) from None


def write(tensors: dict[str, Tensor], recipe: dict[str, Any], path: Path, **notes: str) -> None:
    """Write tensors, a recipe and other notes; a file already there is replaced whole or not.

    Both have a checksum: the tensors' is in the recipe, the recipe's before it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(recipe | {"crc32": packs.checksum(tensors)}, separators=(",", ":"))
    try:  # what could not be read is not written
        _check_names(tensors, recipe)
        _parsed(lengthened(text))
    except ValueError as error:
        raise FileError(f"could not write {path}: {error}") from None
    text = shortened(sealed(text)) if packs.is_packed(recipe) else sealed(text)
    with atomic_write(path) as file:
        try:
            notes = {key: sealed(note) for key, note in notes.items()}
            save_file(tensors, file.name, {"fissile": text, **notes})
        except SafetensorError as error:
            raise FileError(f"could not write {path}: {error}") from None


def names_in(names: Any) -> list[str]:
    """Return a recipe's list of what does not learn, if it is one."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileError("the recipe is damaged: what does not learn is no list of names")
    return names


def check_mlp(mlp: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Let no MLP be built that has more layers than the file, or larger ones than it could fill."""
    sizes, wide = mlp["sizes"], mlp.get("embedding")
    step = 2 + bool(mlp.get("layer_norm")) + bool(mlp.get("dropout"))
    for at, size in enumerate(sizes[1:]):
        bias = tensors.get(f"layers.{step * at}.bias")
        if bias is None or type(size) is not int or size < 1 or bias.numel() % size:
            raise FileError(f"the recipe has a layer of {size!r} neurons, and the file has not")
    most = packs.places_for(tensors.values())
    if any(type(one) is not int or not 0 < one <= most for one in (sizes[0], wide or 1)):
        raise FileError(f"the recipe has {sizes[0]!r} inputs, more than the file can be for")


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
