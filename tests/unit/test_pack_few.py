"""The kernels in CUDA, compiled for the processor, against float64; warps are emulated."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fissile.packed.format import pack_owned
from fissile.packed.gpu.few import FLIPS, PLACES, Program, constants, shared_bytes, source
from fissile.packed.plain import activated, owned_dense

GXX = shutil.which("g++")
# Where tests are the point, a compiler that is missing is a failure, not a reason to look away.
pytestmark = pytest.mark.skipif(
    (GXX is None and not os.environ.get("CI")) or sys.platform != "linux",
    reason="the kernels are compiled by g++ (apt install g++), on Linux",
)

EMULATION = Path(__file__).parent / "emulated_warp.h"
FLAGS = ["-std=c++17", "-w", "-fno-strict-aliasing", "-fvisibility=hidden"]
# What a launch is for Python, after the kernel itself.
LAUNCH = """
EXPORTED int launch(const number* x, const number* w, const number* bias, number* y, int batch,
                    int parents, int blocks, int bytes, word seed) {
  return launched(blocks, THREADS, bytes, seed, [=] { KERNEL(x, w, bias, y, batch, parents); });
}
EXPORTED int bytes_needed() { return AT_GATES + 16; }
EXPORTED int threads() { return THREADS; }
"""
HALF, BRAIN = torch.float16, torch.bfloat16
FENCE = 4096  # numbers around an array that are no part of it


@dataclass(frozen=True)
class Setting:
    program: Program
    inputs: int
    alpha: int
    bias: bool
    activation: str
    dtype: torch.dtype
    stages: int | None = None  # other than those of the program

    def macros(self):
        about = (self.inputs, self.alpha, self.bias, self.activation, self.dtype)
        found = constants(self.program, *about)
        return found | ({"STAGES": self.stages} if self.stages else {})

    def __str__(self):
        about = (self.program.name, self.inputs, self.alpha, self.activation, self.dtype)
        return "-".join(map(str, about + ((self.stages,) if self.stages else ())))


# Each step of a warp has a stage of its own where stages divide inputs / 1024.
SPARSE = [
    Setting(PLACES, 3072, 8, True, "none", HALF),
    Setting(PLACES, 3072, 5, False, "gelu_tanh", BRAIN, stages=4),
    Setting(PLACES, 4096, 7, True, "silu", BRAIN),
    Setting(PLACES, 4096, 8, False, "relu", HALF, stages=4),
    Setting(PLACES, 4096, 5, True, "gelu", HALF),
    Setting(PLACES, 5120, 8, True, "none", BRAIN),
]
# From 7168 inputs on, a warp keeps some of them in registers.
FULL = [
    Setting(FLIPS, 3072, 8, True, "none", HALF),
    Setting(FLIPS, 4096, 7, True, "silu", BRAIN),
    Setting(FLIPS, 4096, 8, False, "relu", HALF),
    Setting(FLIPS, 7168, 5, True, "gelu", HALF),
    Setting(FLIPS, 8192, 6, False, "gelu_tanh", BRAIN),
]
SETTINGS = SPARSE + FULL


class Trouble(Exception):
    """What the emulation has to say against a kernel."""


def kernel_text(program):
    """Return a program without the part that the emulation replaces."""
    warp = (files("fissile.packed.gpu") / "cuda" / "warp.cuh").read_text("utf-8")
    assert source(program).startswith(warp)
    return warp, source(program).removeprefix(warp)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compile the kernel for a setting, with some of its text replaced; each only once."""
    folder, known = tmp_path_factory.mktemp("few"), {}

    def build(setting, *edits):
        key = (setting, edits)
        if key not in known:
            known[key] = Emulated(_compiled(folder / f"k{len(known)}", setting, edits))
        return known[key]

    return build


