"""Where and on what a benchmark ran."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch


def machine(device="cpu"):
    """Name the processor, or the GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    with open("/proc/cpuinfo") as file:
        model = next((line for line in file if line.startswith("model name")), ": unknown")
    return f"{model.split(':')[1].strip()}, {os.cpu_count()} cores"


def commit():
    """Name the commit that is checked out; FISSILE_COMMIT says it for a copy without history."""
    if given := os.environ.get("FISSILE_COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def needs_gpu():
    """Stop where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU, and PyTorch for CUDA")


def made(device="cpu"):
    """Return what every results file says first: when, where and from what it was made, and how."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "commit": commit(),
        "torch": torch.__version__,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
