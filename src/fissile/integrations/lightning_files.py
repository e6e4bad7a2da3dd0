"""Checkpoints of Lightning that say how a module was expanded."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fissile._common.errors import FileError, FissileError
from fissile.expansion.structure import rebuild, recipe_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["from_checkpoint", "load", "to_checkpoint"]

_KEY = "fissile"
_Module = TypeVar("_Module", bound=nn.Module)


def load(cls: type[_Module], path: str | os.PathLike[str], **settings: Any) -> _Module:
    """Load a module, expanded or not, from a checkpoint that was written with :class:`ExpandAt`.

    >>> module = load(Module, "last.ckpt")

    Like ``Module.load_from_checkpoint``, which builds a dense module and finds that an expanded
    checkpoint does not fit. Nothing but tensors and plain values is read from the file.

    Args:
        cls: the LightningModule.
        path: the checkpoint.
        settings: for ``load_from_checkpoint`` and for the module, besides its hyperparameters.
    """

    class Rebuilt(cls):  # type: ignore[misc, valid-type]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            _rebuild(self, checkpoint)
            super().on_load_checkpoint(checkpoint)

    Rebuilt.__name__ = cls.__name__  # torch's errors name it
    if settings.pop("weights_only", None) not in (None, True):
        raise FissileError("load runs nothing that a checkpoint says; leave weights_only out")
    try:
        module: Any = Rebuilt.load_from_checkpoint(path, **settings, weights_only=True)
    except FissileError:
        raise
    except Exception:
        _check_file(path)
        raise  # the file is as it should be, so it is the module's own error
    module.__class__ = cls
    return module  # type: ignore[no-any-return]


def _check_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file that is no checkpoint of tensors and plain values."""
    if not os.path.isfile(path):
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FileError(f"{path}: {_reason(error)}") from None
    for key in ("pytorch-lightning_version", "state_dict"):
        if not isinstance(checkpoint, dict) or key not in checkpoint:
            raise FileError(f"{path}: not a checkpoint of Lightning: it has no {key!r}")


def _reason(error: Exception) -> str:
    """Say in a line why torch does not read a file."""
    if foreign := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it holds a {foreign[1]}, and nothing but tensors and plain values is read; keep "
            "hyperparameters plain (a path as a str), or leave them out of save_hyperparameters"
        )
    return f"not a checkpoint of Lightning, or torn ({type(error).__name__})"


def to_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Write the module's recipe beside its weights: what ``on_save_checkpoint`` shall do."""
    checkpoint[_KEY] = recipe_of(module)
    type(module).on_save_checkpoint(module, checkpoint)


def from_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Rebuild the module before its weights are loaded: what ``on_load_checkpoint`` shall do."""
    _rebuild(module, checkpoint)
    type(module).on_load_checkpoint(module, checkpoint)


def _rebuild(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Give a dense module the structure of the checkpoint, if that says what it is."""
    if _KEY not in checkpoint:
        return
    recipe = checkpoint[_KEY]
    rebuild(module, recipe)
    if recipe_of(module)["layers"].keys() - recipe["layers"].keys():
        raise FissileError(
            "the checkpoint is from before the expansion, and the module is expanded already; "
            "load it into a fresh dense module"
        )
