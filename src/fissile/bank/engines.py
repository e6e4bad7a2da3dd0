"""Choosing an engine for every stack, and running them until all networks are done."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from fissile.bank import graphics, plain, processor
from fissile.bank.record import Record
from fissile.bank.stack import Stack
from fissile.errors import FissileError

__all__ = ["ENGINES", "Record", "check", "run"]

_log = logging.getLogger("fissile")

ENGINES = ("auto", "plain")
Engine = Callable[[Stack, int, plain.OnEpochs, torch.device], None]


def check(engine: str) -> str:
    """Return the name of an engine if it is one."""
    if engine not in ENGINES:
        raise FissileError(f"unknown engine {engine!r}; use one of {', '.join(ENGINES)}")
    return engine


def run(stacks: list[Stack], until: int, device: torch.device, engine: str, record: Record) -> None:
    """Train all stacks up to an epoch, in place; an interruption leaves the list whole.

    The list may hold smaller stacks afterwards, where memory ran out or Ctrl-C cut one in two.
    """
    left = [stack for stack in stacks if stack.epoch < until]
    auto, kind = engine == "auto", device.type
    fast = [stack for stack in left if auto and kind == "cpu" and processor.can(stack)]
    if fast:
        _run_pool(stacks, fast, until, record)
    others = [stack for stack in left if all(stack is not one for one in fast)]
    while others:
        stack = others.pop(0)
        on_chip = auto and kind == "cuda" and graphics.can(stack)
        how = graphics.run if on_chip else plain.run
        others = _run_one(stacks, stack, until, device, record, how) + others


def _run_pool(stacks: list[Stack], fast: list[Stack], until: int, record: Record) -> None:
    parts: list[Stack] = []
    try:
        processor.run(fast, until, record, parts)
    finally:
        _replace(stacks, fast, parts)


def _run_one(
    stacks: list[Stack], stack: Stack, until: int, device: torch.device, record: Record, how: Engine
) -> list[Stack]:
    """Train one stack; if memory runs out, return its halves to be trained instead."""
    steps = -(-len(stack.data[0].x) // stack.batch) * len(stack)

    def on_epochs(accuracy: Tensor, loss: Tensor) -> None:
        done = steps * accuracy.shape[1]
        record(stack.members.tolist(), accuracy.tolist(), loss.tolist(), done)

    try:
        how(stack, until, on_epochs, device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        halves = _halves(stack, error)
        _replace(stacks, [stack], halves)
        return halves
    return []


def _replace(stacks: list[Stack], old: list[Stack], new: list[Stack]) -> None:
    stacks[:] = [stack for stack in stacks if all(stack is not one for one in old)] + new


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text


def _halves(stack: Stack, error: BaseException) -> list[Stack]:
    if len(stack) == 1:
        raise FissileError(
            "not even one network of this bank fits into memory: use a smaller batch or network, "
            f"or a device with more ({error})"
        ) from None
    middle = len(stack) // 2
    _log.warning(
        "out of memory with %d networks at once: going on with %d and %d",
        len(stack), middle, len(stack) - middle,
    )  # fmt: skip
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    rows = torch.arange(len(stack))
    return [stack.select(rows[:middle]), stack.select(rows[middle:])]
