"""Expanded models in transformers: the Trainer splits them, ``from_pretrained`` loads them.

>>> fissile.expand(bert, 2).save_pretrained("wide")
>>> wide = AutoModel.from_pretrained("wide")

The recipe sits in ``config.json`` where a quantizer's settings would, because transformers lets a
registered quantizer replace the layers of an empty model before its weights are loaded. Where this
module is not imported, ``from_pretrained`` fails and says so. For people without fissile save
``fissile.to_dense(wide)``; it refuses where no config can say how wide it is.

A model made anew from an expanded one's config is dense and as wide as the children:
``del model.config.quantization_config`` before saving it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import read_bounded
from fissile.discovery.module_checks import is_layer
from fissile.expansion.optimizer import check_optimizer
from fissile.expansion.saving import config_checksum, file_checksum, make_savable
from fissile.expansion.structure import METHOD, VERSION, rebuild, renamed
from fissile.integrations.scheduled_expansion import ScheduledExpansion, check_places, describe
from fissile.io.safetensors import check_patterns, check_tensors, naming, opened_file
from fissile.layers import SparseLayer

needs("transformers", "transformers")
needs("accelerate", "transformers")

from transformers import (  # noqa: E402
    PreTrainedModel,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.models.auto.configuration_auto import AutoConfig  # noqa: E402
from transformers.quantizers.auto import (  # noqa: E402
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.trainer_utils import has_length  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

__all__ = ["ExpandAt"]

_LOGGED = ("nonzeros", "neurons", "dead")
#: What only expanded layers have in a file.
_STRUCTURE = ("owner", "mask", "degree")
_ALIGNED = 64  # bytes, as torch allocates
_CONFIG = 2**24  # bytes of a config.json
#: A model may want so many times the numbers that its files hold, and those of a new head.
_MORE, _HEAD = 2, 2**24


class ExpandAt(ScheduledExpansion, TrainerCallback):
    """Expand the model at the start of an epoch, or before a step, and let training go on.

    >>> trainer = Trainer(bert, args, train_dataset=data, callbacks=[ExpandAt(2, epoch=3)])
    >>> trainer.train()

    Optimizer and schedule continue. ``state.log_history`` records ``fissile/nonzeros`` and
    ``fissile/neurons``; so do loggers whose callbacks come after this one. The best model is the
    best after the split. A checkpoint from before the split resumes as usual. For one from after it
    load the model with ``from_pretrained`` first, and give the Trainer the same callback.

    ``split``, ``where``, ``seed`` and ``budget`` are those of :func:`fissile.expand`.

    Args:
        alpha: children per neuron.
        epoch: the epoch to begin with the split, counted from 0. Data without a length has no
            epochs; give ``step``.
        step: how many optimizer steps come before the split.
    """

    _done = False
    _news: Mapping[str, float] = {}
    _watch: RemovableHandle | None = None

    def on_init_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Wait for a checkpoint: the Trainer loads one before it says that training begins."""
        self._watch = kwargs["model"].register_load_state_dict_pre_hook(_check_checkpoint)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse what could only fail later; see whether the split is behind us already."""
        if self._watch is not None:
            self._watch.remove()
        if self.epoch is not None and not has_length(kwargs["train_dataloader"]):
            raise FissileError(
                "the training data has no length, so the Trainer does not count epochs; give "
                "ExpandAt(step=...) instead"
            )
        past = self._since(state.epoch or 0, state.global_step) > 0
        expanded = any(isinstance(module, SparseLayer) for module in kwargs["model"].modules())
        if expanded and not past:
            raise FissileError(
                f"the model is expanded already, and {self._when()} is still to come; take "
                "ExpandAt out of the callbacks or start from the dense model"
            )
        if past and not expanded:
            raise FissileError(
                f"{self._when()} is over in this checkpoint, but the model is not expanded; load "
                "the model with from_pretrained from the checkpoint, or split later"
            )
        if not past:
            _check_alone(args)
            self._check_end(state)
            check_places(kwargs["model"], self.alpha, self.where)
            _check_carried(kwargs["optimizer"], kwargs["model"])
        self._done = past

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Split if this is the step, or the first step of the epoch."""
        if self._done or self._since(state.epoch or 0, state.global_step) < 0:
            return
        self._expand(kwargs["model"], kwargs["optimizer"])
        self._done = True
        # The best checkpoint so far is of another shape: the Trainer could not load it at the end.
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        numbers = describe(kwargs["model"])
        self._news = {f"fissile/{name}": numbers[name] for name in _LOGGED if name in numbers}
        now = {"epoch": state.epoch or 0, "step": state.global_step}
        state.log_history.append({**self._news, **now})

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the callbacks after this one, such as the progress bar, what the split did."""
        kwargs["logs"].update(self._news)
        self._news = {}

    def _check_end(self, state: TrainerState) -> None:
        if self._since(state.num_train_epochs, state.max_steps) <= 0:
            raise FissileError(
                f"training ends before {self._when()} begins ({state.max_steps} steps in "
                f"{state.num_train_epochs} epochs); split earlier"
            )


def _check_alone(args: TrainingArguments) -> None:
    """Refuse a wrapped model: what wraps it would go on with the old parameters."""
    if args.world_size > 1 or args.n_gpu > 1 or args.fsdp or args.deepspeed:
        raise FissileError(
            "ExpandAt cannot expand a model that was wrapped for several processes or devices; "
            "train to the split in one process, or call fissile.expand before making the Trainer"
        )


def _check_checkpoint(
    model: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: Any
) -> None:
    """Refuse a checkpoint that does not fit in one sentence; torch has one for every tensor."""
    for name, layer in model.named_modules():
        key = f"{prefix}{name}."
        if isinstance(layer, SparseLayer):
            fits = state_dict.get(f"{key}weight", layer.weight).shape == layer.weight.shape
        else:
            fits = not (is_layer(layer) and any(key + own in state_dict for own in _STRUCTURE))
        if not fits:
            raise FissileError(
                "the checkpoint is from the other side of the split than the model; load the model "
                "with from_pretrained from the checkpoint and make the Trainer with that"
            )


def _check_carried(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer now rather than in the middle of the run."""
    try:
        check_optimizer(optimizer, model)
    except FissileError as error:
        reason = str(error).partition(";")[0]
        raise FissileError(f"{reason}; choose another optim= in the TrainingArguments") from None


