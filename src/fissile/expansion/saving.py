"""What ``save_pretrained`` of transformers writes of a model whose layers were changed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from fissile._common.errors import FissileError
from fissile._common.files import atomic_write
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
    path = Path(save_directory, "config.json")
    with suppress(FileNotFoundError):  # another process writes it
        config = json.loads(path.read_text("utf-8"))
        if config.get("quantization_config", {}).get("quant_method") == METHOD:
            with atomic_write(path, "w") as file:
                json.dump(config | {"transformers_weights": _NEEDED}, file, indent=2)
