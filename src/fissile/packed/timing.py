"""How long a packed layer takes, beside the layers one would use instead.

Rivals are timed in turns, so that whatever else the machine does hits all of them alike. On a GPU,
every call finds the caches cold; on a CPU, small layers stay in them, as they would in use.
"""

from __future__ import annotations

import math
import time
import timeit
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fissile._common.errors import FissileError, needs
from fissile.layers import SparseLinear
from fissile.packed.convert import packed_layer
from fissile.packed.format import Layout

#: What the others are compared with: the layer before the split, and after it, written out.
DENSE, EXPANDED = "dense", "expanded"

#: The least seconds of a single measurement: shorter calls are repeated within it.
_LEAST = 2e-4
#: The seconds after which one measurement of each rival is enough.
_LONG = 3.0
#: What may go wrong in making or calling a rival.
_REFUSALS = (FissileError, RuntimeError, NotImplementedError, MemoryError)


class Timing(NamedTuple):
    """Seconds that a call takes: the median of all measurements, and their quartiles.

    On a GPU, also the median of a CUDA graph that does the same: what the call takes without
    Python, as in a server; None where it cannot be captured.
    """

    median: float
    low: float
    high: float
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


def attempt(make: Callable[[], Rival]) -> Rival:
    """Return a rival, or one that says why it cannot be made."""
    try:
        return make()
    except _REFUSALS as error:
        return Rival(None, why=_first_line(error))


def dense(weight: Tensor, bias: Tensor | None) -> Rival:
    """Return PyTorch's linear layer."""
    read = weight.nbytes + (0 if bias is None else bias.nbytes)
    return Rival(lambda x: functional.linear(x, weight, bias), read, inputs=weight.shape[1])


def module(model: nn.Module) -> Rival:
    """Return a module as it is: a packed layer, or a whole network."""
    parts = [*model.parameters(), *model.buffers()]
    return Rival(model, sum(part.detach().nbytes for part in parts))


def layer_rivals(
    layer: SparseLinear, before: tuple[int, int] | None, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Rival]:
    """Return a layer as it was before the split (inputs, outputs), written out, and packed."""
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    bias = None if layer.bias is None else layer.bias.detach().to(**how)

    def packed(layout: Layout) -> Rival:
        return attempt(lambda: module(packed_layer(layer, dtype, layout).to(device)))

    narrow = Rival(None, why="the file does not say how wide it was")
    if before is not None:
        inputs, outputs = before
        weight = torch.randn(outputs, inputs, **how) / inputs**0.5
        narrow = dense(weight, None if bias is None else bias[:outputs])
    return {
        DENSE: narrow,
        EXPANDED: attempt(lambda: dense(layer.dense_weight().detach().to(**how), bias)),
        "inline": packed("inline"),
        "plane": packed("plane"),
    }


def race(
    rivals: Mapping[str, Rival], x: Tensor, *, seconds: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time rivals on one batch; return their times, and why the others have none."""
    why: dict[str, str] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    with torch.inference_mode():
        for name, rival in rivals.items():
            if rival.call is None:
                why[name] = rival.why
                continue
            call = partial(rival.call, x[..., : rival.inputs].contiguous())
            try:
                call()  # compiles what there is to compile
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                calls[name] = call
            except _REFUSALS as error:
                why[name] = _first_line(error)
        return (_on_gpu if x.is_cuda else _in_turns)(calls, seconds), why


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _in_turns(calls: Mapping[str, Callable[[], Tensor]], seconds: float) -> dict[str, Timing]:
    """Time calls round by round, for about ``seconds`` in all and at least one round."""
    begin = time.perf_counter()
    timers = [timeit.Timer(call) for call in calls.values()]
    loops = [math.ceil(_LEAST / timer.timeit(1)) for timer in timers]
    rounds: list[list[float]] = []
    while True:
        rounds.append([t.timeit(count) / count for t, count in zip(timers, loops, strict=True)])
        if time.perf_counter() - begin > (seconds if len(rounds) >= 3 else _LONG):
            quartiles = np.quantile(rounds, (0.5, 0.25, 0.75), axis=0).T.tolist()
            return {name: Timing(*times) for name, times in zip(calls, quartiles, strict=True)}


def _on_gpu(calls: Mapping[str, Callable[[], Tensor]], seconds: float) -> dict[str, Timing]:
    """Time calls with events and cold caches, as Triton's own benchmarks do."""
    needs("triton", "gpu")
    from triton.testing import do_bench

    each = 500 * seconds / max(len(calls), 1)  # milliseconds, half of it for the graphs
    timings = {}
    for name, call in calls.items():
        times = do_bench(call, warmup=each / 4, rep=each, quantiles=(0.5, 0.25, 0.75))
        timings[name] = Timing(*(t / 1000 for t in times))
        if (graph := _captured(call)) is not None:
            again = do_bench(graph.replay, warmup=each / 4, rep=each, quantiles=(0.5,))
            timings[name] = timings[name]._replace(replayed=again / 1000)
        del graph  # and the memory it holds
    return timings


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
