"""Settings for all tests."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is imported: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
