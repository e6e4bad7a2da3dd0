"""CUDA at run time: the compiler that comes with PyTorch, and the driver, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

__all__ = ["Kernel", "compiled", "is_there"]

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED = 8


@cache
def _compiler() -> ctypes.CDLL:
    """Load the compiler: from where the system looks, or from beside PyTorch."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    beside = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")
    for place in (name, *sorted(map(str, beside))):
        with suppress(OSError):
            return ctypes.CDLL(place)
    raise OSError(f"there is no {name}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def is_there() -> bool:
    """Tell whether there are a compiler and a driver.

    >>> is_there()  # on a machine with a GPU and PyTorch for CUDA
    True
    """
    try:
        _compiler(), _driver()
    except OSError:
        return False
    return True


def compiled(source: str, capability: tuple[int, int], constants: dict[str, int]) -> bytes:
    """Compile a program for a GPU; constants are macros.

    >>> compiled('extern "C" __global__ void none() {}', (9, 0), {})[:4]
    b'\\x7fELF'
    """
    nvrtc, program = _compiler(), c_void_p()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    given = (c_char_p * len(options))(*(option.encode() for option in options))
    _checked("compiler", nvrtc.nvrtcCreateProgram(byref(program), source.encode(), None, 0, 0, 0))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(f"CUDA's compiler: {_text(program)}")
        size = c_size_t()
        _checked("compiler", nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _checked("compiler", nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return code.raw


def _text(program: c_void_p) -> str:
    """Return what the compiler said."""
    size = c_size_t()
    _checked("compiler", _compiler().nvrtcGetProgramLogSize(program, byref(size)))
    said = ctypes.create_string_buffer(size.value)
    _checked("compiler", _compiler().nvrtcGetProgramLog(program, said))
    return said.value.decode(errors="replace")


def _checked(who: str, status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's {who} answered with error {status}")


class Kernel:
    """A compiled function, in the current device's context.

    >>> Kernel(code, "places", shared=200_000)((132, 512), (x, weight, y, 1, 4096), stream)
    """

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        driver, module = _driver(), c_void_p()
        self._function, self._shared = c_void_p(), shared
        _checked("driver", driver.cuModuleLoadData(byref(module), code))
        _checked("driver", driver.cuModuleGetFunction(byref(self._function), module, name.encode()))
        _checked("driver", driver.cuFuncSetAttribute(self._function, _SHARED, shared))

    def __call__(
        self, shape: tuple[int, int], given: Sequence[torch.Tensor | int], stream: int
    ) -> None:
        """Launch so many blocks of so many threads; tensors are passed as their addresses."""
        values = [c_int(v) if isinstance(v, int) else c_void_p(v.data_ptr()) for v in given]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        blocks, threads = shape
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self._shared, c_void_p(stream), places, 0
        )
        _checked("driver", status)
