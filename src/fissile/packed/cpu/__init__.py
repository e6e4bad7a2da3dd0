"""Packed layers on a processor: the wide network at the memory traffic of the narrow one.

Every weight is read once, and vector instructions add it to the child that owns it. Large layers
are cut into pieces for several threads. Nothing is compiled before the first call, and compiled
code is kept on disk.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from threading import local

import torch
from torch import Tensor

from fissile._common.errors import FissileError, needs
from fissile.packed.bits import owner_bits

#: The activations by their number in the kernels; those from gelu on have a kernel of their own.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
#: Up to how many samples a kernel is used rather than writing the weights out for a dense product:
#: of a partitioned and of a masked layer, as timed on two cores up to 2048 samples. In float16 the
#: kernels took at most 0.55 times as long throughout; PyTorch is best at bfloat16.
MOST_SAMPLES = {
    torch.float32: (2048, 256),
    torch.float16: (sys.maxsize, sys.maxsize),
    torch.bfloat16: (128, 64),
}


@cache
def can_run() -> bool:
    """Return whether numba is installed and compiles; if not, plain PyTorch serves."""
    try:
        x = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        live, start = x.to(torch.uint8), x.to(torch.int32) - 1
        result = masked_linear(x, x[0], live, start, None, 1, "none")
    except Exception:  # whatever keeps numba from compiling, plain PyTorch does the work
        return False
    return bool(result == 1)


def takes(
    batch: int, dtype: torch.dtype, bits: int | None, group: int = 1, planes: bool = False
) -> bool:
    """Return whether a kernel is faster than writing the weights out for a dense product.

    A masked layer has no ``bits`` of owners but a group.
    """
    partitioned, masked = MOST_SAMPLES.get(dtype, (0, 0))
    if bits is None:  # in large groups there is less to search for
        return batch <= masked * (4 if group == 8 else 1)
    return batch <= partitioned and 1 <= bits <= 3


def partitioned_linear(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int,
    activation: str,
) -> Tensor:  # fmt: skip
    """Compute the children of a partitioned layer for a matrix of samples."""
    check_partitioned(x, weight, planes, bias, alpha, activation)
    x, bias = x.float(), None if bias is None else bias.float()
    (h, d), batch = weight.shape, len(x)
    y = x.new_empty(batch, h * alpha)
    kernel = partitioned_kernel(weight.dtype, alpha, planes is not None, batch > 1)
    addresses = map(_address, (weight, planes, bias, x, y))
    args = (*addresses, h, d, batch, alpha, int(activation == "relu"))
    spread([(kernel, args), *_activation_step(y, alpha, activation)], h, h * d * batch)
    return y.to(weight.dtype)


def masked_linear(
    x: Tensor, weight: Tensor, live: Tensor, start: Tensor, bias: Tensor | None, group: int,
    activation: str,
) -> Tensor:  # fmt: skip
    """Compute a masked layer, of which only the groups that exist are stored, for a matrix."""
    check_masked(x.shape[-1], weight, live, start, bias, group, activation)
    _check("x", x, (x.shape[0], x.shape[-1]), weight.dtype)
    x, bias = x.float(), None if bias is None else bias.float()
    outputs, (batch, n) = len(live), x.shape
    y = x.new_empty(batch, outputs)
    kernel = masked_kernel(weight.dtype, group, batch > 1)
    addresses = map(_address, (weight, live, start, bias, x, y))
    args = (*addresses, outputs, n, batch, int(activation == "relu"))
    steps = [(kernel, args), *_activation_step(y, 1, activation)]
    spread(steps, outputs, len(weight) * batch)
    return y.to(weight.dtype)


def _activation_step(y: Tensor, each: int, activation: str) -> list[Step]:
    """Return the step of an activation; those that only compare are part of the kernels."""
    if activation in ("none", "relu"):
        return []
    from fissile.packed.cpu.kernels import activate

    batch, outputs = y.shape
    return [(activate, (y.data_ptr(), outputs, batch, each, ACTIVATIONS[activation]))]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def partitioned_kernel(
    dtype: torch.dtype, alpha: int, plane: bool, several: bool
) -> Callable[..., None]:
    """Return the kernel of a partitioned layer, for one sample or for several."""
    needs("numba", "bank")
    from fissile.packed.cpu.kernels import partitioned_rows

    slots = 1 << owner_bits(alpha)
    # As many sums as fit into registers.
    tile = (2 if slots == 8 else 4) if several else 1
    return partitioned_rows(KINDS[dtype], slots, tile, plane)


@cache
def masked_kernel(dtype: torch.dtype, group: int, several: bool) -> Callable[..., None]:
    """Return the kernel of a masked layer, for one sample or for several."""
    needs("numba", "bank")
    from fissile.packed.cpu.kernels import masked_rows

    return masked_rows(KINDS[dtype], group, 4 if several else 1)


def check_partitioned(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int, act: str
) -> None:
    """Refuse what does not fit together: compiled code would read beyond a tensor's end."""
    if not 2 <= alpha <= 8:
        raise FissileError(f"kernels deal with 2 to 8 children, not {alpha}")
    if weight.dim() != 2:
        raise FissileError(f"weight has shape {tuple(weight.shape)}, not [parents, inputs]")
    h, d = weight.shape
    dtype = _check_kind(weight, act)
    _check("x", x, (x.shape[0], d), dtype)
    _check("weight", weight, (h, d), dtype)
    _check("planes", planes, (owner_bits(alpha), h, (d + 7) // 8), torch.uint8)
    _check("bias", bias, (h * alpha,), dtype)


def check_masked(
    n: int, weight: Tensor, live: Tensor, start: Tensor, bias: Tensor | None, group: int, act: str
) -> None:
    """Refuse what does not fit together, as for a partitioned layer."""
    if group not in (1, 2, 4, 8) or n % group or not n:
        raise FissileError(f"groups of {group} do not divide {n} inputs; give 1, 2, 4 or 8")
    outputs, groups = live.shape[0], n // group
    dtype = _check_kind(weight, act)
    _check("weight", weight, (weight.numel(),), dtype)
    _check("live", live, (outputs, (groups + 7) // 8), torch.uint8)
    _check("start", start, (outputs, (groups + 255) // 256), torch.int32)
    _check("bias", bias, (outputs,), dtype)


def _check_kind(weight: Tensor, act: str) -> torch.dtype:
    if act not in ACTIVATIONS:
        raise FissileError(f"activation {act!r} is none of {', '.join(ACTIVATIONS)}")
    if weight.dtype not in KINDS:
        kinds = ", ".join(KINDS.values())
        raise FissileError(f"the kernels know no weights of {weight.dtype}; use one of {kinds}")
    return weight.dtype


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        return
    if tensor.shape != shape:
        raise FissileError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise FissileError(f"{name} must be contiguous, {dtype} and on the CPU")


# --- few samples through a small block

#: Samples of a batch that is still few.
_FEW = 16


def block_for_few(
    weight1: Tensor, planes: Tensor | None, bias1: Tensor | None, alpha: int, activation: str,
    weight2: Tensor, live: Tensor, start: Tensor, bias2: Tensor | None, group: int,
) -> tuple[Callable[[Tensor, int], Tensor], int] | None:  # fmt: skip
    """Return a call for contiguous float32 rows, and how many it takes; None if none pays.

    It reads the memory in which the tensors lie now, and keeps it alive.
    """
    (h, d), outputs, n = weight1.shape, live.shape[0], alpha * weight1.shape[0]
    most = min(_FEW, (2 * LEAST - 1) // max(h * d, weight2.numel(), 1))
    if weight1.dtype is not torch.float32 or weight2.dtype is not torch.float32 or most < 1:
        return None
    check_partitioned(weight1.new_empty(1, d), weight1, planes, bias1, alpha, activation)
    check_masked(n, weight2, live, start, bias2, group, "none")
    plane = planes is not None
    firsts = [partitioned_kernel(torch.float32, alpha, plane, s) for s in (False, True)]
    seconds = [masked_kernel(torch.float32, group, several) for several in (False, True)]
    tensors = weight1, planes, bias1, weight2, live, start, bias2
    addresses = list(map(_address, tensors))
    first_at, second_at = addresses[:3], addresses[3:]
    steps = _activation_step(weight1.new_empty(1, n), alpha, activation)
    act, relu = ACTIVATIONS[activation], int(activation == "relu")
    held = [t.untyped_storage() for t in tensors if t is not None]
    mine = local()  # room for what is between the layers, in each thread its own

    def call(x: Tensor, rows: int, _: object = held) -> Tensor:
        # As x is: the kernels write float32, whatever is the default elsewhere.
        several, y = rows > 1, x.new_empty((*x.shape[:-1], outputs))
        if not hasattr(mine, "hidden"):
            mine.hidden = x.new_empty(most * n)
        between = mine.hidden.data_ptr()
        firsts[several](*first_at, x.data_ptr(), between, h, d, rows, alpha, relu, 0, h)
        for activate, _ in steps:
            activate(between, n, rows, alpha, act, 0, h)
        seconds[several](*second_at, between, y.data_ptr(), outputs, n, rows, 0, 0, outputs)
        return y

    return call, most


# --- threads of our own: those of numba must not be entered from two threads at once

#: A kernel and all it is called with, but for the first row and the end.
Step = tuple[Callable[..., None], tuple[int, ...]]

#: Weights times samples that are worth a thread: fewer take less time than waking one up.
LEAST = 1 << 19
#: Pieces per thread, so that one that is held up leaves its share to the others.
PIECES = 4


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "fissile-pack")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def spread(steps: Sequence[Step], rows: int, work: int) -> None:
    """Call every step, kernel(*args, lo, hi), for pieces that cover all rows.

    There are as many threads as torch would use, if there is enough work for them.
    """
    threads = min(torch.get_num_threads(), work // LEAST, rows) if work >= 2 * LEAST else 1
    if threads < 2:
        for kernel, args in steps:
            kernel(*args, 0, rows)
        return
    size = -(-rows // (threads * PIECES))
    pieces = deque(range(0, rows, size))

    def labour() -> None:
        while pieces:
            try:
                lo = pieces.popleft()
            except IndexError:  # another thread was faster
                return
            for kernel, args in steps:
                kernel(*args, lo, min(lo + size, rows))

    helpers: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no more threads are to be had: fewer do it all
            for _ in range(threads - 1):
                helpers.append(Future())
                _pool().submit(_fulfil, helpers[-1], labour)
        labour()
    finally:
        # Whatever happens, no helper may go on writing to memory that is about to be freed.
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


def _fulfil(promise: Future[None], labour: Callable[[], None]) -> None:
    """Do the work unless it was cancelled, and keep its error."""
    # The promise is not the pool's own: that one is lost where no thread could be started, though
    # the work stays in the queue, and another thread may come upon it.
    if not promise.set_running_or_notify_cancel():
        return
    try:
        labour()
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)
