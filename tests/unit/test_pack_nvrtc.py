"""Calls of CUDA's driver, against a library that only writes down what it is told."""

import ctypes
import os
import shutil
import subprocess
import threading

import pytest
import torch

from fissile.packed.gpu import few, nvrtc

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    GXX is None and not os.environ.get("CI"), reason="needs g++ (apt install g++)"
)

DRIVER = r"""
#include <cstring>
thread_local void* current = nullptr;
int mode = 0, loaded_in_mode = -1, launches = 0, refused = 0, retained = 0;
unsigned shape[7];
void *arguments[8], *stream_seen, *extra_seen;
char text[64];
extern "C" {
int cuCtxGetCurrent(void** to) { return *to = current, 0; }
int cuCtxSetCurrent(void* from) { return current = from, 0; }
int cuDeviceGet(int* to, int ordinal) { return *to = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** to, int) {
  return retained++, *to = (void*)0x7123456789abcdef, 0;
}
int cuThreadExchangeStreamCaptureMode(int* with) {
  int old = mode;
  return mode = *with, *with = old, 0;
}
int cuModuleLoadData(void** to, const char* code) {
  strncpy(text, code, 63), loaded_in_mode = mode;
  return *to = (void*)0x7000000000000001, current ? 0 : 201;
}
int cuModuleGetFunction(void** to, void* module, const char* name) {
  *to = (void*)0x7000000000000002;
  return strcmp(name, "places") || module != (void*)0x7000000000000001 ? 500 : 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  return attribute == 8 && value < 250000 ? 0 : 1;
}
int cuGetErrorName(int, const char** to) { return *to = "CUDA_ERROR_OF_A_TEST", 0; }
struct Attribute { int name, none, value; char rest[60]; };
struct Launch {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const Launch* how, void* function, void** given, void* extra) {
  if (!current) return refused++, 201;
  if (function != (void*)0x7000000000000002) return 400;
  if (how->count != 1 || how->attributes[0].name != 6 || how->attributes[0].value != 1) return 401;
  memcpy(shape, how, sizeof shape), launches++, stream_seen = how->stream, extra_seen = extra;
  for (int i = 0; i < 4; i++) arguments[i] = *(void**)given[i];
  for (int i = 4; i < 6; i++) arguments[i] = (void*)(long)*(int*)given[i];
  return 0;
}
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    (tmp_path / "driver.cpp").write_text(DRIVER)
    command = [GXX, "-shared", "-fPIC", "-w", tmp_path / "driver.cpp", "-o", tmp_path / "driver.so"]
    subprocess.run(command, check=True)
    library = nvrtc._declared(ctypes.CDLL(tmp_path / "driver.so"), nvrtc._DRIVER)
    monkeypatch.setattr(nvrtc, "_driver", lambda: library)
    return library


def told(driver, name, kind=ctypes.c_int):
    return kind.in_dll(driver, name)


def test_a_launch_arrives_as_it_was_meant(driver):
    tensors = [torch.zeros(n) for n in (1, 5, 7, 9)]
    kernel = nvrtc.Kernel(b"\x7fELF code", "places", 123_456, 0)
    assert told(driver, "loaded_in_mode").value == nvrtc._RELAXED
    assert told(driver, "mode").value == 0
    stream = 0x7FFF_0000_1234_5678
    for _ in range(20):  # what is left on the stack differs
        kernel((132, 512), (*tensors, 3, 28672), stream)
        assert list((ctypes.c_uint * 7).in_dll(driver, "shape")) == [132, 1, 1, 512, 1, 1, 123_456]
        seen = list((ctypes.c_void_p * 8).in_dll(driver, "arguments"))[:6]
        assert seen == [*(tensor.data_ptr() for tensor in tensors), 3, 28672]
        assert told(driver, "stream_seen", ctypes.c_void_p).value == stream
        assert told(driver, "extra_seen", ctypes.c_void_p).value is None


def test_structures_lie_as_the_driver_has_them():
    """As cuda.h has CUlaunchConfig and CUlaunchAttribute on machines of 64 bits."""
    launch, attribute = nvrtc._Launch, nvrtc._Attribute
    assert [ctypes.sizeof(launch), ctypes.sizeof(attribute)] == [56, 72]
    assert [launch.block.offset, launch.shared.offset] == [12, 24]
    assert [launch.stream.offset, launch.attributes.offset, launch.count.offset] == [32, 40, 48]
    assert attribute.value.offset == 8


def test_a_thread_without_a_context_is_given_one(driver):
    kernel, given = nvrtc.Kernel(b"code", "places", 1000, 0), [torch.zeros(1)] * 4 + [1, 2]
    assert told(driver, "retained").value == 1
    thread = threading.Thread(target=kernel, args=((1, 32), given, 0))
    thread.start()
    thread.join()
    assert told(driver, "refused").value == 1
    assert told(driver, "launches").value == 1


def test_an_error_has_its_name(driver):
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_OF_A_TEST \(500\)"):
        nvrtc.Kernel(b"code", "something else", 1000, 0)
    assert told(driver, "mode").value == 0


def test_where_nothing_can_be_compiled_triton_serves(monkeypatch):
    def broken(*_):
        raise OSError("no compiler")

    monkeypatch.setattr(nvrtc, "compiled", broken)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    few._kernel.cache_clear()
    with pytest.warns(UserWarning, match="no compiler"):
        assert few._kernel(few.PLACES, 0, 4096, 8, True, "none", torch.float16) is None
    assert few._kernel(few.PLACES, 0, 4096, 8, True, "none", torch.float16) is None  # said once
    few._kernel.cache_clear()


@pytest.mark.parametrize(
    ("batch", "parents", "inputs", "alpha", "dtype", "shift"),
    [
        (0, 4096, 4096, 8, torch.float16, 0),
        (9, 4096, 4096, 8, torch.float16, 0),
        (1, 4104, 4096, 8, torch.float16, 0),
        (1, 2048, 4096, 8, torch.float16, 0),
        (1, 4096, 4160, 8, torch.float16, 0),
        (1, 4096, 2048, 8, torch.float16, 0),
        (1, 4096, 12288, 8, torch.float16, 0),
        (5, 4096, 9216, 8, torch.float16, 0),
        (1, 4096, 4096, 4, torch.float16, 0),
        (1, 4096, 4096, 8, torch.float32, 0),
        (1, 4096, 4096, 8, torch.float16, 1),
    ],
)
def test_what_does_not_suit(batch, parents, inputs, alpha, dtype, shift, monkeypatch):
    monkeypatch.setattr(few, "_multiprocessors", lambda _: 132)
    weight = torch.empty(parents * inputs, dtype=dtype).view(parents, inputs)
    x = torch.empty(batch * inputs + shift, dtype=dtype)[shift:].view(batch, inputs)
    assert not few.suits(x, weight, None, None, alpha)


def test_what_suits(monkeypatch):
    monkeypatch.setattr(few, "_multiprocessors", lambda _: 132)
    weight, bias = torch.empty(4096, 4096).bfloat16(), torch.empty(4096 * 7).bfloat16()
    x = torch.empty(4, 4096).bfloat16()
    assert few.suits(x, weight, None, bias, 7)
    assert few.suits(torch.empty(8, 4096).bfloat16(), weight, None, bias, 7)
    assert few.suits(torch.empty(4, 11264).half(), torch.empty(2112, 11264).half(), None, None, 5)
    assert few.suits(torch.empty(5, 8192).half(), torch.empty(2112, 8192).half(), None, None, 5)
    assert not few.suits(x, weight, None, bias.half(), 7)
    assert not few.suits(x.half(), weight, None, bias, 7)
    assert not few.suits(x, weight, None, bias[1:], 7)
    monkeypatch.undo()
    assert not few.suits(x, weight, None, bias, 7)  # on a processor