# --- files


@register_quantization_config(METHOD)
class ExpandedConfig(QuantizationConfigMixin):
    """The recipe as transformers hands it over from ``config.json``."""

    def __init__(
        self, recipe: Any = None, version: Any = VERSION, files: Any = None, **_: Any
    ) -> None:
        if version != VERSION:
            raise FileError(f"its recipe is of version {version!r}, not {VERSION}; update fissile")
        self.quant_method = METHOD  # type: ignore[assignment]  # their enumeration is closed
        self.recipe, self.version, self.files = recipe, version, files


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

    def update_attn_implementation(self, config: Any) -> Any:
        """Take out what stops ``from_pretrained`` where fissile is missing; this comes first."""
        vars(config).pop("transformers_weights", None)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        if any(not str(file).endswith(".safetensors") for file in checkpoint_files or ()):
            raise FileError(
                "an expanded model is read from safetensors files only; save it again with "
                "save_pretrained"
            )
        sums = self.quantization_config.files
        for file in checkpoint_files or () if sums is not None else ():
            _check_file(Path(file), sums)
        held = _contents(checkpoint_files or ())[1]
        wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if checkpoint_files and wanted > _MORE * held + _HEAD:
            raise FileError(f"config.json wants {wanted:,} numbers, and the files hold {held:,}")
        with naming("config.json"):
            rebuild(model, _recipe_for(model, self.quantization_config.recipe))
        self._empty = model.state_dict()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self._check(model)
        for parameter in model.parameters():
            _align(parameter)
        # From here on it trains, casts and saves like any other model, without this class.
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        make_savable(model)

    def _check(self, model: PreTrainedModel) -> None:
        """Check what transformers takes on trust where layers were replaced."""
        tensors = model.state_dict()
        check_tensors(self._empty, tensors)
        for key, empty in self._empty.items():
            if not empty.is_floating_point() and tensors[key].dtype != empty.dtype:
                raise FileError(f"the tensor {key!r} is {tensors[key].dtype} in the file")
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLayer):
                _check_loaded(name, layer)
        check_patterns(model, tensors)


