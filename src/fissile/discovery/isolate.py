"""Running foreign code so that nobody notices: no word, no warning, no random number used up."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["quietly", "reseed"]

_ALONE = threading.RLock()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Run foreign code without a word, a warning or a random number of the user's being used.

    All this belongs to the whole process, so one thread at a time.
    """
    with _ALONE, _silence(), _chance():
        yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _chance() -> Iterator[None]:
    """Lend random numbers that start anew, and give the user's own back."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            reseed()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def reseed() -> None:
    """Start all random numbers anew, so that code which skips layers by chance is predictable."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # torch.manual_seed would also seed devices not yet in use
        torch.cuda.manual_seed_all(0)
