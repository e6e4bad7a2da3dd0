"""How many cores this process may keep busy: all of them, unless it has been told otherwise."""

from __future__ import annotations

import os

import torch

_most: int | None = None


def cores() -> int:
    """Return how many threads to start.

    >>> cores()
    2
    """
    return _most or os.cpu_count() or 1


def keep_to(count: int) -> None:
    """Leave the other cores to other processes, from now on.

    >>> keep_to(1)
    """
    global _most
    _most = count
    torch.set_num_threads(count)
