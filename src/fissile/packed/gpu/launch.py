"""Launching the kernels with as little Python as possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fissile.packed.bits import owner_bits
from fissile.packed.gpu import MaskedTiles, Tiles, masked_tiles, partitioned_tiles
from fissile.packed.gpu import takes as takes
from fissile.packed.gpu.masked import (
    masked_kernel,
    masked_tiles_kernel,
    masked_written_kernel,
    parts_kernel,
)
from fissile.packed.gpu.partitioned import partitioned_kernel, partitioned_written_kernel

#: Kernels that are compiled, by all that decided how: Triton's own way to find them takes longer.
_known: dict[tuple[Any, ...], Callable[..., object]] = {}


def partitioned_linear(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int,
    activation: str, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Compute a packed partitioned layer, (batch, inputs) to (batch, parents * alpha)."""
    (batch, d), h, each = x.shape, weight.shape[0], weight.element_size()
    bits = owner_bits(alpha)
    tiles = tiles or partitioned_tiles(batch, h, d, bits, each, planes is not None)
    assembly = weight.is_cuda and each == 2
    constants = (d, alpha, bits, planes is not None, bias is not None, activation, assembly)
    y = torch.empty((batch, h * alpha), dtype=weight.dtype, device=weight.device)
    at_once = 2 * tiles.samples if tiles.twice else tiles.samples
    owners = (y, y) if planes is None else (_as_words(planes), _shifts(weight.device))
    _launch(
        partitioned_kernel, (-(-batch // at_once), -(-h // tiles.rows), 1),
        (x, weight, *owners, y if bias is None else bias, y), (batch, h, *constants, *tiles[:5]),
        (h, constants, tiles), tiles.warps, tiles.stages,
    )  # fmt: skip
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
    bits, plane = owner_bits(alpha), planes is not None
    with torch.cuda.device_of(weight):
        partitioned_written_kernel[(-(-d // block), h)](
            weight, planes if plane else out, out, h, d, alpha, bits, plane, block
        )
    return out


def masked_linear(
    x: Tensor, weight: Tensor, live: Tensor, start: Tensor, bias: Tensor | None, group: int,
    activation: str, tiles: MaskedTiles | None = None,
) -> Tensor:  # fmt: skip
    """Compute a packed masked layer; with tiles, by the kernel for several samples."""
    (batch, n), (c, blocks) = x.shape, start.shape
    y = torch.empty((batch, c), dtype=weight.dtype, device=weight.device)
    biases, last = y if bias is None else bias, (bias is not None, activation)
    layer = x, weight, _as_words(live), start
    # Groups of two are so many that the matrix units pay for one sample already.
    if batch == 1 and tiles is None and (group != 2 or weight.element_size() == 4):
        constants: tuple[Any, ...] = (n, group, *last, weight.is_cuda)
        _launch(masked_kernel, (c, 1, 1), (*layer, biases, y), constants, constants, 1, 3)
        return y
    tiles = tiles or masked_tiles(batch, c, blocks, group, weight.element_size())
    parts = -(-blocks // tiles.part)
    sums = y
    if parts > 1:
        sums = torch.empty((parts, batch, c), dtype=torch.float32, device=weight.device)
    after = last if parts == 1 else (False, "none")
    constants = (n, group, *after, weight.is_cuda, *tiles[:5])
    _launch(
        masked_tiles_kernel, (-(-batch // tiles.samples), -(-c // tiles.rows), parts),
        (*layer, biases, sums), (batch, c, *constants),
        (constants, tiles.warps, tiles.stages), tiles.warps, tiles.stages,
    )  # fmt: skip
    if parts > 1:
        grid, numbers = (-(-batch * c // 512), 1, 1), (batch * c, c, parts, *last, 512)
        _launch(parts_kernel, grid, (sums, biases, y), numbers, (parts, last, y.dtype), 4, 1)
    return y


def masked_written(weight: Tensor, live: Tensor, start: Tensor, n: int, group: int) -> Tensor:
    """Return the dense weight of a packed masked layer, (outputs, n inputs)."""
    out = torch.empty((live.shape[0], n), dtype=weight.dtype, device=weight.device)
    with torch.cuda.device_of(weight):
        masked_written_kernel[(-(-start.shape[1] // 8), live.shape[0])](
            weight, _as_words(live), start, out, n, group, weight.is_cuda, 8, num_warps=2
        )
    return out


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...],
    decisive: object, warps: int, stages: int,
) -> None:  # fmt: skip
    """Launch a kernel: as Triton does it, or directly where it was launched likewise before."""
    index = tensors[0].get_device()
    if index >= 0 and index == torch.cuda.current_device():
        where = 0
        for tensor in tensors:
            where |= tensor.data_ptr()
        if where % 16 == 0:
            key = (kernel.__name__, grid, tensors[0].dtype, decisive, index)
            launcher = _known.get(key)
            if launcher is None:
                compiled = kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
                _known[key] = compiled[grid]
            else:
                launcher(*tensors, *numbers)
            return
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
        kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
