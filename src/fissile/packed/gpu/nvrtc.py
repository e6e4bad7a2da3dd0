"""CUDA at run time: the compiler that comes with PyTorch, and the driver, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["Kernel", "compiled", "is_there"]


class _Attribute(ctypes.Structure):
    _fields_ = (("name", c_int), ("none", c_int), ("value", c_int), ("rest", c_char * 60))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint),
    )


#: What functions take; without it, ctypes would cut addresses to the size of a number.
_COMPILER: dict[str, Any] = {
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}
_DRIVER: dict[str, Any] = {
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernelEx": (POINTER(_Launch), c_void_p, POINTER(c_void_p), c_void_p),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_CONTEXT and
#: CU_STREAM_CAPTURE_MODE_RELAXED
_SHARED, _NO_CONTEXT, _RELAXED = 8, 201, 2
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_EARLY = 6


def _declared(library: ctypes.CDLL, functions: dict[str, Any]) -> ctypes.CDLL:
    for name, takes in functions.items():
        getattr(library, name).argtypes = takes
    return library


@cache
def _compiler() -> ctypes.CDLL:
    """Load the compiler: from where the system looks, or from beside PyTorch."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    beside = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")
    for place in (name, *sorted(map(str, beside))):
        with suppress(OSError):
            return _declared(ctypes.CDLL(place), _COMPILER)
    raise OSError(f"there is no {name}")


@cache
def _driver() -> ctypes.CDLL:
    return _declared(ctypes.CDLL("libcuda.so.1"), _DRIVER)


@cache
def is_there() -> bool:
    """Tell whether there are a compiler and a driver.

    >>> is_there()  # on a machine with a GPU and PyTorch for CUDA
    True
    """
    try:
        _compiler(), _driver()
    except (OSError, AttributeError):  # none, or one that is too old
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
    _compiles(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), None, 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(f"CUDA's compiler: {_log(program)}")
        size = c_size_t()
        _compiles(nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _compiles(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return code.raw


def _log(program: c_void_p) -> str:
    """Return what the compiler said."""
    size = c_size_t()
    _compiles(_compiler().nvrtcGetProgramLogSize(program, byref(size)))
    said = ctypes.create_string_buffer(size.value)
    _compiles(_compiler().nvrtcGetProgramLog(program, said))
    return said.value.decode(errors="replace")


def _compiles(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's compiler answered with error {status}")


def _drives(status: int) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise RuntimeError(f"CUDA's driver: {(name.value or b'error').decode()} ({status})")


class Kernel:
    """A compiled function on a device. It has to begin by waiting for kernels before it to end.

    Its first blocks may be there before that, in the place of others that have ended, if the kernel
    before allows it. What comes after waits for all of it, as usual.

    >>> Kernel(code, "places", shared=200_000, device=0)((132, 512), (x, weight, y, 4), stream)
    """

    def __init__(self, code: bytes, name: str, shared: int, device: int) -> None:
        module, self._function, self._shared = c_void_p(), c_void_p(), shared
        self._context = _context(device)
        driver = _driver()
        with _also_in_captures():
            _drives(driver.cuModuleLoadData(byref(module), code))
            found = driver.cuModuleGetFunction(byref(self._function), module, name.encode())
            _drives(found)
            _drives(driver.cuFuncSetAttribute(self._function, _SHARED, shared))

    def __call__(
        self, shape: tuple[int, int], given: Sequence[torch.Tensor | int], stream: int
    ) -> None:
        """Launch so many blocks of so many threads; tensors are passed as their addresses."""
        values = [c_int(v) if isinstance(v, int) else c_void_p(v.data_ptr()) for v in given]
        at = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        launch = (byref(_how(*shape, self._shared, stream)), self._function, at, None)
        status = _driver().cuLaunchKernelEx(*launch)
        if status == _NO_CONTEXT:  # this thread has not used the device before
            _drives(_driver().cuCtxSetCurrent(self._context))
            status = _driver().cuLaunchKernelEx(*launch)
        _drives(status)


@lru_cache(maxsize=256)
def _how(blocks: int, threads: int, shared: int, stream: int) -> _Launch:
    early = ctypes.pointer(_Attribute(name=_EARLY, value=1))
    return _Launch((blocks, 1, 1), (threads, 1, 1), shared, stream, early, 1)


def _context(device: int) -> c_void_p:
    """Return the current context; where this thread has none yet, it is given PyTorch's."""
    context, number = c_void_p(), c_int()
    _drives(_driver().cuCtxGetCurrent(byref(context)))
    if not context:
        _drives(_driver().cuDeviceGet(byref(number), device))
        _drives(_driver().cuDevicePrimaryCtxRetain(byref(context), number))
        _drives(_driver().cuCtxSetCurrent(context))
    return context


@contextmanager
def _also_in_captures() -> Iterator[None]:
    """Allow what a CUDA graph that is being captured would forbid: it is no part of it."""
    mode = c_int(_RELAXED)
    _drives(_driver().cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        _drives(_driver().cuThreadExchangeStreamCaptureMode(byref(mode)))
