"""What the tables hold: finished trials and runs, to and from their columns."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fissile.lab.compute import Outcome
from fissile.lab.store.advice import undamaged
from fissile.lab.store.provenance import Provenance

__all__ = ["Row", "Run", "Time", "row_of", "row_values", "run_of", "run_values", "time_of"]


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
