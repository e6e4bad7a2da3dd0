"""Settings for all tests."""

import contextlib
import gc
import os
import signal

# Tests run side by side, and so little work needs one thread: more would wait for each other.
# Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# transformers imports JAX where it is installed, and jaxlib aborts when Ray was imported before it.
with contextlib.suppress(ImportError):
    import jax  # noqa: F401

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is imported: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(hypothesis.strategies.none())
def _given_nothing(nothing):
    pass


def pytest_collection_finish():
    """Let garbage collectors pass over what is imported: it stays, and takes them long."""
    # At its first test Hypothesis looks for who holds its random numbers; now it still finds them.
    _given_nothing()
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["plain", "kernels"])
def way(request, monkeypatch):
    """Let packed layers run in plain PyTorch, and in the kernels where there are some."""

    from fissile.packed import dispatch

    if request.param == "plain":
        monkeypatch.setattr(dispatch, "kernels_for", lambda device: None)
    else:
        cpu = pytest.importorskip("fissile.packed.cpu", exc_type=ImportError)
        if not cpu.can_run():
            pytest.skip("the kernels do not run here")
    return request.param
