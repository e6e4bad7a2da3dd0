"""Where and on what a benchmark ran."""

import os
import subprocess

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
