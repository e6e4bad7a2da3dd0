"""Settings for all tests."""

import os

# Two tests run side by side, and so little work needs one thread: more would wait for each other.
# Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is imported: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
