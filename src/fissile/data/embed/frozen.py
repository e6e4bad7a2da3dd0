"""What an encoder is, and the two kinds: of images and of texts, frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError

if TYPE_CHECKING:
    from PIL.Image import Image

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
                raise FissileError(
                    f"{self.name} gives no rows of features; it must return a tensor (n, width)"
                )
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
