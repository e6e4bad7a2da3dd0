"""Large layers are cut into pieces for several threads; kernels hold no lock.

Threads of our own, since those of numba must not be entered from two threads at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache

import torch

__all__ = ["LEAST", "Step", "spread"]

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
    """Take every step, kernel(*args, lo, hi), for pieces that cover all rows.

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
    """Do what is to be done, unless it was cancelled.

    The promise is not the pool's own: that one is lost where no thread could be started, though the
    work stays in the queue, and another thread may come upon it.
    """
    if not promise.set_running_or_notify_cancel():
        return
    try:
        labour()
    except BaseException as error:
        promise.set_exception(error)
    else:
        promise.set_result(None)