def _guard(kind: type[Any]) -> None:
    """Let ``from_pretrained`` of a folder of ours answer what is torn or foreign with our error.

    transformers builds a model before it looks at the weights, and what a config or a file that is
    not whole runs into there is an error of torch, safetensors or any model's own code.
    """
    plain = kind.from_pretrained.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(str(folder), kwargs.get("subfolder") or "")
        if not path.is_dir() or not (text := _text_of_ours(path)):
            return plain(cls, folder, *args, **kwargs)
        try:
            _check_config(path, text)
            return plain(cls, folder, *args, **kwargs)
        except FissileError as error:
            why = str(error)
            raise FileError(why if str(path) in why else f"{path}: {why}") from None
        except Exception as error:  # foreign code raises what it likes
            why = f"{type(error).__name__}: {str(error).strip()[:300]}"
            raise FileError(f"{path}: transformers cannot load it: {why}") from error

    kind.from_pretrained = classmethod(from_pretrained)


def _text_of_ours(folder: Path) -> bytes:
    """Return the config of a folder if its model was expanded, as the config or a file shows."""
    file = folder / "config.json"
    text = read_bounded(file, _CONFIG) if file.exists() else b" "
    ours = f'"quant_method": "{METHOD}"'.encode() in text
    with suppress(FileError):
        names = () if ours else _contents(folder.glob("*.safetensors"))[0]
        ours = ours or any(name.endswith(".owner") for name in names)
    return text if ours else b""


def _check_config(folder: Path, text: bytes) -> None:
    """Refuse a config without a recipe, or of more layers and labels than the files can hold."""
    with naming(folder / "config.json"):
        left = [config := json.loads(text)]
        if config["quantization_config"]["quant_method"] != METHOD:
            raise FileError("it does not say that the model is expanded; get the folder again")
        entry = config["quantization_config"]
        # All three are ours; a model whose body alone was expanded is saved by transformers alone.
        sealed = "transformers_weights" in config or not {"files", "crc32"}.isdisjoint(entry)
        if sealed and entry.get("crc32") != config_checksum(config):
            raise FileError(
                "it is not what save_pretrained of the expanded model wrote: its checksum differs; "
                "get it again, or change settings in the model and save that"
            )
        for path in folder.glob("*.safetensors.index.json") if sealed else ():
            _check_file(path, entry.get("files"))
        names, held = _contents(folder.glob("*.safetensors"))
        while names and left:
            for key, value in left.pop().items():
                left += [value] * isinstance(value, dict)
                most = len(names) if "layer" in key else held if key == "num_labels" else math.inf
                if type(value) is int and value > most:
                    raise FileError(f"{key}={value:,} is more than the files can hold")


def _check_file(path: Path, sums: Any) -> None:
    if not isinstance(sums, dict) or sums.get(path.name) != file_checksum(path):
        raise FileError(f"{path} is not the file that was saved with the config; get both again")


def _contents(files: Iterable[str | Path]) -> tuple[list[str], int]:
    """Return the names of the tensors in some files, and how many numbers they have."""
    names, numbers = [], 0
    for path in files:
        with opened_file(path) as file:
            found = list(file.keys())
            numbers += sum(math.prod(file.get_slice(name).get_shape()) for name in found)
            names += found
    return names, numbers


for _kind in (PreTrainedModel, AutoConfig):
    _guard(_kind)


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


def _check_loaded(name: str, layer: SparseLayer) -> None:
    """Refuse a layer that is not wholly from the file."""
    for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers()]:
        # transformers marks what it loads; what is on the meta device is offloaded.
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
            raise FileError(f"the tensor '{name}.{key}' is missing in the file")


def _align(parameter: Tensor) -> None:
    """Copy a tensor that lies askew in the file's buffer: it would round a little differently."""
    if parameter.is_cpu and parameter.data_ptr() % _ALIGNED:
        with torch.no_grad():
            parameter.data = parameter.data.clone()
