"""Up to four samples through a layer of up to eight children a parent, on an H100 or H200.

One bit of an owner becomes a weight's place in a 2:4 sparse matrix product, which tells two
children apart at the price of one; see ``cuda/places.cu``. Triton has no such products: this is
CUDA, compiled when it is first needed.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fissile.packed.gpu import nvrtc

__all__ = ["constants", "owned", "shared_bytes", "source", "suits"]

_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
_WARPS, _STAGES = 16, 3
#: With fewer parents, some of 132 multiprocessors stay idle; narrower layers were not timed.
_FEWEST_PARENTS, _FEWEST_INPUTS = 16 * 132, 3072
#: Bytes of shared memory of a block.
_ROOM = 232_448


@cache
def source() -> str:
    """Return the program."""
    folder = files("fissile.packed.gpu") / "cuda"
    return "".join((folder / name).read_text("utf-8") for name in ("warp.cuh", "places.cu"))


def constants(
    inputs: int, alpha: int, bias: bool, activation: str, dtype: torch.dtype
) -> dict[str, int]:
    """Return what the program is compiled with.

    >>> constants(4096, 8, False, "relu", torch.float16)["ACTIVATION"]
    1
    """
    return {
        "INPUTS": inputs,
        "STAGES": _STAGES,
        "ALPHA": alpha,
        "BIAS": int(bias),
        "ACTIVATION": _ACTIVATIONS.index(activation),
        "BFLOAT16": int(dtype == torch.bfloat16),
    }


def shared_bytes(inputs: int, stages: int = _STAGES) -> int:
    """Return the shared memory of a block: weights on their way, sums, inputs, zeros and gates.

    >>> shared_bytes(4096)
    166448
    """
    sample = inputs // _WARPS * 2 + 32
    return _WARPS * (stages * 2048 + 2048 + 4 * sample) + sample + 16


def suits(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int
) -> bool:
    """Tell whether this is a layer for which it pays, and a GPU that has all it takes."""
    (batch, inputs), parents = x.shape, weight.shape[0]
    return (
        0 < batch <= 4
        and 4 < alpha <= 8
        and planes is None
        and weight.element_size() == 2
        and parents >= _FEWEST_PARENTS
        and parents % 16 == 0
        and inputs >= _FEWEST_INPUTS
        and inputs % 1024 == 0
        and shared_bytes(inputs) <= _ROOM
        and all(_lies_well(one, weight) for one in (x, weight, bias) if one is not None)
        and _multiprocessors(weight.get_device()) > 0
    )


def _lies_well(tensor: Tensor, weight: Tensor) -> bool:
    return (
        tensor.dtype is weight.dtype
        and tensor.device == weight.device
        and tensor.data_ptr() % 16 == 0
    )


@cache
def _multiprocessors(device: int) -> int:
    """Count those of a Hopper GPU that can be programmed here; 0 elsewhere."""
    if device < 0 or torch.cuda.get_device_capability(device) != (9, 0) or not nvrtc.is_there():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def owned(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: int, activation: str
) -> Tensor | None:
    """Compute a packed partitioned layer that suits; None where its program cannot be had."""
    (batch, inputs), parents, device = x.shape, weight.shape[0], weight.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return owned(x, weight, bias, alpha, activation)
    # PyTorch's own call comes first: it makes the device current in a thread that is new.
    y = torch.empty((batch, parents * alpha), dtype=weight.dtype, device=weight.device)
    kernel = _kernel(device, inputs, alpha, bias is not None, activation, weight.dtype)
    if kernel is None:
        return None
    blocks = min(_multiprocessors(device), parents // 16)
    given = (x, weight, y if bias is None else bias, y, batch, parents)
    kernel((blocks, 32 * _WARPS), given, torch._C._cuda_getCurrentRawStream(device))
    return y


@cache
def _kernel(
    device: int, inputs: int, alpha: int, bias: bool, activation: str, dtype: torch.dtype
) -> nvrtc.Kernel | None:
    """Return a compiled program; where that fails, say so once, and Triton's kernel serves."""
    macros = constants(inputs, alpha, bias, activation, dtype)
    try:
        code = nvrtc.compiled(source(), torch.cuda.get_device_capability(device), macros)
        return nvrtc.Kernel(code, "places", shared_bytes(inputs), device)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"a faster kernel cannot be used: {error}", stacklevel=2)
        return None
