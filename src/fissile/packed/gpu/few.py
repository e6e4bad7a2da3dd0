"""Up to eight samples through a layer of five to eight children a parent, on an H100 or H200.

For up to four samples, one bit of an owner becomes a weight's place in a 2:4 sparse matrix product,
which tells two children apart at the price of one: Triton has no such products. For five to eight,
eight full products take an order that Triton leaves to the compiler. So both programs are CUDA:
``cuda/places.cu`` and ``cuda/flips.cu``, compiled when they are first needed.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from fissile.packed.gpu import nvrtc

__all__ = [
    "FLIPS",
    "PLACES",
    "Program",
    "constants",
    "owned",
    "program_for",
    "shared_bytes",
    "source",
    "suits",
]

_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
#: With fewer parents, some of 132 multiprocessors stay idle; narrower layers were not timed.
_FEWEST_PARENTS, _FEWEST_INPUTS = 16 * 132, 3072
#: Bytes of shared memory of a block, of which each of the warps that multiply has 2048 in a stage.
_ROOM, _WARPS, _STAGE = 232_448, 16, 2048
#: Runs of 32 inputs of eight samples a warp can keep in registers, and their bytes.
_MOST_KEPT, _RUN = 4, 512


class Program(NamedTuple):
    """A program in CUDA: for so many samples at most, with so many warps and stages of weights."""

    name: str
    samples: int
    warps: int
    stages: int
    sparse: bool  # its products


PLACES = Program("places", samples=4, warps=_WARPS, stages=3, sparse=True)
FLIPS = Program("flips", samples=8, warps=_WARPS + 4, stages=2, sparse=False)


def program_for(batch: int) -> Program:
    """Return the program for so many samples.

    >>> program_for(4).name, program_for(5).name
    ('places', 'flips')
    """
    return PLACES if batch <= PLACES.samples else FLIPS


@cache
def source(program: Program) -> str:
    """Return the text of a program."""
    folder, names = files(__package__) / "cuda", ("warp.cuh", "layer.cuh", f"{program.name}.cu")
    return "".join((folder / name).read_text("utf-8") for name in names)


def constants(
    program: Program, inputs: int, alpha: int, bias: bool, activation: str, dtype: torch.dtype
) -> dict[str, int]:
    """Return what a program is compiled with.

    >>> constants(FLIPS, 8192, 8, False, "relu", torch.float16)["ACTIVATION"]
    1
    """
    return {
        "INPUTS": inputs,
        "STAGES": program.stages,
        "KEPT": _kept(program, inputs),
        "ALPHA": alpha,
        "BIAS": int(bias),
        "ACTIVATION": _ACTIVATIONS.index(activation),
        "BFLOAT16": int(dtype == torch.bfloat16),
    }


def shared_bytes(program: Program, inputs: int) -> int:
    """Return the shared memory of a block: weights on their way, sums, inputs, zeros and gates.

    >>> shared_bytes(PLACES, 4096), shared_bytes(FLIPS, 4096)
    (166448, 196624)
    """
    return _wanted(program, inputs) - _kept(program, inputs) * _WARPS * _RUN


def _wanted(program: Program, inputs: int) -> int:
    """Return the shared memory of a block that keeps nothing in registers."""
    held = 2 * inputs * program.samples
    if program.sparse:  # some bytes between samples, and zeros
        held += 32 * _WARPS * program.samples + 2 * inputs // _WARPS + 32
    return _WARPS * (program.stages * _STAGE + 512 * program.samples) + held + 16


def _kept(program: Program, inputs: int) -> int:
    """Return how many runs of inputs a warp has to keep in registers: an even number."""
    if program.sparse:
        return 0
    return 2 * max(0, -(-(_wanted(program, inputs) - _ROOM) // (2 * _WARPS * _RUN)))


def suits(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int
) -> bool:
    """Tell whether this is a layer for which it pays, and a GPU that has all it takes."""
    (batch, inputs), parents = x.shape, weight.shape[0]
    return (
        0 < batch <= FLIPS.samples
        and 4 < alpha <= 8
        and planes is None
        and weight.element_size() == 2
        and parents >= _FEWEST_PARENTS
        and parents % 16 == 0
        and inputs >= _FEWEST_INPUTS
        and inputs % 1024 == 0
        and _fits(program_for(batch), inputs)
        and all(_lies_well(one, weight) for one in (x, weight, bias) if one is not None)
        and _multiprocessors(weight.get_device()) > 0
    )


def _fits(program: Program, inputs: int) -> bool:
    return _kept(program, inputs) <= _MOST_KEPT and shared_bytes(program, inputs) <= _ROOM


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
    program = program_for(batch)
    kernel = _kernel(program, device, inputs, alpha, bias is not None, activation, weight.dtype)
    if kernel is None:
        return None
    blocks = min(_multiprocessors(device), parents // 16)
    given = (x, weight, y if bias is None else bias, y, batch, parents)
    kernel((blocks, 32 * program.warps), given, torch._C._cuda_getCurrentRawStream(device))
    return y


@cache
def _kernel(
    program: Program,
    device: int,
    inputs: int,
    alpha: int,
    bias: bool,
    activation: str,
    dtype: torch.dtype,
) -> nvrtc.Kernel | None:
    """Return a compiled program; where that fails, say so once, and Triton's kernel serves."""
    macros = constants(program, inputs, alpha, bias, activation, dtype)
    try:
        code = nvrtc.compiled(source(program), torch.cuda.get_device_capability(device), macros)
        return nvrtc.Kernel(code, program.name, shared_bytes(program, inputs), device)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"a faster kernel cannot be used: {error}", stacklevel=2)
        return None
