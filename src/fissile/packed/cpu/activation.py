"""The activations that take more than a comparison, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fissile.packed.cpu.instructions import SOURCE, compiled, get, put

__all__ = ["GELU", "GELU_TANH", "SILU", "bend"]

GELU, GELU_TANH, SILU = 2, 3, 4

_HALF, _ONE = np.float32(0.5), np.float32(1)
_ROOT_HALF, _SCALE = np.float32(math.sqrt(0.5)), np.float32(math.sqrt(2 / math.pi))
_CUBE = np.float32(0.044715)


@compiled
def _bent(v: np.float32, which: int) -> np.float32:
    if which == GELU:
        return _HALF * v * (_ONE + math.erf(v * _ROOT_HALF))
    if which == GELU_TANH:
        return _HALF * v * (_ONE + math.tanh(_SCALE * (v + _CUBE * v * v * v)))
    return v / (_ONE + math.exp(-v))


def _bending(source: int) -> Callable[..., None]:
    @compiled
    def bend(y: int, outputs: int, batch: int, each: int, which: int, lo: int, hi: int) -> None:
        """Apply an activation to the outputs of some rows of weights, each of which has several."""
        assert source >= 0
        for b in range(batch):
            for c in range(lo * each, hi * each):
                at = b * outputs + c
                put(y, at, _bent(get(y, at), which))

    return bend


#: The kernel: an address, sizes, which activation, then the first row and the end.
bend = _bending(SOURCE)
