"""Launching the kernels with as little Python as possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fissile.packed.gpu import MaskedTiles, Tiles, masked_tiles, partitioned_tiles, takes
from fissile.packed.gpu.masked import (
    masked_kernel,
    masked_tiles_kernel,
    masked_written_kernel,
    parts_kernel,
)
from fissile.packed.gpu.partitioned import partitioned_kernel, partitioned_written_kernel

__all__ = ["masked_linear", "masked_written", "partitioned_linear", "partitioned_written", "takes"]


#: Kernels that are compiled, by all that decided how: Triton's own way to find them takes longer.
_known: dict[tuple[Any, ...], Callable[..., object]] = {}


def partitioned_linear(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    bias: Tensor | None,
    alpha: int,
    activation: str,
    tiles: Tiles | None = None,
    assembly: bool | None = None,
) -> Tensor:
    """Compute a packed partitioned layer, (batch, inputs) to (batch, parents * alpha).

    >>> partitioned_linear(x, weight, None, bias, alpha=4, activation="relu").shape
    torch.Size([1, 16384])
    """
    (batch, d), h, each = x.shape, weight.shape[0], weight.element_size()
    bits = (alpha - 1).bit_length()
    tiles = tiles or partitioned_tiles(batch, h, d, bits, each, planes is not None)
    rows, _, samples, twice, _, warps, stages = tiles
    if assembly is None:
        assembly = weight.is_cuda and each == 2
    if planes is not None:
        planes = _as_words(planes)
    y = torch.empty((batch, h * alpha), dtype=weight.dtype, device=weight.device)
    constants = (d, alpha, bits, planes is not None, bias is not None, activation, assembly)
    _launch(
        partitioned_kernel,
        (-(-batch // (2 * samples if twice else samples)), -(-h // rows), 1),
        (
            x,
            weight,
            y if planes is None else planes,
            y if planes is None else _shifts(weight.device),
            y if bias is None else bias,
            y,
        ),
        (batch, h, *constants, *tiles[:5]),
        (h, constants, tiles),
        warps,
        stages,
    )
    return y


@lru_cache
def _shifts(device: torch.device) -> Tensor:
    """Return 31 … 0."""
    return torch.arange(31, -1, -1, dtype=torch.int32, device=device)


def _as_words(bits: Tensor) -> Tensor:
    """View rows of bytes as rows of words, where they are such."""
    if bits.shape[-1] % 4 == 0 and bits.data_ptr() % 4 == 0:
        return bits.view(torch.int32)
    return bits


def partitioned_written(weight: Tensor, planes: Tensor | None, alpha: int) -> Tensor:
    """Return the dense weight of a packed partitioned layer, (parents * alpha, inputs)."""
    h, d = weight.shape
    out = torch.empty((h * alpha, d), dtype=weight.dtype, device=weight.device)
    block = min(2048, 1 << (d - 1).bit_length())
    bits = (alpha - 1).bit_length()
    with torch.cuda.device_of(weight):
        partitioned_written_kernel[(-(-d // block), h)](
            weight,
            out if planes is None else planes,
            out,
            h,
            d,
            alpha,
            bits,
            planes is not None,
            block,
        )
    return out


def masked_linear(
    x: Tensor,
    weight: Tensor,
    live: Tensor,
    start: Tensor,
    bias: Tensor | None,
    group: int,
    activation: str,
    tiles: MaskedTiles | None = None,
    assembly: bool | None = None,
) -> Tensor:
    """Compute a packed masked layer, (batch, inputs) to (batch, outputs).

    >>> masked_linear(x, weight, live, start, bias, group=4, activation="none").shape
    torch.Size([1, 4096])

    With tiles, it is the kernel for several samples.
    """
    (batch, n), (c, blocks) = x.shape, start.shape
    # Groups of two are so many that the matrix units pay for one sample already.
    if batch == 1 and tiles is None and (group != 2 or weight.element_size() == 4):
        return _masked_of_one(x, weight, live, start, bias, group, activation, assembly)
    tiles = tiles or masked_tiles(batch, c, blocks, group, weight.element_size())
    rows, samples, part, _, _, warps, stages = tiles
    parts = -(-blocks // part)
    if assembly is None:
        assembly = weight.is_cuda
    y = torch.empty((batch, c), dtype=weight.dtype, device=weight.device)
    sums = y
    if parts > 1:
        sums = torch.empty((parts, batch, c), dtype=torch.float32, device=weight.device)
    last = (bias is not None, activation)
    constants = (n, group, *(last if parts == 1 else (False, "none")), assembly, *tiles[:5])
    _launch(
        masked_tiles_kernel,
        (-(-batch // samples), -(-c // rows), parts),
        (x, weight, _as_words(live), start, y if bias is None else bias, sums),
        (batch, c, *constants),
        (constants, warps, stages),
        warps,
        stages,
    )
    if parts > 1:
        _launch(
            parts_kernel,
            (-(-batch * c // 512), 1, 1),
            (sums, y if bias is None else bias, y),
            (batch * c, c, parts, *last, 512),
            (parts, last, y.dtype),
            4,
            1,
        )
    return y


def _masked_of_one(
    x: Tensor,
    weight: Tensor,
    live: Tensor,
    start: Tensor,
    bias: Tensor | None,
    group: int,
    activation: str,
    assembly: bool | None,
) -> Tensor:
    """Launch the kernel of a masked layer for one sample."""
    (batch, n), c = x.shape, start.shape[0]
    if assembly is None:
        assembly = weight.is_cuda
    y = torch.empty((batch, c), dtype=weight.dtype, device=weight.device)
    constants = (n, group, bias is not None, activation, assembly, 32, 4)
    _launch(
        masked_kernel,
        (c, batch, 1),
        (x, weight, live, start, y if bias is None else bias, y),
        (c, *constants),
        constants,
        1,
        3,
    )
    return y


def masked_written(
    weight: Tensor, live: Tensor, start: Tensor, n: int, group: int, assembly: bool | None = None
) -> Tensor:
    """Return the dense weight of a packed masked layer, (outputs, n inputs)."""
    out = torch.empty((live.shape[0], n), dtype=weight.dtype, device=weight.device)
    if assembly is None:
        assembly = weight.is_cuda
    with torch.cuda.device_of(weight):
        masked_written_kernel[(-(-start.shape[1] // 8), live.shape[0])](
            weight, _as_words(live), start, out, n, group, assembly, 8, num_warps=2
        )
    return out


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    decisive: object,
    warps: int,
    stages: int,
) -> None:
    """Launch a kernel: as Triton does it, or directly where it was launched likewise before."""
    index = tensors[0].get_device()
    if index >= 0 and index == torch.cuda.current_device():
        where = 0
        for tensor in tensors:
            where |= tensor.data_ptr()
        if where % 16 == 0:
            key = (kernel.__name__, grid, tensors[0].dtype, decisive, index)
            found = _known.get(key)
            if found is None:
                compiled = kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
                _known[key] = compiled[grid]
            else:
                found(*tensors, *numbers)
            return
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
        kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
