"""Ctrl-C that waits for the end of a step: a signal becomes an event that engines look at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["patient"]


@contextmanager
def patient() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event while the block runs, however often it is pressed.

    >>> with patient() as stop:
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
