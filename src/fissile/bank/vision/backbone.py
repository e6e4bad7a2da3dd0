"""The paper's convolutional network: three VGG-style blocks, a projection, and an MLP as head."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fissile._common.errors import whole
from fissile._common.shapes import Float
from fissile.layers.mlp import MLP

__all__ = ["SHRINKS", "ConvNet"]

_WIDTHS = (3, 64, 128, 256)
#: How many times smaller an image's side is after the blocks.
SHRINKS = 2 ** (len(_WIDTHS) - 1)


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
