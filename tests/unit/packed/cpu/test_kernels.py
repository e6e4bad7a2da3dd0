import inspect
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fissile._common import llvm
from fissile._common.errors import FissileError
from fissile.packed import cpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": lambda v: torch.where(v < 0, 0.0, v),
    "gelu": lambda v: 0.5 * v * (1 + torch.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: (
        0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
    "silu": lambda v: v / (1 + torch.exp(-v)),
}
activations = st.sampled_from(sorted(ACTIVATIONS))
seeds, batches = st.integers(0, 2**32 - 1), st.integers(1, 9)
#: What is drawn is new every time, and named when a test fails; only the kernels, each of which has
#: to be compiled, are always the same: the dtype, and the children or the group, and the layout.
many = settings(deadline=None, max_examples=40)
OWNED = [(*one, i % 2 == 0) for i, one in enumerate(itertools.product(DTYPES, (2, 4, 8)))]
OWNED += [(torch.float32, 4, True), (torch.float16, 2, True), (torch.bfloat16, 8, False)]
BITMAP = [*itertools.product(DTYPES, (1, 4)), (torch.float32, 2), (torch.float16, 8)]


class Owned(NamedTuple):
    weight: Tensor
    planes: Tensor | None
    bias: Tensor | None
    alpha: int

    def dense(self, owner: Tensor) -> Tensor:
        """The weights of all children in double precision, [h * alpha, d]."""
        children = torch.arange(self.alpha)[:, None]
        split = torch.where(owner[:, None] == children, self.weight.double()[:, None], 0.0)
        return split.flatten(0, 1)


class Bitmap(NamedTuple):
    weight: Tensor
    live: Tensor
    start: Tensor
    bias: Tensor | None
    group: int

    def dense(self, stored: np.ndarray) -> Tensor:
        wide = torch.from_numpy(stored.repeat(self.group, 1))
        dense = torch.zeros(wide.shape, dtype=torch.float64)
        dense[wide] = self.weight.double()
        return dense


def normal(rng, *shape, dtype):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def packed_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))


def make_owned(rng, h, d, alpha, dtype, plane, biased, kept=0.7):
    """A layer as the contract has it, and the owners that went in."""
    bits = (alpha - 1).bit_length()
    weight, owner = (
        normal(rng, h, d, dtype=dtype),
        torch.from_numpy(rng.integers(alpha, size=(h, d))),
    )
    pruned = torch.from_numpy(rng.random((h, d)) >= kept)
    owner[pruned], weight[pruned], planes = 0, 0, None
    if plane:
        levels = np.arange(bits)[:, None, None]
        planes = packed_bits(owner.numpy()[None] >> levels & 1)
    else:
        code = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
        code.copy_(code & ~((1 << bits) - 1) | owner)
        code[pruned] = 0
    bias = normal(rng, h * alpha, dtype=dtype) if biased else None
    return Owned(weight, planes, bias, alpha), owner


def make_bitmap(rng, outputs, groups, group, dtype, biased, kept=0.4):
    """A layer as the contract has it, and which groups it stores; some rows store none."""
    stored = rng.random((outputs, groups)) < kept * (rng.random((outputs, 1)) < 0.8)
    counts = np.add.reduceat(stored, range(0, groups, 256), axis=1)
    start = (counts.cumsum() - counts.ravel()).reshape(counts.shape).astype(np.int32)
    bias = normal(rng, outputs, dtype=dtype) if biased else None
    weight = normal(rng, int(stored.sum()) * group, dtype=dtype)
    return Bitmap(weight, packed_bits(stored), torch.from_numpy(start), bias, group), stored


def check(y, x, dense, bias, activation, rounds=1):
    """Compare with double precision.

    However they are ordered, n terms are summed in float32 with an error of at most n + 1 roundings
    of the sum of their magnitudes. No activation is steeper than 1.13, and each takes a handful of
    roundings itself; the result is rounded to its dtype, of which float16 has a smallest step.
    """
    v, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        v, size = v + bias.double(), size + bias.double().abs()
    right = ACTIVATIONS[activation](v)
    terms = int((dense != 0).sum(1).max()) + 2
    bound = 1.13 * terms * 2**-24 * size + 16 * 2**-24 * size
    bound += torch.finfo(y.dtype).eps * right.abs() * rounds + 2**-24
    assert y.shape == right.shape
    assert y.is_contiguous()
    assert ((y.double() - right).abs() <= bound).all()


