"""What ``save_pretrained`` of transformers writes of a model whose layers were changed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from fissile._common.errors import FissileError
from fissile._common.files import atomic_write
from fissile.expansion.structure import METHOD, config_of, note, shapes_with
from fissile.layers import SparseLayer

#: Stands in ``config.json`` for the name of the weights' file, which transformers quotes when it
#: finds none of that name. The loader of fissile takes it out before.
_NEEDS_FISSILE = (
    "this model was expanded with fissile: install fissile and put `import "
    "fissile.integrations.transformers` before from_pretrained"
)


def make_savable(model: nn.Module) -> None:
    """Give a transformers model a config and a ``save_pretrained`` that fit its layers, if it can.

    >>> make_savable(wide_bert)
    """
    note(model)
    if hasattr(model, "save_pretrained") and config_of(model) is not None:
        vars(model)["save_pretrained"] = MethodType(save_pretrained, model)


# Its name is that of the method it stands for: so it is pickled with its model.
def save_pretrained(
    model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    """Save a model as transformers does if it can be read again, with or without fissile."""
    expanded = any(isinstance(module, SparseLayer) for module in model.modules())
    if not expanded:
        _check_described(model)
    type(model).save_pretrained(model, save_directory, *args, **options)
    with suppress(FileNotFoundError):  # another process writes it
        path = Path(save_directory, "config.json")
        config = json.loads(path.read_text("utf-8"))
        if expanded and config.get("quantization_config", {}).get("quant_method") == METHOD:
            config["transformers_weights"] = _NEEDS_FISSILE
            with atomic_write(path, "w") as file:
                file.write(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _check_described(model: nn.Module) -> None:
    """Refuse plain layers that are wider than the config says: nothing could load them."""
    described = shapes_with(model, config_of(model), {}) or {}
    for name, parameter in model.named_parameters():
        mine, other = tuple(parameter.shape), described.get(name)
        if other not in (None, mine):
            raise FissileError(
                f"from_pretrained could not load these plain layers: {name!r} is {mine}, and "
                f"{other} in a model made from the config, which cannot say how this one was "
                "widened; expand with where= only what the config describes, or save the expanded "
                "model, which loads after `import fissile.integrations.transformers`"
            )
