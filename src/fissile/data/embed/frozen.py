"""What an encoder is, and the two kinds: of images and of texts, frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PRECISIONS", "Encoder", "ImageEncoder", "TextEncoder"]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Longer than models read, so that it also tells how much of a text they do.
_TEXT = "The Quick brown fox costs 12.50, doesn't it? " * 60


class Encoder(Protocol):
    """Makes features of images or texts; anything with these names can be given to ``embed``.

    >>> encoder.encode([encoder.prepare(image) for image in images])  # (n, width)
    """

    @property
    def name(self) -> str:
        """What the file of features says it was made with."""

    @property
    def kind(self) -> str:
        """What it takes: "images" or "text"."""

    @property
    def key(self) -> str:
        """Everything about the encoder that decides the features, in a short text."""

    @property
    def width(self) -> int:
        """How many features there are."""

    def prepare(self, item: Any) -> Any:
        """Make one image or text ready; called in several threads at once."""

    def encode(self, batch: Sequence[Any]) -> Tensor:
        """Return the features of what ``prepare`` returned, (n, width), floats on the CPU."""


class ImageEncoder:
    """A module, frozen, as an encoder of images.

    >>> ImageEncoder("resnet", resnet, square(224)).encode([prepared]).shape
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
        precision: str | None = None,
    ) -> None:
        self.name, self.prepare = name, prepare
        self._device = torch.device(device)
        self._precision = chosen_precision(precision, self._device)
        weights = fingerprint(module)
        frozen = module.eval().requires_grad_(False)
        # The layout convolutions are fastest in; others do not mind.
        frozen.to(self._device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._forward = forward or frozen
        probed = self.encode([prepare(gradient())])
        self.width = probed.shape[1]
        self.key = f"{self._precision} {weights} {rounded(probed[0])}"

    def encode(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the features of prepared images, (n, width)."""
        images = torch.stack(list(batch))
        if self._device.type == "cuda":
            images = images.pin_memory()
        with torch.inference_mode(), mixed(self._device, self._precision):
            images = images.to(self._device, non_blocking=True)
            images = images.contiguous(memory_format=torch.channels_last)
            features = self._forward(images)
            if not isinstance(features, Tensor) or features.ndim < 2:
                raise FissileError(
                    f"{self.name} gives no rows of features; it must return a tensor (n, width)"
                )
            return features.flatten(1).float().cpu()


class TextEncoder:
    """A model of sentence-transformers, frozen, as an encoder of texts.

    >>> TextEncoder("minilm", SentenceTransformer(path)).encode(["how much is it?"]).shape
    torch.Size([1, 384])
    """

    kind = "text"

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        device: torch.device | str = "cpu",
        precision: str | None = None,
    ) -> None:
        self.name = name
        self._device = torch.device(device)
        self._precision = chosen_precision(precision, self._device)
        weights = fingerprint(model)
        self._model = model.eval().requires_grad_(False).to(self._device)
        probed = self.encode([_TEXT])
        self.width = probed.shape[1]
        self.key = f"{self._precision} {weights} {rounded(probed[0])}"

    def prepare(self, text: str) -> str:
        """Return the text as it is: it becomes tokens together with others of its length."""
        return text

    def encode(self, batch: Sequence[str]) -> Tensor:
        """Return the features of texts, (n, width)."""
        with torch.inference_mode(), mixed(self._device, self._precision):
            # Goes by length inside, so that little is spent on padding.
            features: Tensor = self._model.encode(
                list(batch), batch_size=64, convert_to_tensor=True, show_progress_bar=False
            )
        return features.float().cpu()


def chosen_precision(precision: str | None, device: torch.device) -> str:
    """Return what to compute in: unless told, mixed precision on a GPU and floats elsewhere.

    >>> chosen_precision(None, torch.device("cpu"))
    'float32'
    """
    if precision is None:
        if device.type != "cuda":
            return "float32"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if precision not in PRECISIONS:
        raise FissileError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}; give one")
    return precision


def mixed(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which products are computed in a precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, PRECISIONS[precision])


def fingerprint(module: nn.Module) -> str:
    """Return a short text that other weights would change.

    >>> fingerprint(nn.Linear(2, 2)) == fingerprint(nn.Linear(2, 2))
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        digest.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def gradient() -> Image:
    """Return an image of which every preprocessing makes something else.

    >>> gradient().size
    (320, 256)
    """
    from PIL import Image

    y, x = np.mgrid[0:256, 0:320]
    return Image.fromarray(np.stack([y, x * 4 // 5, (x * y) % 256], axis=-1).astype(np.uint8))


def rounded(features: Tensor) -> str:
    """Return the length of a row of features and some of its Fourier coefficients, rounded.

    Few numbers, since of many one would always lie where rounding errors turn it over.

    >>> rounded(torch.tensor([3.0, 4.0]))
    '5 -0.1081 -0.5826 0.1980'
    """
    row = features.double()
    length = row.norm()
    angle = torch.arange(len(row), dtype=torch.double) * (2 * torch.pi / max(1, len(row)))
    waves = [(row @ torch.cos(k * angle + k)) / length.clamp_min(1e-12) for k in (1, 2, 3)]
    return " ".join([f"{length:.4g}", *(f"{wave:.4f}" for wave in waves)])
