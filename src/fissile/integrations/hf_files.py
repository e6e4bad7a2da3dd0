"""Expanded models in transformers' own files: the recipe travels in ``config.json``.

transformers lets a registered quantizer replace the layers of an empty model before its weights are
loaded. An expanded model needs just that, so its recipe sits where a quantizer's settings would;
nothing is quantised, and once loaded the model is one like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fissile._common.errors import FileError
from fissile.expansion.structure import METHOD, note, rebuild, renamed
from fissile.layers import REMOVED, DropConnectLinear, Partitioned, SparseLayer

__all__ = ["ExpandedConfig", "ExpandedLoader"]

_ALIGNED = 64  # bytes, as torch allocates


@register_quantization_config(METHOD)
class ExpandedConfig(QuantizationConfigMixin):
    """The recipe as transformers hands it over from ``config.json``."""

    def __init__(self, recipe: Any = None, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # their enumeration is closed
        self.recipe = recipe


@register_quantizer(METHOD)
class ExpandedLoader(HfQuantizer):
    """Gives an empty model its expanded layers before the weights are loaded, and checks them."""

    quantization_config: ExpandedConfig

    def is_serializable(self) -> bool:
        """Tell transformers that what was loaded can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell transformers that what was loaded can be trained."""
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        if any(not str(file).endswith(".safetensors") for file in checkpoint_files or ()):
            raise FileError(
                "an expanded model is read from safetensors files only; save it again with "
                "save_pretrained"
            )
        try:
            rebuild(model, _recipe_for(model, self.quantization_config.recipe))
        except FileError as error:
            raise FileError(f"config.json: {error}") from None
        except (LookupError, RuntimeError, TypeError) as error:
            raise FileError(f"config.json: the recipe does not fit the model: {error}") from None
        self._empty = {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self._check(model)
        for parameter in model.parameters():
            _align(parameter)
        # From here on it trains, casts and saves like any other model, without this class.
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        note(model)

    def _check(self, model: PreTrainedModel) -> None:
        """Check what transformers takes on trust where layers were replaced."""
        for key, value in model.state_dict().items():
            shape, dtype = self._empty[key]
            if value.shape != shape:
                raise FileError(
                    f"the tensor {key!r} has shape {tuple(value.shape)} in the file, the model "
                    f"needs {tuple(shape)}"
                )
            if not dtype.is_floating_point and value.dtype != dtype:
                raise FileError(f"the tensor {key!r} is {value.dtype} in the file, not {dtype}")
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLayer):
                _check_layer(name, layer)


def _recipe_for(model: PreTrainedModel, recipe: Any) -> Any:
    """Name a recipe's modules as this model does.

    What was saved with one head may come back with another or with none: names gain or lose the
    prefix of the body, and what the model does not have is left out, as transformers does with
    tensors.
    """
    if not isinstance(recipe, dict) or not isinstance(recipe.get("layers"), dict):
        raise FileError("the recipe is damaged: it names no layers")
    names = {name for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."

    def own(name: str) -> str | None:
        forms = (name, name.removeprefix(prefix), prefix + name)
        return next((form for form in forms if form in names), None)

    found = renamed(recipe, own)
    if not found["layers"]:
        raise FileError("the recipe expands no layer that the model has")
    return found


def _check_layer(name: str, layer: SparseLayer) -> None:
    """Refuse a layer that is not wholly from the file, or whose numbers no expansion makes."""
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    here = {key: tensor for key, tensor in own if not tensor.is_meta}  # the others are offloaded
    for key, tensor in here.items():
        if not getattr(tensor, "_is_hf_initialized", False):  # transformers marks what it loads
            raise FileError(f"the tensor '{name}.{key}' is missing in the file")
    if isinstance(layer, Partitioned) and "owner" in here:
        _check_range(f"{name}.owner", layer.owner, REMOVED, layer.alpha - 1)
    if isinstance(layer, DropConnectLinear) and "degree" in here:
        _check_range(f"{name}.degree", layer.degree, 0, layer.in_features)


def _check_range(key: str, tensor: Tensor, least: int, most: int) -> None:
    if bool(((tensor < least) | (tensor > most)).any()):
        raise FileError(f"the tensor {key!r} holds numbers outside {least} .. {most}")


def _align(parameter: Tensor) -> None:
    """Copy a tensor that lies askew in the file's buffer: it would round a little differently."""
    if parameter.is_cpu and parameter.data_ptr() % _ALIGNED:
        with torch.no_grad():
            parameter.data = parameter.data.clone()
