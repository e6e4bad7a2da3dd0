"""Choosing an engine for every stack, and running them until all networks are done."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile.bank import cpu, gpu, torch_engine
from fissile.bank.stack import Stack

__all__ = ["ENGINES", "Record", "check", "deferred_sigint", "run"]

_log = logging.getLogger("fissile")

ENGINES = ("auto", "plain")
Engine = Callable[[Stack, int, torch_engine.OnEpochs, torch.device], None]


class Record(Protocol):
    """Takes the curves of some networks over the epochs they have just finished."""

    def __call__(
        self,
        members: Sequence[int],
        accuracy: Sequence[Sequence[float]],
        loss: Sequence[Sequence[float]],
        steps: int,
    ) -> None:
        """Add one row of each curve per network; ``steps`` counts the steps of all together."""


@contextmanager
def deferred_sigint() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event while the block runs, however often it is pressed.

    >>> with deferred_sigint() as stop:
    ...     while not stop.is_set():
    ...         step()
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are the main thread's alone
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def check(engine: str) -> str:
    """Return the name of an engine if it is one."""
    if engine not in ENGINES:
        raise FissileError(f"unknown engine {engine!r}; use one of {', '.join(ENGINES)}")
    return engine


def run(
    stacks: list[Stack],
    until: int,
    device: torch.device,
    engine: str,
    record: Record,
    stop: threading.Event,
) -> None:
    """Train all stacks up to an epoch, in place; an interruption leaves the list whole.

    The list may hold smaller stacks afterwards, where memory ran out or Ctrl-C cut one in two.
    """
    auto, kind = engine == "auto", device.type
    if auto and kind == "cpu":
        fast = [stack for stack in stacks if stack.epoch < until and cpu.can(stack)]
        _run_pool(stacks, fast, until, record, stop)
    if auto and kind == "cuda":
        fast = [stack for stack in stacks if stack.epoch < until and gpu.can(stack)]
        for group in gpu.together(fast):
            _run_group(group, until, device, record, stop)
    others = [stack for stack in stacks if stack.epoch < until]
    while others:
        stack = others.pop(0)
        on_chip = auto and kind == "cuda" and gpu.can(stack)
        how = partial(gpu.run if on_chip else torch_engine.run, stop=stop)
        others = _run_one(stacks, stack, until, device, record, how) + others


def _run_pool(
    stacks: list[Stack], fast: list[Stack], until: int, record: Record, stop: threading.Event
) -> None:
    """Train stacks with the compiled kernel; what memory does not suffice for is left undone."""
    parts = list(fast)
    try:
        if fast:
            cpu.run(fast, until, record, parts, stop)
    except MemoryError as error:
        _log.warning("out of memory, going on in smaller parts (%s)", error)
    finally:
        _replace(stacks, fast, parts)


def _run_group(
    group: list[Stack], until: int, device: torch.device, record: Record, stop: threading.Event
) -> None:
    """Train stacks in common launches; what memory does not suffice for is left undone."""
    try:
        gpu.run_together(group, until, partial(_pass_on, record), device, stop)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        _log.warning("out of memory, going on in smaller parts (%s)", str(error).splitlines()[0])


def _pass_on(record: Record, stack: Stack, accuracy: Tensor, loss: Tensor) -> None:
    """Record the curves of a stack and count the steps of all its networks."""
    steps = -(-len(stack.data[0].x) // stack.batch) * len(stack) * accuracy.shape[1]
    record(stack.members.tolist(), accuracy.tolist(), loss.tolist(), steps)


def _run_one(
    stacks: list[Stack], stack: Stack, until: int, device: torch.device, record: Record, how: Engine
) -> list[Stack]:
    """Train one stack; if memory runs out, return its halves to be trained instead."""
    failed = ""
    try:
        how(stack, until, partial(_pass_on, record, stack), device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        failed = str(error) or type(error).__name__
    if not failed:
        return []
    # Outside the except block, whose traceback would keep all that the engine had allocated.
    halves = _halves(stack, failed)
    _replace(stacks, [stack], halves)
    return halves


def _replace(stacks: list[Stack], old: list[Stack], new: list[Stack]) -> None:
    stacks[:] = [stack for stack in stacks if all(stack is not one for one in old)] + new


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text


def _halves(stack: Stack, error: str) -> list[Stack]:
    stack.to(torch.device("cpu"))
    if len(stack) == 1:
        raise FissileError(
            "not even one network of this bank fits into memory: use a smaller batch or network, "
            f"or a device with more ({error})"
        )
    middle = len(stack) // 2
    _log.warning(
        "out of memory with %d networks at once: going on with %d and %d",
        len(stack), middle, len(stack) - middle,
    )  # fmt: skip
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    rows = torch.arange(len(stack))
    return [stack.select(rows[:middle]), stack.select(rows[middle:])]
