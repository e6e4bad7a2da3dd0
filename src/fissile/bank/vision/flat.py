"""All weights of a network in one flat tensor, with gradients and moments beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor, nn
from torch.optim import Adam

from fissile.bank.loop import Recipe
from fissile.bank.vision import kernels

__all__ = ["PATCH", "Flat"]

#: The 27 numbers of a first layer's kernel are padded to this many, which tensor cores need.
PATCH = 32
_ALIGN = 64
_BLOCK = 1024
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        """Bring weights and moments from their home."""
        for place, parameter in zip(self.places, self.parameters, strict=True):
            place.view(self.weights).copy_(parameter)
            state = self.adam.state.get(parameter, {})
            for flat, key in zip((self.means, self.squares), _MOMENTS, strict=True):
                if key in state:
                    place.view(flat).copy_(state[key])
        self.low.copy_(self.weights[: self.kernels])

    @torch.no_grad()
    def home(self, steps: int) -> None:
        """Bring weights and moments home, after so many steps of Adam in all."""
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
        kernels.adam_kernel[(triton.cdiv(size, _BLOCK),)](
            self.weights, self.low, self.low_grads, self.grads, self.means, self.squares, counters,
            recipe.lr, 2 * recipe.l2, recipe.l1, self.first.begin, self.first.end, self.kernels,
            size, COPY=self.low.dtype != self.weights.dtype, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _places(parameters: list[nn.Parameter]) -> tuple[list[_Place], int]:
    """Find a place for every parameter, kernels first, and where the kernels end."""
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
