"""Who made a result: the version, the commit, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import fissile
from fissile._common.cores import cores


@dataclass(frozen=True)
class Provenance:
    """Who made a result.

    >>> Provenance.here("cpu").version
    '0.1.0'
    """

    version: str
    commit: str
    torch: str
    device: str
    python: str

    @classmethod
    def here(cls, device: str) -> Provenance:
        """Describe this installation on this machine; what cannot be found out stays empty."""
        python = platform.python_version()
        return cls(fissile.__version__, _commit(), str(torch.__version__), _name(device), python)


def _commit() -> str:
    """Return the commit of the source tree, if this is one, marked if files were changed.

    A tree that was copied somewhere without its history, or beside another one, has it in
    ``FISSILE_COMMIT``.
    """
    root = Path(fissile.__file__).resolve().parents[2]
    if told := os.environ.get("FISSILE_COMMIT"):
        return told
    if not (root / ".git").exists():
        return ""
    git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    asked = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _name(device: str) -> str:
    try:
        kind = torch.device(device).type
        if kind == "cuda":
            return torch.cuda.get_device_name(device)
    except (AssertionError, RuntimeError):  # not on this machine: what it was called must do
        return device
    return f"{_processor()}, {cores()} cores" if kind == "cpu" else device


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"
