"""Two packed layers and what is between them as one call, for the small heads of classifiers.

There, looking tensors up and checking them would take longer than all the arithmetic; so it is done
once, and again only when a tensor is another one or lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fissile.packed import dispatch
from fissile.packed.layers import PackedMaskedLinear, PackedPartitionedLinear
from fissile.packed.plain import Activation

__all__ = ["Block"]


class _Ready(NamedTuple):
    """Tensors, where they lie and how many numbers they have, and the call prepared for them."""

    held: tuple[Tensor | None, ...]
    at: list[Callable[[], int]]
    places: list[int]
    few: tuple[Callable[[Tensor, int], Tensor], int] | None


class Block:
    """A partitioned layer, an activation and the masked layer that reads it."""

    def __init__(
        self, first: PackedPartitionedLinear, activation: Activation, second: PackedMaskedLinear
    ) -> None:
        self.first, self.activation, self.second = first, activation, second
        self._ready = _Ready((None,), [], [-1], None)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply all of it to a batch of any shape."""
        ready = self._prepare()
        if ready.few is not None and self._is_plain(x, ready):
            call, most = ready.few
            rows = x.numel() // self.first.in_features
            if 1 <= rows <= most:
                return call(x, rows)
        at_once = dispatch.block(x, self._first(), self.activation, self._second())
        if at_once is not None:
            return at_once
        hidden = self.first.activated(x, self.activation)
        found: Tensor = self.second(hidden)
        return found

    def _prepare(self) -> _Ready:
        """Return what is ready for the tensors there are now."""
        mine, its, last = self.first, self.second, self._ready
        own, others, bits = mine._parameters, its._parameters, its._buffers
        held = (
            own["weight"], own["bias"], mine._buffers["planes"],
            others["weight"], others["bias"], bits["live"], bits["start"],
        )  # fmt: skip
        if all(map(is_, held, last.held)) and last.places == [place() for place in last.at]:
            return last
        kernels, few = dispatch.kernels_for(mine.weight.device), None
        if hasattr(kernels, "block_for_few") and dispatch.few_children(mine.alpha):
            weight, planes, bias, alpha = self._first()
            if its.weight.device == weight.device:
                few = kernels.block_for_few(  # type: ignore[union-attr]
                    weight, planes, bias, alpha, self.activation, *self._second()
                )
        at = [look for t in held if t is not None for look in (t.data_ptr, t.numel)]
        # At once: another thread sees all of it or nothing.
        self._ready = _Ready(held, at, [place() for place in at], few)
        return self._ready

    def _is_plain(self, x: Tensor, ready: _Ready) -> bool:
        """Tell a batch that needs no cast, no copy and no gradients; others go the general way."""
        return (
            not dispatch.is_odd(x)
            and x.dtype is torch.float32
            and x.is_cpu
            and x.ndim > 0
            and x.shape[-1] == self.first.in_features
            and x.is_contiguous()
            and not torch.is_autocast_enabled("cpu")
            and forward_ad._current_level < 0
            and not (torch.is_grad_enabled() and _wants_gradients(x, ready.held))
        )

    def _first(self) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        mine = self.first
        return mine.weight, mine.planes, mine.bias, mine.alpha

    def _second(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
        its = self.second
        return its.weight, its.live, its.start, its.bias, its.group


def _wants_gradients(x: Tensor, held: tuple[Tensor | None, ...]) -> bool:
    return x.requires_grad or any(t is not None and t.requires_grad for t in held)
