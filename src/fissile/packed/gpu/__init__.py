"""Packed layers on a GPU: the wide network at the memory traffic of the narrow one.

A layer with a few samples takes as long as its weights take to come from memory, and packed weights
are no more than the dense ones. The kernels compute all children of a weight from one read of it.

* :mod:`~fissile.packed.gpu.partitioned`: the partitioned layer, on the matrix units.
* :mod:`~fissile.packed.gpu.masked`: the masked layer for one sample, stored group by stored group.
* :mod:`~fissile.packed.gpu.masked_tiles`: the masked layer for several, on the matrix units.

As in a dense layer, where a zero weight meets an infinite input, an infinite or NaN input makes
outputs NaN that do not depend on it. Nothing is compiled, and Triton is not imported, before the
first call.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

__all__ = [
    "bitmap_linear",
    "bitmap_written",
    "can_run",
    "owned_linear",
    "owned_written",
    "takes",
]

#: The largest batch for which the kernel beat writing the weight out and one matrix product, by the
#: bits of an owner: on an H200, 14336 x 4096 and 4096 x 4096, with owners in the weights
#: (benchmarks/results/pack-limits-h200.json).
_MOST_OWNED = {1: 512, 2: 512, 3: 256}
#: The same for float32: with two and with eight children the two are level at 256.
_MOST_SINGLE = {1: 128, 2: 256, 3: 128}
#: The same for owners in planes, timed up to this batch, by the bytes of a weight; that of float32
#: is reckoned from the time of 16 samples.
_MOST_PLANES = {2: 128, 4: 32}
#: The same by the size of a group: 4096 and 14336 outputs, 4096 groups, one in `group` stored. (In
#: float16, the time of 128 samples through groups of two and 4096 outputs is an outlier.)
_MOST_BITMAP = {1: 1, 2: 128, 4: 128, 8: 256}
_MOST_BITMAP_SINGLE = 32


def can_run(device: torch.device | str = "cuda") -> bool:
    """Tell whether the kernels run on a device: a GPU of NVIDIA, from Ampere on, and Triton.

    >>> can_run("cpu")
    False
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes(
    batch: int, dtype: torch.dtype, bits: int | None, group: int = 1, planes: bool = False
) -> bool:
    """Tell whether the kernel is faster than writing the weight out for a matrix product.

    >>> takes(16, torch.float16, 2), takes(4096, torch.float16, 2)
    (True, False)

    Args:
        batch: samples.
        dtype: of the weights.
        bits: of an owner in a partitioned layer; None for a masked one.
        group: of a masked layer.
        planes: the owners of a partitioned layer lie beside its weights.
    """
    single = dtype == torch.float32
    if bits is None:
        most = _MOST_BITMAP.get(group, 1)
        return batch <= (min(most, _MOST_BITMAP_SINGLE) if single else most)
    most = _MOST_OWNED.get(bits, 0)
    if planes:
        most = min(most, _MOST_PLANES[dtype.itemsize])
    return batch <= (min(most, _MOST_SINGLE.get(bits, 0)) if single else most)


def owned_linear(
    x: Tensor,
    weight: Tensor,
    planes: Tensor | None,
    bias: Tensor | None,
    alpha: int,
    activation: str,
) -> Tensor:
    """Compute a packed partitioned layer, (batch, inputs) to (batch, parents * alpha).

    >>> owned_linear(x, weight, None, bias, alpha=4, activation="relu").shape
    torch.Size([1, 16384])
    """
    from fissile.packed.gpu.launch import owned

    return owned(x, weight, planes, bias, alpha, activation)


def owned_written(weight: Tensor, planes: Tensor | None, alpha: int) -> Tensor:
    """Write a packed partitioned layer out: the dense weight, (parents * alpha, inputs)."""
    from fissile.packed.gpu.launch import owned_written as run

    return run(weight, planes, alpha)


def bitmap_linear(
    x: Tensor,
    weight: Tensor,
    live: Tensor,
    start: Tensor,
    bias: Tensor | None,
    group: int,
    activation: str,
) -> Tensor:
    """Compute a packed masked layer, (batch, inputs) to (batch, outputs).

    >>> bitmap_linear(x, weight, live, start, bias, group=4, activation="none").shape
    torch.Size([1, 4096])
    """
    from fissile.packed.gpu.launch import bitmap

    return bitmap(x, weight, live, start, bias, group, activation)


def bitmap_written(weight: Tensor, live: Tensor, start: Tensor, n: int, group: int) -> Tensor:
    """Write a packed masked layer out: the dense weight, (outputs, n inputs)."""
    from fissile.packed.gpu.launch import bitmap_written as run

    return run(weight, live, start, n, group)