@many
@given(
    kernel=st.sampled_from(OWNED), seed=seeds, h=st.integers(1, 9), d=st.integers(1, 200),
    biased=st.booleans(), activation=activations, batch=batches,
)  # fmt: skip
def test_children_get_the_weights_they_own(kernel, seed, h, d, biased, activation, batch):
    rng, (dtype, slots, plane) = np.random.default_rng(seed), kernel
    alpha = int(rng.integers(slots // 2 + 1, slots + 1))
    layer, owner = make_owned(rng, h, d, alpha, dtype, plane, biased)
    x = normal(rng, batch, d, dtype=dtype)
    y = cpu.partitioned_linear(x, *layer, activation)
    assert y.dtype == dtype
    check(y, x, layer.dense(owner), layer.bias, activation)


@many
@given(
    kernel=st.sampled_from(BITMAP), seed=seeds, outputs=st.integers(1, 9),
    groups=st.integers(1, 300), biased=st.booleans(), activation=activations, batch=batches,
)  # fmt: skip
def test_stored_groups_meet_their_inputs(kernel, seed, outputs, groups, biased, activation, batch):
    rng, (dtype, group) = np.random.default_rng(seed), kernel
    layer, stored = make_bitmap(rng, outputs, groups, group, dtype, biased)
    x = normal(rng, batch, groups * group, dtype=dtype)
    y = cpu.masked_linear(x, *layer, activation)
    assert y.dtype == dtype
    check(y, x, layer.dense(stored), layer.bias, activation)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_layer_that_stores_nothing_is_its_bias(group):
    layer, _ = make_bitmap(np.random.default_rng(0), 5, 20, group, torch.float32, True, kept=0)
    x = torch.full((3, 20 * group), torch.nan)  # nothing may touch it
    assert not len(layer.weight)
    assert torch.equal(cpu.masked_linear(x, *layer, "none"), layer.bias.expand(3, 5))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_threads_share_a_large_layer(activation, monkeypatch):
    pieces = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            pieces.append(args)
            return super().submit(*args)

    rng = np.random.default_rng(2)
    first, owner = make_owned(rng, 601, 1999, 4, torch.float32, False, True)
    second, stored = make_bitmap(rng, 701, 601, 4, torch.float32, True)
    x = normal(rng, 3, 1999, dtype=torch.float32)
    with Pool(2) as pool:
        monkeypatch.setattr(cpu, "_pool", lambda: pool)
        hidden = cpu.partitioned_linear(x, *first, activation)
        y = cpu.masked_linear(hidden, *second, "none")
    assert len(pieces) == 2
    check(hidden, x, first.dense(owner), first.bias, activation)
    check(y, hidden, second.dense(stored), second.bias, "none")
    torch.set_num_threads(1)
    assert torch.equal(cpu.masked_linear(hidden, *second, "none"), y)
    assert torch.equal(cpu.partitioned_linear(x, *first, activation), hidden)
    assert len(pieces) == 2


@pytest.mark.usefixtures("two_threads")
def test_callers_in_several_threads_do_not_disturb_each_other():
    rng = np.random.default_rng(3)
    layer, _ = make_owned(rng, 300, 1000, 4, torch.float32, True, True)
    inputs = [normal(rng, 4, 1000, dtype=torch.float32) for _ in range(12)]
    right = [cpu.partitioned_linear(x, *layer, "relu") for x in inputs]
    with ThreadPoolExecutor(3) as callers:
        found = callers.map(lambda x: cpu.partitioned_linear(x, *layer, "relu"), inputs * 5)
        assert all(map(torch.equal, found, right * 5))


@pytest.mark.usefixtures("two_threads")
def test_nobody_writes_on_after_an_error():
    caller, begun, done = threading.current_thread(), threading.Event(), threading.Event()

    def kernel(lo, hi):
        if threading.current_thread() is caller:
            assert begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.1)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        cpu.spread([(kernel, ())], 2, 2 * cpu.LEAST)
    assert done.is_set()


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class FullPool(ThreadPoolExecutor):
    """Starts one thread; for the next the system has no room, as when a limit is reached."""

    def _adjust_thread_count(self):
        if self._threads:
            raise RuntimeError("can't start new thread")
        super()._adjust_thread_count()


@pytest.mark.usefixtures("three_threads")
def test_fewer_threads_than_wanted_do_it_all(monkeypatch):
    rows, begun = [], threading.Event()

    def kernel(lo, hi):
        if threading.current_thread().name.startswith("full"):
            begun.set()
        else:
            assert begun.wait(30)
        rows.extend(range(lo, hi))

    with FullPool(8, "full") as pool:
        monkeypatch.setattr(cpu, "_pool", lambda: pool)
        cpu.spread([(kernel, ())], 24, 3 * cpu.LEAST)
        assert sorted(rows) == [*range(24)]


@pytest.mark.usefixtures("three_threads")
def test_nobody_comes_later_upon_work_that_was_left_in_the_queue(monkeypatch):
    """Where no thread could be started, the work stays; a helper after an error may take it up."""
    caller, failed, again = threading.current_thread(), threading.Event(), threading.Event()
    ended = []

    def kernel(lo, hi):
        if threading.current_thread() is caller:
            assert again.wait(30)
        elif not failed.is_set():
            failed.set()
            raise ArithmeticError
        else:
            again.set()
            time.sleep(0.1)
            ended.append(lo)

    with FullPool(8) as pool:
        monkeypatch.setattr(cpu, "_pool", lambda: pool)
        with pytest.raises(ArithmeticError):
            cpu.spread([(kernel, ())], 3, 3 * cpu.LEAST)
        assert ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_threads_that_did_not_survive_a_fork_are_replaced():
    caller, helped = threading.current_thread(), threading.Event()

    def kernel(lo, hi):
        if threading.current_thread() is caller:
            assert helped.wait(10)
        helped.set()

    cpu.spread([(kernel, ())], 8, 2 * cpu.LEAST)
    time.sleep(0.05)  # so that the helper is idle, and the pool counts on it
    helped.clear()
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            cpu.spread([(kernel, ())], 8, 2 * cpu.LEAST)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kernel", ["activation", "masked", "partitioned"])
def test_kernels_on_disk_know_what_they_were_made_with(kernel):
    """Numba compares what a kernel closes over, and the kernel's own file alone."""
    made = {
        "activation": lambda: cpu._activation_step(torch.ones(1, 2), 1, "gelu")[0][0],
        "masked": lambda: cpu.masked_kernel(torch.float32, 4, False),
        "partitioned": lambda: cpu.partitioned_kernel(torch.float32, 4, False, False),
    }[kernel]()
    within = inspect.getclosurevars(made.py_func).nonlocals.values()
    files = Path(cpu.__file__).with_name("kernels.py"), Path(llvm.__file__)
    assert zlib.crc32(b"".join(path.read_bytes() for path in files)) in within


@pytest.mark.parametrize("plane", [False, True])
@pytest.mark.parametrize("alpha", [2, 4, 8])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_odd_inputs_reach_their_owners_alone(odd, alpha, plane):
    rng = np.random.default_rng(4)
    layer, owner = make_owned(rng, 6, 50, alpha, torch.float32, plane, False)
    x = normal(rng, 2, 50, dtype=torch.float32)
    x[1, 49] = x[1, 20] = odd
    weight = layer.weight[:, [20, 49]]
    owned = torch.zeros(6, alpha).scatter_add_(1, owner[:, [20, 49]], (weight != 0).float()) > 0
    y = cpu.partitioned_linear(x, *layer, "none").view(2, 6, alpha)
    assert owned.any()
    assert not owned.all()
    assert torch.isfinite(y[0]).all()
    assert torch.equal(torch.isfinite(y[1]), ~owned)
    if odd != odd:
        rectified = cpu.partitioned_linear(x, *layer, "relu").view(2, 6, alpha)
        assert torch.equal(rectified[1].isnan(), owned)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_odd_inputs_reach_stored_groups_alone(group):
    layer, stored = make_bitmap(np.random.default_rng(5), 40, 30, group, torch.float32, False)
    x = torch.ones(1, 30 * group)
    x[0, 7 * group] = torch.inf
    y = cpu.masked_linear(x, *layer, "none")[0]
    assert torch.equal(torch.isfinite(y), ~torch.from_numpy(stored[:, 7]))


def test_many_samples_come_in_turns():
    rng = np.random.default_rng(10)
    first, owner = make_owned(rng, 3, 4001, 4, torch.float32, False, True)
    second, stored = make_bitmap(rng, 3, 1000, 4, torch.float32, True)
    x, z = (normal(rng, 75, n, dtype=torch.float32) for n in (4001, 4000))
    check(cpu.partitioned_linear(x, *first, "none"), x, first.dense(owner), first.bias, "none")
    check(cpu.masked_linear(z, *second, "none"), z, second.dense(stored), second.bias, "none")


def test_a_sample_is_the_same_in_any_batch():
    rng = np.random.default_rng(6)
    first, _ = make_owned(rng, 7, 90, 4, torch.float32, False, True)
    second, _ = make_bitmap(rng, 9, 7, 4, torch.float32, True)
    x = normal(rng, 5, 90, dtype=torch.float32)

    def both(x):
        return cpu.masked_linear(cpu.partitioned_linear(x, *first, "silu"), *second, "none")

    assert torch.equal(both(x), torch.cat([both(one[None]) for one in x]))


def wrong_owned():
    layer, _ = make_owned(np.random.default_rng(7), 3, 20, 4, torch.float32, True, True)
    x = torch.ones(2, 20)
    yield "x has shape", (x[:, :19], *layer), "none"
    yield "contiguous", (torch.ones(20, 2).T, *layer), "none"
    yield "x must be", (x.half(), *layer), "none"
    yield "planes has shape", (x, *layer._replace(alpha=8)), "none"
    yield "bias has shape", (x, *layer._replace(bias=torch.ones(3))), "none"
    yield "2 to 8 children", (x, *layer._replace(alpha=9)), "none"
    yield "activation 'swish'", (x, *layer), "swish"
    yield "no weights of torch.float64", (x, *layer._replace(weight=layer.weight.double())), "none"
    yield "weight has shape", (x, *layer._replace(weight=layer.weight[0])), "none"


@pytest.mark.parametrize(("why", "given", "activation"), list(wrong_owned()))
def test_owners_that_do_not_fit_are_refused(why, given, activation):
    with pytest.raises(FissileError, match=why):
        cpu.partitioned_linear(*given, activation)


def wrong_bitmap():
    layer, _ = make_bitmap(np.random.default_rng(8), 5, 21, 4, torch.float32, True)
    yield "live has shape", layer._replace(live=layer.live[:, :1])
    yield "start has shape", layer._replace(start=layer.start[:2])
    yield "start must be", layer._replace(start=layer.start.long())
    yield "bias has shape", layer._replace(bias=torch.ones(4))
    yield "groups of 3", layer._replace(group=3)
    yield "groups of 8 do not divide 84", layer._replace(group=8)


@pytest.mark.parametrize(("why", "layer"), list(wrong_bitmap()))
def test_bitmaps_that_do_not_fit_are_refused(why, layer):
    with pytest.raises(FissileError, match=why):
        cpu.masked_linear(torch.ones(2, 84), *layer, "none")


def test_who_takes_what():
    assert cpu.can_run()
    assert cpu.takes(1, torch.float32, 2)
    assert cpu.takes(1, torch.bfloat16, None)
    assert not cpu.takes(1, torch.float64, None)
    assert cpu.takes(10**6, torch.float16, 2)
    assert [cpu.takes(512, torch.float32, None, group) for group in (4, 8)] == [False, True]
    assert not cpu.takes(1, torch.float32, 4)
    for bits in (1, None):  # there is a batch for which writing the weights out is worth it
        assert [cpu.takes(2**i, torch.bfloat16, bits) for i in (0, 20)] == [True, False]


def in_a_process(code, **settings):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_without_numba_plain_pytorch_is_left_and_processors_without_wide_vectors_come_to_the_same():
    code = """
import sys
sys.modules["numba"] = None
from fissile.packed import cpu
print(cpu.can_run(), "llvmlite" in sys.modules)
del sys.modules["numba"]
import numpy as np, torch, test_kernels as t
rng = np.random.default_rng(9)
x = {kind: t.normal(rng, 2, 77, dtype=kind) for kind in t.DTYPES}
x[torch.float16][0, 0] = 3e-6  # so small that half precision has another format for it
for kind, plane, alpha in zip(t.DTYPES, (True, False, True), (8, 4, 2)):
    layer, owner = t.make_owned(rng, 5, 77, alpha, kind, plane, True)
    layer.weight[0, :3] = torch.tensor([2.0**-20, -2.0**-22, 0.0]).to(kind) if plane else 0
    y = t.cpu.partitioned_linear(x[kind], *layer, "none")
    t.check(y, x[kind], layer.dense(owner), layer.bias, "none")
for kind, group in zip((*t.DTYPES, torch.float16), (1, 2, 4, 1)):
    layer, stored = t.make_bitmap(rng, 5, 70, group, kind, True)
    if kind == torch.float16:
        layer.weight[:2] = torch.tensor([2.0**-20, -3 * 2.0**-23])
    z = t.normal(rng, 2, 70 * group, dtype=kind)
    t.check(t.cpu.masked_linear(z, *layer, "none"), z, layer.dense(stored), layer.bias, "none")
y = t.cpu.masked_linear(torch.tensor([[1.0, 0.0]]).half(), torch.tensor([torch.inf] * 2).half(),
                        torch.tensor([[1], [2]]).byte(), torch.tensor([[0], [1]]).int(), None, 1,
                        "none")
print(y.tolist())
"""
    # Of x86 processors, the generic one has no wide vectors; others know the name, too.
    said = in_a_process(code, NUMBA_CPU_NAME="generic")
    assert said.splitlines() == ["False False", "[[inf, nan]]"]
