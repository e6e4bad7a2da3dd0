"""One training step of a network as few kernels, on weights that never move: a graph in waiting."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from fissile.bank.loop import Recipe, penalty, task_loss
from fissile.bank.vision import kernels
from fissile.bank.vision.flat import PATCH, Flat
from fissile.bank.vision.images import Images
from fissile.bank.vision.job import Job
from fissile.bank.vision.norm import Norm, evaluated, normed
from fissile.layers.mlp import first_hidden

__all__ = ["Resident", "Step", "batch_sizes"]

#: Test images that are classified at once.
_MANY = 1000
_PIXELS = 64
#: More than there are blocks of channels in any reduction.
_BLOCKS = 1024


class Resident:
    """The data on the device, as bytes."""

    def __init__(self, images: Images, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.x, self.y = images.x.to(device), images.y.to(device)
        self.x_test, self.y_test = images.x_test.to(device), images.y_test.to(device)
        mean, deviation = images.scale()
        # What a byte is multiplied by, and what is added.
        self.scale = torch.stack([1 / (255 * deviation), -mean / deviation]).to(device)
        self.tests = torch.arange(len(self.y_test), device=device)
        self.starts = self.tests[::_MANY].split(1)

    def batch(self, count: int, order: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the next images of an order and their labels; a counter says where it is."""
        return self._gathered(self.x, self.y, count, order, counters)

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Gather the test images and their labels, many at a time."""
        for number, start in enumerate(self.starts):
            count = min(_MANY, len(self.y_test) - number * _MANY)
            yield self._gathered(self.x_test, self.y_test, count, self.tests, start)

    def _gathered(
        self, images: Tensor, labels: Tensor, count: int, order: Tensor, counters: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, height, width, _ = images.shape
        x = torch.empty(count, height, width, PATCH, dtype=self.dtype, device=self.device)
        y = torch.empty(count, dtype=torch.long, device=self.device)
        kernels.gather_kernel[(count, triton.cdiv(height * width, _PIXELS))](
            images, labels, order, counters, self.scale, x, y, H=height, W=width, ROOM=PATCH,
            BLOCK=_PIXELS, num_warps=4,
        )  # fmt: skip
        return x, y


class _Patches(Function):
    """The first convolution: each pixel's neighbours times a matrix.

    cuDNN took as long for the gradient of this kernel as for one with sixty-four inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        pixels = x.numel() // x.shape[-1]
        parts = math.gcd(pixels, 128)  # one long sum would keep a single multiprocessor busy
        dy = slopes[0].reshape(parts, pixels // parts, -1)
        return None, torch.bmm(dy.mT, x.view(parts, pixels // parts, -1)).sum(0)


@dataclass(frozen=True)
class _Layer:
    weight: Tensor
    norm: Norm


class Step:
    """A job's network on a device: :meth:`train` makes a step, wherever its counters stand."""

    def __init__(self, job: Job, data: Resident, recipe: Recipe) -> None:
        self.job, self.data, self.recipe = job, data, recipe
        device = data.device
        first = first_hidden(job.model.head).get_parameter("weight")
        assert isinstance(first, nn.Parameter)
        self.flat = Flat(job.model, job.adam, first, device, data.dtype, recipe)
        self.head = copy.deepcopy(job.model.head).to(device)
        self._share_head()
        self.order = torch.zeros(len(data.y), dtype=torch.long, device=device)
        done = int(job.adam.state[first]["step"]) if first in job.adam.state else 0
        self.counters = torch.tensor([0, done], device=device)  # in the order; steps of Adam
        self.advance = {
            count: torch.tensor([count, 1], device=device)
            for count in set(batch_sizes(len(data.y), recipe.batch))
        }
        self.loss = torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.long, device=device)
        self.layers = self._layers()

    def _share_head(self) -> None:
        """Put the head's parameters where all weights are; they are leaves as they are."""
        leaves, parameters = self.flat.leaves, list(self.head.parameters())
        for parameter, leaf in zip(parameters, leaves[-len(parameters) :], strict=True):
            parameter.data = leaf.detach()
        leaves[-len(parameters) :] = parameters

    def _layers(self) -> list[_Layer]:
        leaves = iter(self.flat.leaves)
        finished = torch.zeros(_BLOCKS, dtype=torch.int32, device=self.data.device)
        layers: list[_Layer] = []
        for module in self.job.model.backbone:
            if isinstance(module, nn.MaxPool2d):
                layers[-1] = replace(layers[-1], norm=replace(layers[-1].norm, pool=True))
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                weight, gamma, beta = next(leaves), next(leaves), next(leaves)
                norm = Norm(
                    gamma,
                    beta,
                    module.running_mean.to(gamma.device, copy=True),
                    module.running_var.to(gamma.device, copy=True),
                    momentum=module.momentum or 0.0,
                    eps=module.eps,
                    pool=False,
                    finished=finished,
                    batch=self.recipe.batch,
                )
                layers.append(_Layer(weight, norm))
        return layers

    def train(self, count: int) -> None:
        """Train on the next ``count`` samples of the order."""
        x, y = self.data.batch(count, self.order, self.counters)
        loss = task_loss(self._logits(x, training=True), y)
        total = loss
        if self.recipe.orthogonal:  # the rest of the penalty goes straight to the gradient
            total = loss + penalty(self.head, replace(self.recipe, l1=0, l2=0))
        grads = torch.autograd.grad(total, self.flat.leaves)
        self.flat.step(grads, self.counters)
        self.loss.add_(loss.detach(), alpha=count / len(self.data.y))
        self.counters.add_(self.advance[count])

    def _logits(self, x: Tensor, training: bool) -> Tensor:
        norm = normed if training else evaluated
        first, *middle, last = self.layers
        y: Tensor = _Patches.apply(x, first.weight)  # type: ignore[no-untyped-call]
        x = norm(y.permute(0, 3, 1, 2), first.norm)
        for layer in middle:
            x = norm(functional.conv2d(x, layer.weight, padding=1), layer.norm)
        # A 1x1 convolution is a matrix product over the pixels.
        y = functional.linear(x.permute(0, 2, 3, 1), last.weight)
        x = norm(y.permute(0, 3, 1, 2), last.norm)
        features = x.mean((2, 3), dtype=torch.float32)
        logits: Tensor = self.head(features)
        return logits

    @torch.no_grad()
    def evaluate(self) -> None:
        """Count the test images that are classified rightly."""
        self.right.zero_()
        for x, y in self.data.test_batches():
            self.right += (self._logits(x, training=False).argmax(1) == y).sum()

    def finite(self) -> Tensor:
        """Tell whether all numbers are."""
        parts = [self.flat.weights, self.loss.view(1)]
        parts += [running for layer in self.layers for running in (layer.norm.mean, layer.norm.var)]
        return torch.stack([torch.isfinite(part).all() for part in parts]).all()

    def state(self) -> list[Tensor]:
        """Return all that training changes."""
        flat = self.flat
        running = [part for layer in self.layers for part in (layer.norm.mean, layer.norm.var)]
        return [flat.weights, flat.means, flat.squares, self.counters, *running]

    @torch.no_grad()
    def home(self) -> None:
        """Bring everything home to the job."""
        steps = int(self.counters[1])
        self.flat.home(steps)
        norms = (m for m in self.job.model.backbone if isinstance(m, nn.BatchNorm2d))
        for module, layer in zip(norms, self.layers, strict=True):
            for buffer, value in (
                (module.running_mean, layer.norm.mean), (module.running_var, layer.norm.var)
            ):  # fmt: skip
                assert buffer is not None
                buffer.copy_(value)
            assert module.num_batches_tracked is not None
            module.num_batches_tracked.fill_(steps)


def batch_sizes(samples: int, batch: int) -> list[int]:
    """Return the sizes of an epoch's batches; the last may be smaller.

    >>> batch_sizes(10, 4)
    [4, 4, 2]
    """
    return [min(batch, samples - start) for start in range(0, samples, batch)]
