"""Processes that compute batches side by side: a GPU is kept busier by several than by one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait

from fissile._common.cores import keep_to
from fissile.lab.trial import Images, Work

__all__ = ["default_jobs", "pool"]


def default_jobs(device: str, works: Sequence[Work] = (), cores: int | None = None) -> int:
    """Return how many processes suit a device, beside so many cores; by default this machine's.

    On a GPU small networks wait for launches, compilations and measures, and one process leaves
    the chip idle; on a processor a bank takes all cores by itself, and convolutional networks fill
    a GPU from one process, several at once.
    """
    if any(isinstance(getattr(work, "task", None), Images) for work in works):
        return 1
    cores = os.cpu_count() or 1 if cores is None else cores
    return max(1, min(8, cores // 2)) if device.startswith("cuda") else 1


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Keep processes for batches; whatever ends this process ends them too.

    >>> with pool(4) as executor:
    ...     run(works, store, executor=executor, in_flight=4)
    """
    executor = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would not survive CUDA
        initializer=_begin,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()  # nobody waits for a batch whose run has ended
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """Prepare a process: its share of the cores, and an end with its parent's."""
    keep_to(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # it was killed and could not say goodbye
