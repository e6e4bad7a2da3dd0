"""An image as a tensor, with Pillow alone: the centre square at a size, then normalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fissile.data import folder

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGENET", "Normalised", "square"]

# Mean and deviation of the colours of ImageNet, which most encoders were trained with.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def square(size: int) -> Callable[[Image], Tensor]:
    """Return what makes of any image its centre square, (3, size, size) in whole numbers.

    >>> square(224)(Image.new("RGB", (640, 480))).shape
    torch.Size([3, 224, 224])
    """

    def prepare(image: Image) -> Tensor:
        return torch.tensor(folder.square(image.convert("RGB"), size)).permute(2, 0, 1)

    return prepare


class Normalised(nn.Module):
    """A module that wants normalised images, for images of whole numbers.

    >>> Normalised(module, *IMAGENET)(torch.zeros(1, 3, 224, 224, dtype=torch.uint8))

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
        """Return what the module makes of (n, 3, size, size) bytes."""
        found: Tensor = self.module((images.float() / 255 - self.mean) / self.std)
        return found
