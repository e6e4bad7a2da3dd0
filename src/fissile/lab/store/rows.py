"""The rows of the tables: finished trials with their provenance, and runs."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fissile
from fissile._common.cores import cores
from fissile.lab.compute import Outcome
from fissile.lab.store.database import undamaged

__all__ = [
    "Provenance",
    "Row",
    "Run",
    "Time",
    "row_of",
    "row_values",
    "run_of",
    "run_values",
    "time_of",
]


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Row:
    """One finished trial."""

    key: str
    kind: str
    spec: dict[str, Any]
    measures: dict[str, float]
    arrays: dict[str, NDArray[Any]]
    provenance: Provenance
    seconds: float
    finished: str


@dataclass(frozen=True)
class Time:
    """How long one finished trial took: its share of its batch, by cost."""

    kind: str
    spec: dict[str, Any]
    device: str
    seconds: float
    finished: str  # trials of a batch are finished at the same time


@dataclass(frozen=True)
class Run:
    """What was asked of the store, so that a report knows what to show and how it was made."""

    study: str
    scale: str
    trials: int | None
    changes: dict[str, Any]
    command: str
    started: str = field(default_factory=_now)

    @property
    def told(self) -> dict[str, Any]:
        """What the user changed; which data set was found is not of that kind."""
        return {k: v for k, v in self.changes.items() if k not in ("fingerprint", "encoder")}


def row_values(outcomes: Sequence[Outcome], provenance: Provenance) -> list[tuple[object, ...]]:
    """Return the columns of finished trials."""
    made_by, now = json.dumps(asdict(provenance)), _now()
    return [_values(one, made_by, now) for one in outcomes]


def _values(one: Outcome, made_by: str, now: str) -> tuple[object, ...]:
    work, blob = one.work, io.BytesIO()
    spec = json.dumps(asdict(work), allow_nan=False)
    measures = {name: _plain(value) for name, value in one.measures.items()}
    if one.arrays:
        arrays: dict[str, Any] = {k: v.detach().cpu().numpy() for k, v in one.arrays.items()}
        np.savez_compressed(blob, **arrays)
    numbers = json.dumps(measures, allow_nan=False)
    return work.key, work.kind, spec, numbers, blob.getvalue() or None, made_by, one.seconds, now


def _plain(value: float) -> float | str | None:
    """Return a number as JSON can have it, which knows neither NaN nor infinity."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def row_of(file: Path, values: tuple[Any, ...]) -> Row:
    """Return a finished trial from its columns."""
    key, kind, spec, measures, blob, made_by, seconds, finished = values
    with undamaged(file, f"the trial {key}"):
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in json.loads(measures).items()
        }
        arrays = _arrays(blob) if blob else {}
        provenance = Provenance(**json.loads(made_by))
        settings = json.loads(spec)
        return Row(key, kind, settings, numbers, arrays, provenance, float(seconds), finished)


def time_of(file: Path, values: tuple[Any, ...]) -> Time:
    """Return the time of a finished trial from its columns."""
    kind, spec, made_by, seconds, finished = values
    with undamaged(file, "a trial"):
        return Time(kind, json.loads(spec), json.loads(made_by)["device"], float(seconds), finished)


def _arrays(blob: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def run_values(run: Run) -> tuple[str, str, str]:
    """Return the columns of a run; the same request is the same text."""
    request = json.dumps([run.study, run.scale, run.trials, run.changes], sort_keys=True)
    return request, run.command, run.started


def run_of(file: Path, values: tuple[Any, ...]) -> Run:
    """Return a run from its columns."""
    request, command, started = values
    with undamaged(file, "the list of runs"):
        study, scale, trials, changes = json.loads(request)
        return Run(study, scale, trials, changes, command, started)
