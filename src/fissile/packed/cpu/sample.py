"""Few samples through a small block, at once: what is known beforehand is worked out beforehand."""

from __future__ import annotations

from collections.abc import Callable
from threading import local

import torch
from torch import Tensor

from fissile.packed.cpu.linear import (
    ACTIVATIONS,
    RELU,
    activation_kernel,
    bitmap_kernel,
    check_bitmap,
    check_owned,
    owned_kernel,
)
from fissile.packed.cpu.threads import LEAST

__all__ = ["block_for_few"]

#: Samples of a batch that is still few.
_FEW = 16


def block_for_few(
    weight1: Tensor, planes: Tensor | None, bias1: Tensor | None, alpha: int, activation: str,
    weight2: Tensor, live: Tensor, start: Tensor, bias2: Tensor | None, group: int,
) -> tuple[Callable[[Tensor, int], Tensor], int] | None:  # fmt: skip
    """Return a call for float32 rows and their number, and how many it takes; None if none pays.

    >>> call, most = block_for_few(w1, None, b1, 4, "relu", w2, live, start, b2, 4)
    >>> y = call(x, 1)  # x is contiguous and has weight1's inputs in its last dimension

    It reads the memory in which the tensors lie now, and keeps it alive.
    """
    (h, d), outputs, n = weight1.shape, live.shape[0], alpha * weight1.shape[0]
    most = min(_FEW, (2 * LEAST - 1) // max(h * d, weight2.numel(), 1))
    if weight1.dtype is not torch.float32 or weight2.dtype is not torch.float32 or most < 1:
        return None
    check_owned(weight1.new_empty(1, d), weight1, planes, bias1, alpha, activation)
    check_bitmap(n, weight2, live, start, bias2, group, "none")
    act, slots = ACTIVATIONS[activation], 1 << (alpha - 1).bit_length()
    firsts = [owned_kernel(torch.float32, slots, planes is not None, many) for many in (0, 1)]
    seconds = [bitmap_kernel(torch.float32, group, bool(many)) for many in (0, 1)]
    first_at = weight1.data_ptr(), _address(planes), _address(bias1)
    second_at = weight2.data_ptr(), live.data_ptr(), start.data_ptr(), _address(bias2)
    rectified = int(act == RELU)
    tensors = weight1, planes, bias1, weight2, live, start, bias2
    held = [t.untyped_storage() for t in tensors if t is not None]
    mine = local()  # room for what is between the layers, in each thread its own
    bend = activation_kernel() if act > RELU else None

    def call(x: Tensor, rows: int, _: object = held) -> Tensor:
        # As x is: the kernels write float32, whatever is the default elsewhere.
        several, y = rows > 1, x.new_empty((*x.shape[:-1], outputs))
        if not hasattr(mine, "hidden"):
            mine.hidden = x.new_empty(most * n)
        between = mine.hidden.data_ptr()
        firsts[several](*first_at, x.data_ptr(), between, h, d, rows, alpha, rectified, 0, h)
        if bend is not None:
            bend(between, n, rows, alpha, act, 0, h)
        seconds[several](*second_at, between, y.data_ptr(), outputs, n, rows, 0, 0, outputs)
        return y

    return call, most


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
