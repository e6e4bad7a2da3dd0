"""Choosing an engine for every stack, and running them: in turn, in parts, until all are done."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from fissile.bank import plain
from fissile.bank.stack import Stack
from fissile.errors import FissileError

__all__ = ["check", "run"]

_log = logging.getLogger("fissile")

#: Told the numbers of some networks, their accuracy and loss after an epoch, and its steps.
Record = Callable[[Tensor, Tensor, Tensor, int], None]
_ENGINES = ("auto", "plain")


def check(engine: str) -> str:
    """Return the name of an engine if it is one."""
    if engine not in _ENGINES:
        raise FissileError(f"unknown engine {engine!r}; use one of {', '.join(_ENGINES)}")
    return engine


def run(
    stacks: list[Stack], until: int, device: torch.device, engine: str, record: Record
) -> list[Stack]:
    """Train all stacks up to an epoch; return them, some perhaps in smaller parts."""
    done: list[Stack] = []
    waiting = list(stacks)
    try:
        while waiting:
            stack = waiting.pop(0)
            try:
                _run_plain(stack, until, device, record)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                waiting = [*_halves(stack, error), *waiting]
                continue
            done.append(stack)
    except BaseException:
        stacks[:] = [*done, stack, *waiting]  # what an interruption leaves behind is whole
        raise
    return done


def _run_plain(stack: Stack, until: int, device: torch.device, record: Record) -> None:
    samples = len(stack.data[0].x)
    steps = -(-samples // stack.batch) * len(stack)
    plain.run(
        stack, until, lambda accuracy, loss: record(stack.members, accuracy, loss, steps), device
    )


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
