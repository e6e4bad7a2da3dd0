"""Networks on a GPU, side by side: each step of each is one CUDA graph on a stream of its own.

A graph replays launches on fixed addresses. So a network's weights lie in one flat tensor
(:class:`Flat`) that never moves, a step (:class:`Step`) is few kernels, and counters on the device
say which images come next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.optim import Adam

from fissile.bank.gpu.kernels import flat_adam_kernel
from fissile.bank.loop import Recipe, penalty, task_loss
from fissile.bank.step import captured
from fissile.bank.vision.convnet import Images, image_order
from fissile.bank.vision.norm import Norm, evaluated, normed
from fissile.bank.vision.train import Job
from fissile.layers.mlp import first_hidden

#: The 27 numbers of a first layer's kernel are padded to this many, which tensor cores need.
PATCH = 32
_ALIGN = 64
_BLOCK = 1024
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Test images that are classified at once.
_MANY = 1000
_PIXELS = 64
#: More than there are blocks of channels in any reduction.
_BLOCKS = 1024
#: How many steps the processor may be ahead: enough never to wait, few enough for Ctrl-C.
_AHEAD = 64


# --- all weights of a network in one tensor


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in the flat tensors; a kernel's channels come last.

    Kernels of 1x1 and of the first layer lie as matrices, since they act as such.
    """

    begin: int
    shape: tuple[int, ...]  # as the parameter has it
    room: tuple[int, ...]  # as it lies in memory

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.room)

    def whole(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat tensor as it is multiplied, with what pads it."""
        part = flat[self.begin : self.end].view(self.room)
        return part.permute(0, 3, 1, 2) if len(self.room) == 4 else part

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat tensor, in the parameter's shape."""
        part = self.whole(flat)
        if len(self.shape) == 4 and len(self.room) == 2:
            _, inputs, *kernel = self.shape
            part = part[:, : math.prod(self.shape[1:])].unflatten(1, (*kernel, inputs))
            part = part.permute(0, 3, 1, 2)
        return part


class Flat:
    """A network's weights on a device, and its Adam as one kernel.

    What pads a tensor is zero and has no gradient, so it stays zero by itself.
    """

    def __init__(
        self, model: nn.Module, adam: Adam, first: nn.Parameter, device: torch.device,
        dtype: torch.dtype, recipe: Recipe,
    ) -> None:  # fmt: skip
        self.parameters, self.adam, self.recipe = list(model.parameters()), adam, recipe
        self.places, self.kernels = _places(self.parameters)
        self.first = self.places[[p is first for p in self.parameters].index(True)]
        size = max(place.end for place in self.places)
        self.weights, self.grads, self.means, self.squares = (
            torch.zeros(size, device=device) for _ in range(4)
        )
        kernels = self.weights[: self.kernels]
        self.low = kernels if dtype == torch.float32 else kernels.to(dtype)
        self.low_grads = torch.zeros_like(self.low)
        self._fetch()
        self.leaves: list[Tensor] = []
        self.slots: list[Tensor] = []
        for place in self.places:
            low = len(place.shape) == 4
            weights, grads = (self.low, self.low_grads) if low else (self.weights, self.grads)
            self.leaves.append(place.whole(weights).detach().requires_grad_())
            self.slots.append(place.whole(grads))

    @torch.no_grad()
    def _fetch(self) -> None:
        for place, parameter in zip(self.places, self.parameters, strict=True):
            place.view(self.weights).copy_(parameter)
            state = self.adam.state.get(parameter, {})
            for flat, key in zip((self.means, self.squares), _MOMENTS, strict=True):
                if key in state:
                    place.view(flat).copy_(state[key])
        self.low.copy_(self.weights[: self.kernels])

    @torch.no_grad()
    def home(self, steps: int) -> None:
        """Copy weights and moments back to the model, after ``steps`` steps of Adam in all."""
        for place, parameter in zip(self.places, self.parameters, strict=True):
            parameter.copy_(place.view(self.weights))
            moments = (place.view(flat) for flat in (self.means, self.squares))
            held = [torch.empty_like(parameter).copy_(moment) for moment in moments]
            self.adam.state[parameter] = {
                "step": torch.tensor(float(steps)), **dict(zip(_MOMENTS, held, strict=True)),
            }  # fmt: skip

    def step(self, grads: tuple[Tensor, ...], counters: Tensor) -> None:
        """Make a step of Adam with the leaves' gradients."""
        # One dtype at a time: PyTorch copies a mixed list tensor by tensor.
        for dtype in {self.low.dtype, self.grads.dtype}:
            pairs = [(s, g) for s, g in zip(self.slots, grads, strict=True) if s.dtype == dtype]
            torch._foreach_copy_([slot for slot, _ in pairs], [grad for _, grad in pairs])
        size, recipe = len(self.weights), self.recipe
        flat_adam_kernel[(triton.cdiv(size, _BLOCK),)](
            self.weights, self.low, self.low_grads, self.grads, self.means, self.squares, counters,
            recipe.lr, 2 * recipe.l2, recipe.l1, self.first.begin, self.first.end, self.kernels,
            size, COPY=self.low.dtype != self.weights.dtype, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _places(parameters: list[nn.Parameter]) -> tuple[list[_Place], int]:
    """Return a place for every parameter, kernels first, and where the kernels end."""
    rooms = [_room(tuple(parameter.shape)) for parameter in parameters]
    begins, begin, kernels = [0] * len(rooms), 0, 0
    for i in sorted(range(len(rooms)), key=lambda i: parameters[i].ndim < 4):  # keeps their order
        begins[i] = begin
        begin += -(-math.prod(rooms[i]) // _ALIGN) * _ALIGN
        kernels = begin if parameters[i].ndim == 4 else kernels
    places = zip(begins, parameters, rooms, strict=True)
    return [_Place(begin, tuple(p.shape), room) for begin, p, room in places], kernels


def _room(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 4:
        return shape
    outputs, inputs, *kernel = shape
    if kernel == [1, 1]:
        return outputs, inputs
    return (outputs, PATCH) if inputs == 3 else (outputs, *kernel, inputs)


# --- one step


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    images, labels, order, counters, scale, out, target, H: tl.constexpr, W: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the next images of the order: bytes to numbers, each pixel with its 3x3 neighbours."""
    i = tl.program_id(0)
    row = tl.load(order + tl.load(counters) + i)
    mirrored = row < 0
    row = tl.where(mirrored, -1 - row, row)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, ROOM)  # 3 rows x 3 columns x 3 colours; the rest is zero
    colour = entry % 3
    y = (pixel // W)[:, None] + (entry // 9)[None, :] - 1
    x = (pixel % W)[:, None] + (entry // 3 % 3)[None, :] - 1
    real = (pixel < H * W)[:, None] & (entry < 27)[None, :]
    real = real & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    column = tl.where(mirrored, W - 1 - x, x)
    at = row * (H * W * 3) + (y * W + column) * 3 + colour[None, :]
    value = tl.load(images + at, mask=real, other=0).to(tl.float32)
    factor, shift = tl.load(scale + colour), tl.load(scale + 3 + colour)
    value = tl.where(real, value * factor[None, :] + shift[None, :], 0.0)
    at = (i * H * W + pixel)[:, None] * ROOM + entry[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(pixel < H * W)[:, None])
    if tl.program_id(1) == 0:
        tl.store(target + i, tl.load(labels + row))


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
        _gather_kernel[(count, triton.cdiv(height * width, _PIXELS))](
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
        sizes = set(batch_sizes(len(data.y), recipe.batch))
        self.advance = {count: torch.tensor([count, 1], device=device) for count in sizes}
        self.loss = torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.long, device=device)
        self.layers = self._layers()

    def _share_head(self) -> None:
        """Put the head's parameters where all weights are; they are leaves as they are."""
        leaves, parameters = self.flat.leaves, list(self.head.parameters())
        for parameter, leaf in zip(parameters, leaves[-len(parameters) :], strict=True):
            parameter.data = leaf.detach()
        leaves[-len(parameters) :] = parameters

    def _layers(self) -> list[tuple[Tensor, Norm]]:
        """Return the kernel of every convolution, and what is behind it."""
        leaves = iter(self.flat.leaves)
        finished = torch.zeros(_BLOCKS, dtype=torch.int32, device=self.data.device)
        modules = list(self.job.model.backbone)
        layers = []
        for number, module in enumerate(modules):
            if isinstance(module, nn.BatchNorm2d):
                weight, gamma, beta = next(leaves), next(leaves), next(leaves)
                norm = Norm(
                    gamma,
                    beta,
                    module.get_buffer("running_mean").to(gamma.device, copy=True),
                    module.get_buffer("running_var").to(gamma.device, copy=True),
                    momentum=module.momentum or 0.0,
                    eps=module.eps,
                    pool=isinstance(modules[number + 2], nn.MaxPool2d),  # behind the ReLU
                    finished=finished,
                    batch=self.recipe.batch,
                )
                layers.append((weight, norm))
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
        y: Tensor = _Patches.apply(x, first[0])  # type: ignore[no-untyped-call]
        x = norm(y.permute(0, 3, 1, 2), first[1])
        for weight, behind in middle:
            x = norm(functional.conv2d(x, weight, padding=1), behind)
        # A 1x1 convolution is a matrix product over the pixels.
        y = functional.linear(x.permute(0, 2, 3, 1), last[0])
        x = norm(y.permute(0, 3, 1, 2), last[1])
        features = x.mean((2, 3), dtype=torch.float32)
        logits: Tensor = self.head(features)
        return logits

    @torch.no_grad()
    def evaluate(self) -> None:
        """Count the test images that are classified rightly."""
        self.right.zero_()
        for x, y in self.data.test_batches():
            self.right += (self._logits(x, training=False).argmax(1) == y).sum()

    def begin(self, epoch: int, *, mirror: bool) -> None:
        """Take the order of an epoch, and begin at its first image."""
        seed = torch.tensor(self.job.seed, device=self.data.device)
        self.order.copy_(image_order(seed, epoch, len(self.order), mirror=mirror))
        self.counters[0].zero_()
        self.loss.zero_()

    def outcome(self) -> list[float]:
        """Wait, and return whether all numbers are finite, the loss, and how many are right."""
        parts = [self.flat.weights, self.loss.view(1), *self._running()]
        finite = torch.stack([torch.isfinite(part).all() for part in parts]).all()
        numbers = [number.double() for number in (finite, self.loss, self.right)]
        waited: list[float] = torch.stack(numbers).tolist()
        return waited

    def state(self) -> list[Tensor]:
        flat = self.flat
        return [flat.weights, flat.means, flat.squares, self.counters, *self._running()]

    def _running(self) -> list[Tensor]:
        return [part for _, norm in self.layers for part in (norm.mean, norm.var)]

    @torch.no_grad()
    def home(self) -> None:
        steps = int(self.counters[1])
        self.flat.home(steps)
        norms = (m for m in self.job.model.backbone if isinstance(m, nn.BatchNorm2d))
        for module, (_, norm) in zip(norms, self.layers, strict=True):
            module.get_buffer("running_mean").copy_(norm.mean)
            module.get_buffer("running_var").copy_(norm.var)
            module.get_buffer("num_batches_tracked").fill_(steps)


def batch_sizes(samples: int, batch: int) -> list[int]:
    """Return the sizes of an epoch's batches; the last may be smaller."""
    return [min(batch, samples - start) for start in range(0, samples, batch)]


# --- networks side by side


class Graphs:
    """Trains jobs on a GPU, up to ``together`` of them at once."""

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, dtype: torch.dtype,
        together: int, *, mirror: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.device, self.mirror = recipe, device, mirror
        self.data = Resident(images, device, dtype)
        self.streams = [torch.cuda.Stream(device) for _ in range(together)]
        self.known: set[int] = set()
        torch.cuda.synchronize(device)

    def train(self, job: Job) -> Iterator[None]:
        """Train a job until it is done, on a stream of its own."""
        if job.model.projection not in self.known:
            self._rehearse(job)
            self.known.add(job.model.projection)
        stream = self.streams.pop()
        with torch.cuda.stream(stream):
            step = Step(job, self.data, self.recipe)
        stream.synchronize()
        with exact_and_tuned():
            graphs = {n: captured(partial(step.train, n), stream)[0] for n in step.advance}
        return self._steps(job, step, graphs, stream)

    def _steps(
        self, job: Job, step: Step, graphs: dict[int, torch.cuda.CUDAGraph],
        stream: torch.cuda.Stream,
    ) -> Iterator[None]:  # fmt: skip
        sizes = batch_sizes(len(self.data.y), self.recipe.batch)
        while not job.done:
            with torch.cuda.stream(stream):
                before = [tensor.clone() for tensor in step.state()]
                step.begin(job.epoch, mirror=self.mirror)
            marks: list[torch.cuda.Event] = []
            for number, count in enumerate(sizes):
                with torch.cuda.stream(stream):
                    graphs[count].replay()
                if number % _AHEAD == 0:
                    marks.append(stream.record_event())
                    if len(marks) > 1:
                        marks.pop(0).synchronize()
                yield
            with torch.cuda.stream(stream), exact_and_tuned():
                step.evaluate()
            yield  # the others evaluate as well, before this one is waited for
            with torch.cuda.stream(stream):
                finite, loss, right = step.outcome()
                if finite:
                    job.record(right / len(self.data.y_test), loss)
                else:
                    torch._foreach_copy_(step.state(), before)
                    job.diverge()
        with torch.cuda.stream(stream):
            step.home()
        stream.synchronize()
        self.streams.append(stream)

    def _rehearse(self, job: Job) -> None:
        """Make steps with a copy on every stream: a graph records no first choice of kernels."""
        model, adam = copy.deepcopy((job.model, job.adam))
        for stream in self.streams:
            with torch.cuda.stream(stream), exact_and_tuned():
                step = Step(replace(job, model=model, adam=adam), self.data, self.recipe)
                step.order.copy_(torch.arange(len(step.order)))
                for count in step.advance:
                    step.counters.zero_()
                    step.train(count)
                step.evaluate()
            stream.synchronize()


def exact_and_tuned() -> AbstractContextManager[None]:
    """Let cuDNN time its convolutions and keep the best, and float32 be float32."""
    flags: Callable[..., AbstractContextManager[None]] = torch.backends.cudnn.flags
    return flags(enabled=True, benchmark=True, allow_tf32=False)
