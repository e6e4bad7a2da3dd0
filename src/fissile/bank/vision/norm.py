"""BatchNorm, ReLU and, after a block, pooling as one function with a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function

from fissile.bank.vision import kernels

__all__ = ["Norm", "evaluated", "normed"]

#: Channels and rows of one tile of a reduction, and how many programs deal the tiles among them:
#: measured on an H200, where half as many are faster for the gradient without pooling.
_CHANNELS, _ROWS, _PROGRAMS = 64, 64, 256
_BLOCK = 2048
_WARPS = 4


@dataclass(frozen=True)
class Norm:
    """A BatchNorm's tensors on the device, what follows it, and room for its reductions."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor  # the running ones
    var: Tensor
    momentum: float
    eps: float
    pool: bool
    finished: Tensor  # int32 zeros, one for every block of channels
    batch: int  # images at most; a smaller batch is dealt as if it were as large


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Normalise by the batch, activate, perhaps pool; channels-last in and out."""
    y: Tensor = _Normed.apply(x, norm.gamma, norm.beta, norm)  # type: ignore[no-untyped-call]
    return y


@torch.no_grad()
def evaluated(x: Tensor, norm: Norm) -> Tensor:
    """Normalise by the running statistics, activate, perhaps pool."""
    return _applied(x, norm, norm.mean, (norm.var + norm.eps).rsqrt())


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, norm: Norm) -> Tensor:
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        mean, spread = torch.empty(2, channels, device=x.device)
        grid, loops, height = _dealt(norm.batch * x[0, 0].numel(), channels, _ROWS, _PROGRAMS)
        partial = torch.empty(2, grid[0], channels, device=x.device)
        kernels.stats_kernel[grid](
            x, partial, norm.finished, mean, spread, norm.mean, norm.var, rows,
            norm.momentum, norm.eps, CHUNKS=grid[0], LOOPS=loops, C=channels, BR=height,
            BC=_CHANNELS, num_warps=_WARPS,
        )  # fmt: skip
        y = _applied(x, norm, mean, spread)
        ctx.save_for_backward(x, mean, spread, gamma, beta)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, spread, gamma, beta = ctx.saved_tensors
        norm, channels = ctx.norm, x.shape[1]
        dy = slopes[0].contiguous(memory_format=torch.channels_last)
        dgamma, dbeta = torch.empty(2, channels, device=x.device)
        rows, half = dy.numel() // channels, _half_width(x, norm)
        most = norm.batch * dy[0, 0].numel()
        deal = (_ROWS // 2, _PROGRAMS) if norm.pool else (_ROWS, _PROGRAMS // 2)
        grid, loops, height = _dealt(most, channels, *deal)
        partial = torch.empty(2, grid[0], channels, device=x.device)
        kernels.slope_kernel[grid](
            x, dy, partial, norm.finished, mean, spread, gamma, beta, dgamma, dbeta, rows,
            CHUNKS=grid[0], LOOPS=loops, C=channels, W2=half, BR=height, BC=_CHANNELS,
            num_warps=_WARPS,
        )  # fmt: skip
        dx = torch.empty_like(x)
        kernels.back_kernel[(triton.cdiv(dy.numel(), _BLOCK),)](
            x, dy, mean, spread, gamma, beta, dgamma, dbeta, dx, dy.numel(),
            x.numel() // channels, C=channels, W2=half, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return dx, dgamma, dbeta, None


def _applied(x: Tensor, norm: Norm, mean: Tensor, spread: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    shape = (batch, channels, height // 2, width // 2) if norm.pool else x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    kernels.apply_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        x, mean, spread, norm.gamma, norm.beta, y, y.numel(), C=channels,
        W2=_half_width(x, norm), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return y


def _half_width(x: Tensor, norm: Norm) -> int:
    return x.shape[3] // 2 if norm.pool else 0


def _dealt(
    rows: int, channels: int, tallest: int, programs: int
) -> tuple[tuple[int, int], int, int]:
    """Return the grid of a reduction, how often each program loops, and its tile's height."""
    blocks, height = triton.cdiv(channels, _CHANNELS), tallest
    while height > 16 and triton.cdiv(rows, height) * blocks < programs // 2:
        height //= 2
    chunks = min(triton.cdiv(programs, blocks), triton.cdiv(rows, height))
    return (chunks, blocks), triton.cdiv(rows, chunks * height), height