def _compiled(stem, setting, edits):
    _, text = kernel_text(setting.program)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    stem.with_suffix(".cpp").write_text(f'#include "{EMULATION}"\n{text}{LAUNCH}')
    macros = [f"-D{name}={value}" for name, value in setting.macros().items()]
    macros.append(f"-DKERNEL={setting.program.name}")
    # A broken kernel does not run for long, so the compiler should not take long either.
    command = [GXX, "-O0" if edits else "-O1", "-shared", "-fPIC", *FLAGS, *macros]
    command += [f"{stem}.cpp", "-o", f"{stem}.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return f"{stem}.so"


class Emulated:
    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self._library.trouble.restype = ctypes.c_char_p
        self.bytes_needed = self._library.bytes_needed()
        self.threads = self._library.threads()

    def __call__(self, layer, batch, blocks, seed, shared=None):
        """Return outputs, or raise what there is to say against how they were computed."""
        x, y = fenced(layer.x[:batch]), fenced(layer.empty(batch))
        weight, bias = fenced(layer.weight), None if layer.bias is None else fenced(layer.bias)
        given = [x, weight, y if bias is None else bias, y]
        self._library.forget()
        for array in given:
            self._library.allow(address(array), ctypes.c_size_t(array.numel() * 2))
        status = self._library.launch(
            *map(address, given), batch, len(weight), blocks, shared or self.bytes_needed, seed
        )
        if status:
            raise Trouble(self._library.trouble().decode())
        assert bool(fence_of(y).isnan().all()), "written outside of the outputs"
        return y


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def fenced(tensor):
    """Copy a tensor to between two fences of NaN."""
    held = torch.full((tensor.numel() + 2 * FENCE,), torch.nan, dtype=tensor.dtype)
    inside = held[FENCE:-FENCE].view(tensor.shape)
    return inside.copy_(tensor)


def fence_of(inside):
    held = inside.new_empty(0).set_(inside.untyped_storage())
    return torch.cat([held[:FENCE], held[-FENCE:]])


class Layer:
    """A packed layer and as many samples as its program takes."""

    def __init__(self, setting, parents, keep=0.8):
        self.setting, alpha = setting, setting.alpha
        generator = torch.Generator().manual_seed(parents)
        shape = (parents, setting.inputs)
        owner = torch.randint(0, alpha, shape, generator=generator)
        owner[torch.rand(shape, generator=generator) > keep] = -1
        values = torch.randn(shape, generator=generator) / 32
        self.weight, _ = pack_owned(values, owner, alpha, setting.dtype, "inline")
        samples = (setting.program.samples, setting.inputs)
        self.x = torch.randn(samples, generator=generator).to(setting.dtype)
        bias = torch.randn(parents * alpha, generator=generator).to(setting.dtype)
        self.bias = bias if setting.bias else None

    def empty(self, batch):
        children = len(self.weight) * self.setting.alpha
        return torch.full((batch, children), torch.nan, dtype=self.setting.dtype)

    def expected(self, batch):
        wide = owned_dense(self.weight, None, self.setting.alpha).double()
        bias = None if self.bias is None else self.bias.double()
        y = functional.linear(self.x[:batch].double(), wide, bias)
        return activated(y, self.setting.activation)


def is_right(found, expected):
    """Tell whether outputs are the nearest numbers of their dtype, but for sums in float32."""
    near = torch.finfo(found.dtype).eps * 0.51
    return torch.allclose(found.double(), expected, rtol=near, atol=1e-5)


def all_of(setting):
    """Return the most samples there may be, and the fewest."""
    return setting.program.samples, {PLACES: 1, FLIPS: 5}[setting.program]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_child_gets_its_weights(built, setting):
    kernel, layer, (most, fewest) = built(setting), Layer(setting, 48), all_of(setting)
    # Three tiles: for three blocks, for two, and all for one.
    for batch, blocks, seed in [(fewest, 3, 0), (most - 2, 2, 1), (most - 1, 1, 2), (most, 2, 3)]:
        assert is_right(kernel(layer, batch, blocks, seed), layer.expected(batch))


@pytest.mark.parametrize("setting", [*SPARSE[:4], *FULL[1:3]], ids=str)
def test_many_rounds(built, setting):
    """Rounds beyond four, when others begin to finish sparse products anew; warps in any order."""
    kernel, layer, (most, _) = built(setting), Layer(setting, 16 * 11), all_of(setting)
    expected = layer.expected(most)
    for blocks, seed in [(1, 4), (2, 5), (2, 6)]:
        assert is_right(kernel(layer, most, blocks, seed), expected)


@pytest.mark.parametrize("setting", [*SPARSE[:2], FULL[0]], ids=str)
def test_one_tile_and_idle_samples(built, setting):
    kernel, layer, (most, _) = built(setting), Layer(setting, 16, keep=0.02), all_of(setting)
    for batch in range(1, most + 1):
        assert is_right(kernel(layer, batch, 1, batch), layer.expected(batch))


@pytest.mark.parametrize("setting", [SPARSE[0], FULL[0]], ids=str)
def test_order_does_not_matter(built, setting):
    """When copies happen and which warps lag changes no bit."""
    kernel, layer, (most, _) = built(setting), Layer(setting, 48), all_of(setting)
    first = kernel(layer, most, 1, 0)
    assert all(torch.equal(kernel(layer, most, 1, seed), first) for seed in range(1, 9))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_launches_are_what_they_should_be(built, setting):
    kernel, layer, program = built(setting), Layer(setting, 16), setting.program
    if setting.stages:
        program = program._replace(stages=setting.stages)
    assert kernel.bytes_needed == shared_bytes(program, setting.inputs)
    assert kernel.threads == program.warps * 32
    with pytest.raises(Trouble, match="make_gate outside of shared memory"):
        kernel(layer, 1, 1, 0, shared=kernel.bytes_needed - 8)


def test_all_of_warp_is_emulated():
    warp, _ = kernel_text(PLACES)
    emulated = EMULATION.read_text("utf-8")
    declared = set(re.findall(r"__forceinline__ [\w ]+ (\w+)\(", warp))
    assert len(declared) > 20
    assert declared <= set(re.findall(r"^inline [\w ]+ (\w+)\(", emulated, re.MULTILINE))


# One thing broken, and how it shows: as other outputs or as what the emulation says.
FINISH = "finish(sums_at + (warp & 3) * 512, lane, y, outputs, biases, batch, parents);"
WRONG_SPARSE = {
    "sums given up early": (f"      {FINISH}\n      come(read, lane);",
                            f"      come(read, lane);\n      {FINISH}", None),
    "copies not awaited": ("await_copies<AHEAD - 1>()", "await_copies<AHEAD>()", None),
    "copied too early": ("AHEAD = STAGES - 1;", "AHEAD = STAGES;", None),
    "nibbles of the exchange": ("0xf0f0f0f0u : 0x0f0f0f0fu", "0xf0f0f0f0u : 0x0f0f0ff0u", None),
    "order of the shuffles": ("other = __shfl_xor_sync(~0u, own, 2)",
                              "other = __shfl_xor_sync(~0u, own, 1)", None),
    "places of the other tile": ("add_tile<true>(sums, two", "add_tile<false>(sums, two", None),
    "zeros not awaited": ("  __syncthreads();\n", "", None),
    "sums overwritten": ("if (round) await(read, round - 1);", "", None),
    "wrong sign": ("second = shifted(w, 13)", "second = shifted(w, 14)", None),
    "children mixed up": ("{p + q, m + n, p - q, m - n}", "{p + q, p - q, m + n, m - n}", None),
    "two weights in a place": (" | 0x44444444u", "", "two weights of row"),
    "samples that are not there": ("sample < batch ? load", "true ? load", "load outside of every"),
    "outputs that are not there": ("sample >= batch", "sample >= 8", "store outside of every"),
    "crooked rows": ("to = ring + row * 128", "to = ring + row * 120",
                     "copy of shared memory not aligned"),
    "sums not awaited": ("await(written, round);", "", "all threads wait"),
    "a gate for too many": ("make_gate(read, 4)", "make_gate(read, 5)", "all threads wait"),
    "nowhere": ("tiles = parents / 16", "tiles = *(volatile int*)8", "an address of nowhere"),
    "the ring filled too early": ("put == to + AHEAD * STAGE", "put == to + STAGE", None),
    "banks of odd rows": ("odd = even ^ 64", "odd = even", None),
    "kernels before": ("  await_kernels_before();\n", "", "before other kernels have ended"),
    "the ring turned too early": ("out_of == AHEAD * STAGE ? 0", "out_of == STAGE ? 0", None),
    "a lane elsewhere": ("      ring.leave_step();", "if (lane) __syncwarp();\n ring.leave_step();",
                         "where others"),
}  # fmt: skip


FINISH_TILE = "finish(sums, part, tile, lane, biases, y, batch, parents);"
WRONG_FULL = {
    "copies not awaited": ("await_copies<AHEAD - 1>()", "await_copies<AHEAD>()", None),
    "inputs not awaited": ("KEPT ? KEPT : 2;", "KEPT ? KEPT : 0;", None),
    "inputs dealt otherwise": ("eight ^ lane >> 3", "eight ^ lane >> 2 & 3", None),
    "kept inputs not awaited": ("if (KEPT) await_copies<AHEAD>()", "__syncwarp()", None),
    "kept inputs with others": ("  if (KEPT) end_of_copies();\n", "", None),
    "samples that are not there": ("there(lane / 4 < batch)", "there(true)",
                                   "copy outside of every"),
    "sums overwritten": ("if (round) await(read, round - 1);", "", None),
    "sums not awaited": ("await(written, round);", "", "all threads wait"),
    "sums given up early": (f"    {FINISH_TILE}\n    come(read, lane);",
                            f"    come(read, lane);\n    {FINISH_TILE}", None),
    "weights asked for elsewhere": ("INPUTS + warp * SLICE, 128)", "INPUTS - 64, 128)",
                                    "want outside of every array"),
    "a gate for too few": ("make_gate(written, WARPS)", "make_gate(written, WARPS - 1)",
                           "all threads wait"),
    "a gate for too many": ("make_gate(read, FINISHERS)", "make_gate(read, 5)",
                            "all threads wait"),
    "wrong sign": ("w6 = flipped(w2, bit2)", "w6 = flipped(now.w1, bit2)", None),
    "a copy of the tile before": ("if (more) next.make_w1();", "", None),
    "bits of the transform": ("bit = 8; bit < 32", "bit = 4; bit < 16", None),
    "outputs that are not there": ("sample >= batch", "sample >= 8", "store outside of every"),
    "kernels before": ("  await_kernels_before();\n", "", "before other kernels have ended"),
}  # fmt: skip


def _goes_wrong(kernel, layer, batch, seed, said):
    try:
        found = kernel(layer, batch, 1, seed)
    except Trouble as trouble:
        return said is not None and said in str(trouble)
    return said is None and not is_right(found, layer.expected(batch))


@pytest.mark.parametrize("what", WRONG_SPARSE)
def test_a_broken_kernel_of_sparse_products_shows(built, what):
    old, new, said = WRONG_SPARSE[what]
    setting = SPARSE[2 if "ring" in what else 0]  # in the first, each step has its own stage
    kernel, layer = built(setting, (old, new)), Layer(setting, 48)
    assert any(_goes_wrong(kernel, layer, 3, seed, said) for seed in range(8))


@pytest.mark.parametrize("what", WRONG_FULL)
def test_a_broken_kernel_of_full_products_shows(built, what):
    old, new, said = WRONG_FULL[what]
    setting = FULL[4 if "kept" in what else 0]
    kernel, layer = built(setting, (old, new)), Layer(setting, 48)
    assert any(_goes_wrong(kernel, layer, 6, seed, said) for seed in range(8))
