"""How long a packed layer takes, beside the layers one would use instead.

Rivals are timed in turns, so that whatever else the machine does hits all of them alike. On a GPU,
every call finds the caches cold; on a CPU, small layers stay in them, as they would in use.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile._common.errors import FissileError, needs
from fissile.layers import SparseLinear
from fissile.packed.convert import packed_layer
from fissile.packed.format import Layout

__all__ = [
    "DENSE",
    "EXPANDED",
    "Rival",
    "Timing",
    "attempt",
    "dense",
    "layer_rivals",
    "module",
    "race",
    "semi_structured",
]

#: What the others are compared with: the layer before the split, and after it, written out.
DENSE, EXPANDED = "dense", "expanded"

#: The least seconds of a single measurement: shorter calls are repeated within it.
_LEAST = 2e-4
#: The seconds after which one more measurement of each rival is enough.
_LONG = 3.0


class Timing(NamedTuple):
    """Seconds that a call takes: the median of all measurements, their quartiles, the least.

    On a GPU, also the median of a CUDA graph that does the same: what the call takes without
    Python, as in a server; None where it cannot be captured.
    """

    median: float
    low: float
    high: float
    least: float
    replayed: float | None = None


class Rival(NamedTuple):
    """Something to time: a call that takes a batch, and the bytes of weights it has to read.

    One that cannot take part has no call, and says why; one that was narrower before takes only
    the first of the batch's columns.
    """

    call: Callable[[Tensor], Tensor] | None
    bytes: int = 0
    why: str = ""
    inputs: int | None = None


# --- rivals


def attempt(make: Callable[[], Rival]) -> Rival:
    """Return a rival, or one that says why it cannot be made.

    >>> attempt(lambda: semi_structured(weight, None)).why
    'for float16 and bfloat16 on a GPU only'
    """
    try:
        return make()
    except (FissileError, RuntimeError, NotImplementedError, MemoryError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Rival(None, why=lines[0])


def dense(weight: Tensor, bias: Tensor | None) -> Rival:
    """Return PyTorch's linear layer."""
    read = _bytes(weight, bias)
    return Rival(lambda x: functional.linear(x, weight, bias), read, inputs=weight.shape[1])


def semi_structured(weight: Tensor, bias: Tensor | None) -> Rival:
    """Return PyTorch's product with a 2:4 weight, for GPUs with sparse tensor cores."""
    if not weight.is_cuda or weight.dtype is torch.float32:
        raise FissileError("for float16 and bfloat16 on a GPU only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        sparse = torch.sparse.to_sparse_semi_structured(weight)
    read = _bytes(*(getattr(sparse, name, None) for name in ("packed", "meta")), bias)
    return Rival(lambda x: functional.linear(x, sparse, bias), read)


def module(one: nn.Module) -> Rival:
    """Return a module as it is: a packed layer, or a whole network."""
    parts = [*one.parameters(), *one.buffers()]
    return Rival(one, _bytes(*(part.detach() for part in parts)))


def layer_rivals(
    layer: SparseLinear,
    narrow: tuple[int, int] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Rival]:
    """Return an expanded layer as it was before the split, written out, and packed.

    Args:
        layer: the expanded layer.
        narrow: the inputs and outputs it had before; None if nobody knows.
        dtype: of all of them.
        device: where they are.
    """
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    bias = None if layer.bias is None else layer.bias.detach().to(**how)

    def before() -> Rival:
        if narrow is None:
            raise FissileError("the file does not say how wide it was")
        inputs, outputs = narrow
        shift = None if bias is None else bias[:outputs]
        return dense(torch.randn(outputs, inputs, **how) / inputs**0.5, shift)

    def packed(layout: Layout) -> Rival:
        return module(packed_layer(layer, dtype, layout).to(device))

    return {
        DENSE: attempt(before),
        EXPANDED: attempt(lambda: dense(layer.dense_weight().detach().to(**how), bias)),
        "inline": attempt(lambda: packed("inline")),
        "plane": attempt(lambda: packed("plane")),
    }


# --- the clock


def race(
    rivals: Mapping[str, Rival], x: Tensor, *, seconds: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time rivals on one batch; return their times, and why the others have none.

    >>> race({"dense": dense(weight, bias)}, x, seconds=0.5)
    ({'dense': Timing(median=0.0031, low=0.0030, high=0.0032, least=0.0029)}, {})
    """
    why = {name: rival.why for name, rival in rivals.items() if rival.call is None}
    calls: dict[str, Callable[[], Tensor]] = {}
    with torch.inference_mode():
        for name, rival in rivals.items():
            if rival.call is None:
                continue
            call = _bound(rival.call, x[..., : rival.inputs].contiguous())
            if refused := _first(call, x.device):
                why[name] = refused
            else:
                calls[name] = call
        clock = _on_gpu if x.is_cuda else _in_turns
        return clock(calls, seconds), why


def _bound(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: call(x)


def _first(call: Callable[[], Tensor], device: torch.device) -> str:
    """Call once, which compiles what there is to compile, and say what went wrong if it did."""
    try:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (FissileError, RuntimeError, NotImplementedError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _in_turns(calls: Mapping[str, Callable[[], Tensor]], seconds: float) -> dict[str, Timing]:
    """Time calls round by round, for about ``seconds`` in all and at least one round."""
    begin, rounds = time.perf_counter(), 0
    first = {name: _once(call, 1) for name, call in calls.items()}
    loops = {name: math.ceil(_LEAST / taken) for name, taken in first.items()}
    times = {name: [taken] if taken > _LEAST else [] for name, taken in first.items()}
    while True:
        for name, call in calls.items():
            times[name].append(_once(call, loops[name]))
        rounds, spent = rounds + 1, time.perf_counter() - begin
        if spent > (seconds if rounds >= 3 else _LONG):
            return {name: _timing(found) for name, found in times.items()}


def _once(call: Callable[[], Tensor], loops: int) -> float:
    begin = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - begin) / loops


def _timing(times: list[float]) -> Timing:
    if len(times) == 1:
        times = 2 * times
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, low, high, min(times))


def _on_gpu(calls: Mapping[str, Callable[[], Tensor]], seconds: float) -> dict[str, Timing]:
    """Time calls with events and cold caches, as Triton's own benchmarks do."""
    needs("triton", "gpu")
    from triton.testing import do_bench

    each = 500 * seconds / max(len(calls), 1)  # milliseconds, half of it for the graphs
    found = {}
    for name, call in calls.items():
        times = do_bench(call, warmup=each / 4, rep=each, quantiles=(0.5, 0.25, 0.75, 0.0))
        median, low, high, least = (t / 1000 for t in times)
        found[name] = Timing(median, low, high, least)
        if (graph := _captured(call)) is not None:
            again = do_bench(graph.replay, warmup=each / 4, rep=each, quantiles=(0.5,))
            found[name] = found[name]._replace(replayed=again / 1000)
        del graph  # and the memory it holds
    return found


def _captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph | None:
    """Return a CUDA graph of a call; None if it waits for the GPU, which a graph cannot."""
    # Known beforehand: a capture that breaks off leaves PyTorch without random numbers.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
