"""DropConnect's masks on a processor: those that the layer draws, without sorting every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fissile._common.llvm import compiled
from fissile._common.random import GOLDEN, hash32
from fissile._common.shapes import Bool
from fissile.bank.cpu.layout import Array
from fissile.layers import DropConnectLinear

_BINS = 256


def drawn(layer: DropConnectLinear) -> Bool[torch.Tensor, "networks children inputs"]:
    """Return the next mask of a stacked layer, the one that its ``draw_mask`` returns.

    >>> drawn(layer).sum(-1)  # the layer's degree
    """
    seed, passes = layer.stream.unbind(-1)
    keys = hash32(hash32(seed, passes)).numpy().astype(np.uint32)
    mask = np.empty(layer.weight.shape, np.bool_)
    _choose(keys, layer.degree.numpy(), mask)
    layer.stream[..., 1] += 1
    return torch.from_numpy(mask)


@compiled
def _choose(keys: Array, degree: Array, mask: Array) -> None:
    """Mark the ``degree`` smallest hashes of every row; of equal ones, the first."""
    networks, rows, entries = mask.shape
    hashes, border = np.empty(entries, np.uint32), np.empty(entries, np.int64)
    counts = np.empty(_BINS, np.int64)
    for network in range(networks):
        for row in range(rows):
            for i in range(entries):
                hashes[i] = _hash(keys[network], np.uint32(row * entries + i))
            counts[:] = 0
            for i in range(entries):
                counts[hashes[i] >> np.uint32(24)] += 1
            left, full = degree[network, row], 0  # bins below this one are chosen whole
            while full < _BINS and counts[full] <= left:
                left -= counts[full]
                full += 1
            waiting = 0  # entries of the bin that is chosen in part, the smallest first
            for i in range(entries):
                bin = hashes[i] >> np.uint32(24)
                mask[network, row, i] = bin < full
                if bin == full:
                    k = waiting
                    while k > 0 and hashes[border[k - 1]] > hashes[i]:
                        border[k] = border[k - 1]
                        k -= 1
                    border[k] = i
                    waiting += 1
            for k in range(min(left, waiting)):
                mask[network, row, border[k]] = True


@compiled
def _hash(key: Any, entry: Any) -> Any:
    """Mix the two words of an entry's number into a state, as ``hash32`` does."""
    return _scramble(_scramble(key ^ entry))


@compiled
def _scramble(state: Any) -> Any:
    h = np.uint32(state + np.uint32(GOLDEN))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return h ^ (h >> np.uint32(16))
