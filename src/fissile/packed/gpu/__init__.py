"""Packed layers on a GPU: the wide network at the memory traffic of the narrow one.

The kernels compute all children of a weight from one read of it; only ``launch`` imports them.

Tiles were timed on an H200 in CUDA graphs over weights that were not in its cache, from 1024 x 1024
to 28672 x 8192, with 1, 8 and 16 samples and owners of one, two and three bits. Other GPUs compute
the same, perhaps at less speed.

As in a dense layer, where a zero weight meets an infinite input, an infinite or NaN input makes
outputs NaN that do not depend on it.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import NamedTuple

import torch

#: The largest batch for which the kernel beat writing the weight out and one matrix product, by the
#: bits of an owner: on an H200, 14336 x 4096 and 4096 x 4096, with owners in the weights.
_MOST_PARTITIONED = {1: 512, 2: 512, 3: 256}
#: The same for float32: with two and with eight children the two are level at 256.
_MOST_SINGLE = {1: 128, 2: 256, 3: 128}
#: The same for owners in planes, timed up to this batch, by the bytes of a weight; that of float32
#: is reckoned from the time of 16 samples.
_MOST_PLANES = {2: 128, 4: 32}
#: The same by the size of a group: 4096 and 14336 outputs, 4096 groups, one in `group` stored. (In
#: float16, the time of 128 samples through groups of two and 4096 outputs is an outlier.)
_MOST_MASKED = {1: 1, 2: 128, 4: 128, 8: 256}
_MOST_MASKED_SINGLE = 32


def can_run(device: torch.device | str = "cuda") -> bool:
    """Return whether the kernels run on a device: an NVIDIA GPU from Ampere on, with Triton."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes(
    batch: int, dtype: torch.dtype, bits: int | None, group: int = 1, planes: bool = False
) -> bool:
    """Return whether the kernel is faster than writing the weight out for a product.

    A masked layer has no ``bits`` of owners but a group.
    """
    single = dtype == torch.float32
    if bits is None:
        most = _MOST_MASKED.get(group, 1)
        return batch <= (min(most, _MOST_MASKED_SINGLE) if single else most)
    most = _MOST_PARTITIONED.get(bits, 0)
    if planes:
        most = min(most, _MOST_PLANES[dtype.itemsize])
    return batch <= (min(most, _MOST_SINGLE.get(bits, 0)) if single else most)


# --- tiles

#: With fewer rows, programs of 64 leave multiprocessors idle: 132 of them.
_FEW_ROWS = 64 * 132
_VERY_FEW_ROWS = 16 * 132
_MANY_ROWS = 20000
#: So many programs of a masked layer keep all of them busy, by the rows of one.
_PROGRAMS = {16: 28 * 132, 64: 512, 128: 256}


class Tiles(NamedTuple):
    """A program takes `rows` parents, and `deep` runs of `run` inputs at a time."""

    rows: int
    run: int
    samples: int  # of a matrix product
    twice: bool  # two such products, one after the other
    deep: int
    warps: int
    stages: int


#: Rows, run, deep, warps and stages by the bits of an owner: for few, many and very many rows, each
#: for up to 8 samples and for up to 16.
_TIMED = {
    1: ((16, 256, 2, 2, 3), (16, 256, 2, 2, 3), (64, 128, 1, 4, 4), (64, 128, 1, 4, 4),
        (64, 128, 1, 4, 4), (64, 128, 1, 4, 5)),
    2: ((16, 64, 4, 4, 6), (16, 64, 4, 4, 4), (32, 128, 1, 2, 4), (64, 128, 1, 4, 4),
        (16, 64, 4, 4, 4), (64, 128, 1, 2, 3)),
    3: ((16, 128, 4, 4, 3), (16, 64, 4, 4, 4), (64, 256, 1, 4, 3), (16, 64, 4, 4, 3),
        (16, 128, 2, 2, 3), (32, 64, 4, 4, 3)),
}  # fmt: skip


@lru_cache(maxsize=1024)
def partitioned_tiles(batch: int, h: int, d: int, bits: int, bytes_each: int, plane: bool) -> Tiles:
    """Return tiles that suit a partitioned layer."""
    twice, few = batch > 8, h < _FEW_ROWS
    if bytes_each == 4:
        return Tiles(16, 32, 8, twice, 4, 4, 4)
    if batch > 16:  # the matrix units of a warp group pay
        if few and batch <= 32:
            tiles = Tiles(64, 128, 8, True, 1, 4, 4)
        else:
            tiles = Tiles(64, 64, 32 if batch <= 32 or bits == 3 else 64, False, 1, 4, 4)
    elif plane and few:
        tiles = Tiles(16, 64 if twice and bits > 1 else 128, 8, twice, 2, 2, 4)
    elif plane:
        tiles = Tiles(64 if bits == 1 else 32, 128, 8, twice, 1, *((4, 4) if bits == 1 else (2, 3)))
    elif h <= _VERY_FEW_ROWS:
        tiles = Tiles(16, 128, 8, True, 4, 4, 3) if twice else Tiles(16, 64, 8, False, 4, 4, 6)
    else:
        rows, run, *rest = _TIMED[bits][2 * ((not few) + (h >= _MANY_ROWS)) + twice]
        tiles = Tiles(rows, run, 8, twice, *rest)
    # Shorter runs where that makes the inputs a whole number of tiles.
    for run in (tiles.run, 128, 64, 32):
        if run <= tiles.run and d % (run * tiles.deep) == 0:
            return tiles._replace(run=run)
    return tiles


class MaskedTiles(NamedTuple):
    """A program takes `rows` outputs, and `part` blocks of 256 groups, `step` at a time."""

    rows: int
    samples: int
    part: int
    step: int  # groups at a time
    dealt: bool  # in an order that keeps the weights in the lanes that read them
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def masked_tiles(batch: int, outputs: int, blocks: int, group: int, bytes_each: int) -> MaskedTiles:
    """Return tiles that suit a masked layer; a block is 256 groups of a row."""
    if bytes_each == 4 or group == 1:
        step = min(32, 64 // group)
        tiles = MaskedTiles(64, 8 if batch <= 8 else 16, 0, step, False, 4, 3)
    elif batch <= 8:
        tiles = MaskedTiles(16, 8, 0, 32, True, 1, 1)
    elif batch <= 16:
        tiles = MaskedTiles(64, 16, 0, 32, False, 2, 3)
    elif batch <= 64:
        tiles = MaskedTiles(128, 32 if batch <= 32 else 64, 0, min(32, 128 // group), False, 4, 3)
    else:
        tiles = MaskedTiles(128, 128, 0, 64 // group, False, 4, 3)
    programs = -(-outputs // tiles.rows) * -(-batch // tiles.samples)
    parts = min(blocks, max(1, _PROGRAMS[tiles.rows] // programs))
    return tiles._replace(part=-(-blocks // parts))
