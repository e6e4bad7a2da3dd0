"""Settings for all tests."""

import os

# Two tests run side by side, and so little work needs one thread: more would wait for each other.
# Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is imported: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["plain", "kernels"])
def way(request, monkeypatch):
    """Let packed layers run in plain PyTorch, and in the kernels where there are some."""
    from fissile.packed import run

    if request.param == "plain":
        monkeypatch.setattr(run, "_kernels", lambda kind: None)
    else:
        cpu = pytest.importorskip("fissile.packed.cpu", exc_type=ImportError)
        if not cpu.can_run():
            pytest.skip("the kernels do not run here")
    return request.param
