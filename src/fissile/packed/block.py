"""Two packed layers and what is between them as one call, for the small heads of classifiers.

There, looking tensors up and checking them would take longer than all the arithmetic; so it is done
once, and again only when a tensor is another one or lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor

from fissile.packed import run
from fissile.packed.layers import PackedMaskedLinear, PackedPartitionedLinear
from fissile.packed.plain import Activation

__all__ = ["Block"]


class Block:
    """A partitioned layer, an activation and the masked layer that reads it."""

    def __init__(
        self, first: PackedPartitionedLinear, activation: Activation, second: PackedMaskedLinear
    ) -> None:
        self.first, self.activation, self.second = first, activation, second
        self._held: tuple[Tensor | None, ...] = ()
        self._places: list[int] = []
        self._few: tuple[Callable[[Tensor, int], Tensor], int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply all of it to a batch of any shape."""
        if self._is_ready() and self._few is not None and self._is_plain(x):
            call, most = self._few
            rows = x.numel() // self.first.in_features
            if 1 <= rows <= most:
                return call(x, rows)
        at_once = run.block(x, self._first(), self.activation, self._second())
        if at_once is not None:
            return at_once
        hidden = self.first.activated(x, self.activation)
        found: Tensor = self.second(hidden)
        return found

    def _is_ready(self) -> bool:
        """Prepare for the tensors there are now, if they are others than last time."""
        mine, its = self.first, self.second
        held = *mine._parameters.values(), *its._parameters.values(), *its._buffers.values()
        held = *held, mine._buffers["planes"]
        places = [0 if tensor is None else tensor.data_ptr() for tensor in held]
        if places == self._places and all(map(is_, held, self._held)):
            return True
        self._held, self._places, self._few = held, places, None
        kernels = run.kernels_for(mine.weight.device)
        if hasattr(kernels, "block_for_few") and run.few_children(mine.alpha):
            weight, planes, bias, alpha = self._first()
            if its.weight.device == weight.device:
                self._few = kernels.block_for_few(  # type: ignore[union-attr]
                    weight, planes, bias, alpha, self.activation, *self._second()
                )
        return True

    def _is_plain(self, x: Tensor) -> bool:
        """Tell a batch that needs no cast, no copy and no gradients; others go the general way."""
        return (
            x.dtype is torch.float32
            and x.is_cpu
            and x.shape[-1:] == (self.first.in_features,)
            and x.is_contiguous()
            and not torch.is_autocast_enabled("cpu")
            and not (torch.is_grad_enabled() and self._wants_gradients(x))
        )

    def _wants_gradients(self, x: Tensor) -> bool:
        return x.requires_grad or any(t is not None and t.requires_grad for t in self._held)

    def _first(self) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        mine = self.first
        return mine.weight, mine.planes, mine.bias, mine.alpha

    def _second(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
        its = self.second
        return its.weight, its.live, its.start, its.bias, its.group
