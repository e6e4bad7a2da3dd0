"""The paper's convolutional network, and the images it sees.

The network has three VGG-style blocks, a projection, and an MLP as head. Images are held as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError, whole
from fissile._common.random import noise, order
from fissile._common.shapes import Float, Int
from fissile.layers.mlp import MLP

_WIDTHS = (3, 64, 128, 256)
#: How many times smaller an image's side is after the blocks.
SHRINKS = 2 ** (len(_WIDTHS) - 1)
#: Added to the number of an epoch, so that images are not mirrored by the numbers that order them.
_MIRRORS = 1 << 20


class ConvNet(nn.Module):
    """A convolutional backbone and, as head, the MLP that :func:`fissile.expand` splits.

    >>> model = ConvNet(projection=256, neurons=20, classes=100, seed=0)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])

    Args:
        projection: channels after the 1x1 convolution, the inputs of the head.
        neurons: the head's hidden neurons.
        classes: the head's outputs.
        seed: of the initial weights (PyTorch's defaults); None draws from the global generator.
    """

    def __init__(
        self, projection: int, neurons: int, classes: int, *, seed: int | None = None
    ) -> None:
        super().__init__()
        self.projection = whole("projection", projection, least=1)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every device
            self.backbone = _backbone(self.projection)
            self.head: nn.Module = MLP([self.projection, neurons, classes])

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return the logits."""
        logits: Tensor = self.head(self.backbone(images))
        return logits


def _backbone(projection: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(_WIDTHS):
        layers += _convolution(inputs, outputs, kernel=3)
        layers += _convolution(outputs, outputs, kernel=3)
        layers += _convolution(outputs, outputs, kernel=3)
        layers.append(nn.MaxPool2d(2))
    layers += _convolution(_WIDTHS[-1], projection, kernel=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _convolution(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    """Return a convolution that keeps the image's size, a norm and an activation."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


@dataclass(frozen=True, eq=False)
class Images:
    """Training and test images (bytes, colours first or last) and their labels.

    >>> images = Images(x, y, x_test, y_test)  # x: uint8, (50000, 32, 32, 3) or (50000, 3, 32, 32)

    The paper does not say how pixels become numbers. Here they are scaled to [0, 1] and then,
    colour by colour, shifted and scaled to mean 0 and deviation 1 over the training set.
    """

    x: Tensor  # (samples, height, width, 3), uint8
    y: Tensor  # (samples,), int64
    x_test: Tensor
    y_test: Tensor

    def __post_init__(self) -> None:
        for name, labels in (("x", "y"), ("x_test", "y_test")):
            x, y = _bytes(name, getattr(self, name)), _labels(labels, getattr(self, labels))
            if len(x) != len(y) or not len(y):
                raise FissileError(f"{len(x)} images in {name}, {len(y)} labels; give one for each")
            object.__setattr__(self, name, x)
            object.__setattr__(self, labels, y)
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise FissileError("training and test images differ in size; bring them to one size")

    @property
    def classes(self) -> int:
        """Count the classes that occur; at least two, or there is nothing to tell apart."""
        return max(2, 1 + int(torch.maximum(self.y.max(), self.y_test.max())))

    def scale(self) -> tuple[Float[Tensor, " colours"], Float[Tensor, " colours"]]:
        """Return the training set's mean and standard deviation of each colour, of [0, 1]."""
        colours = self.x.shape[-1]
        # Counting bytes is exact and needs no copy of all images as floats.
        counts = torch.stack(
            [self.x[..., i].flatten().bincount(minlength=256) for i in range(colours)]
        )
        share = counts.double() / counts.sum(1, keepdim=True)
        level = torch.arange(256) / 255
        mean = (share * level).sum(1)
        variance = (share * (level - mean.unsqueeze(1)).square()).sum(1)
        deviation = torch.where(variance > 0, variance.sqrt(), 1)  # a colour that never varies
        return mean.float(), deviation.float()


def scaled(
    x: Int[Tensor, "batch height width colours"], mean: Tensor, deviation: Tensor
) -> Float[Tensor, "batch colours height width"]:
    """Turn bytes into the numbers a network sees."""
    return ((x / 255 - mean) / deviation).permute(0, 3, 1, 2)


def image_order(
    seed: int | Int[Tensor, ""], epoch: int, samples: int, *, mirror: bool
) -> Int[Tensor, " samples"]:
    """Return the order of an epoch's images; with ``mirror``, half are mirrored: ``~row``."""
    rows = order(seed, epoch, samples)
    if not mirror:
        return rows
    return torch.where(noise(seed, _MIRRORS + epoch, samples) < 0.5, ~rows, rows)


def taken(
    x: Int[Tensor, "samples height width colours"],
    y: Int[Tensor, " samples"],
    rows: Int[Tensor, " batch"],
) -> tuple[Int[Tensor, "batch height width colours"], Int[Tensor, " batch"]]:
    """Return the images of these rows and their labels; images of ``~row`` are mirrored."""
    mirrored = rows < 0
    rows = torch.where(mirrored, ~rows, rows)
    return torch.where(mirrored.view(-1, 1, 1, 1), x[rows].flip(2), x[rows]), y[rows]


def _bytes(name: str, value: Any) -> Tensor:
    x = torch.as_tensor(value).detach().cpu()
    if x.dtype != torch.uint8 or x.ndim != 4 or 3 not in (x.shape[1], x.shape[3]):
        raise FissileError(
            f"{name} must hold colour images as bytes (uint8), shaped (samples, height, width, 3) "
            f"or (samples, 3, height, width); got {x.dtype} {tuple(x.shape)}"
        )
    if x.shape[3] != 3:
        x = x.permute(0, 2, 3, 1)
    if x.shape[1] % SHRINKS or x.shape[2] % SHRINKS:
        raise FissileError(
            f"images of {x.shape[1]}x{x.shape[2]} cannot be halved three times; "
            f"crop or pad them to a multiple of {SHRINKS}"
        )
    return x.contiguous()


def _labels(name: str, value: Any) -> Tensor:
    y = torch.as_tensor(value).detach().cpu()
    if y.is_floating_point() or y.is_complex() or y.ndim != 1 or (len(y) and int(y.min()) < 0):
        raise FissileError(f"{name} must hold one class for each image, whole numbers from 0 on")
    return y.long()
