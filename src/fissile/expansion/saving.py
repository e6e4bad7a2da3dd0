"""What ``save_pretrained`` of transformers writes of a model whose layers were changed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from fissile._common.errors import FissileError
from fissile._common.files import atomic_write, open_regular
from fissile.expansion.structure import METHOD, config_of, is_expanded, note, shapes_with

#: Stands in ``config.json`` for the name of the weights' file, which transformers quotes because no
#: file can have it. The loader of fissile takes it out before.
_NEEDED = (
    "this model was expanded with fissile: install fissile and put `import "
    "fissile.integrations.transformers` before from_pretrained"
)


def make_savable(model: nn.Module) -> None:
    """Give a transformers model a config and a ``save_pretrained`` that fit its layers."""
    note(model)
    if hasattr(model, "save_pretrained") and config_of(model) is not None:
        vars(model)["save_pretrained"] = MethodType(save_pretrained, model)


# Pickle finds it by its name, which is that of the method it stands for.
def save_pretrained(model: Any, save_directory: Any, *args: Any, **options: Any) -> None:
    """Save a model as transformers does if it can be read again, with or without fissile."""
    described = {} if is_expanded(model) else shapes_with(model, config_of(model), {}) or {}
    for name, parameter in model.named_parameters():
        mine, other = tuple(parameter.shape), described.get(name)
        if other not in (None, mine):
            raise FissileError(
                f"from_pretrained could not load these plain layers: {name!r} is {mine}, and "
                f"{other} in a model made from the config, which cannot say how this one was "
                "widened; expand with where= only what the config describes, or save the expanded "
                "model, which loads after `import fissile.integrations.transformers`"
            )
    type(model).save_pretrained(model, save_directory, *args, **options)
    if args[0] if args else options.get("is_main_process", True):  # another process writes it
        seal(Path(save_directory))


def seal(folder: Path) -> None:
    """Write into the config of an expanded model the checksums of its files and of the config."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    entry = config.get("quantization_config", {})
    if entry.get("quant_method") == METHOD:
        config["transformers_weights"] = _NEEDED
        files = (file for file in sorted(folder.iterdir()) if ".safetensors" in file.name)
        entry["files"] = {file.name: file_checksum(file) for file in files}
        entry["crc32"] = config_checksum(config)
        with atomic_write(folder / "config.json", "w") as file:
            json.dump(config, file, indent=2)


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read piece by piece."""
    crc = 0
    with open_regular(path) as file:
        while part := file.read(2**20):
            crc = zlib.crc32(part, crc)
    return crc


def config_checksum(config: dict[str, Any]) -> int:
    """Return the CRC-32 of an expanded model's config without the entry that holds it."""
    entry = {key: one for key, one in config["quantization_config"].items() if key != "crc32"}
    bare = config | {"quantization_config": entry}
    return zlib.crc32(json.dumps(bare, sort_keys=True).encode())
