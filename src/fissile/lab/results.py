"""What the store holds of a study: its table, its claims' verdicts, where the numbers came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile.errors import FissileError
from fissile.lab.claims import Claim, Verdict
from fissile.lab.frame import after, table
from fissile.lab.store import Provenance, Row, Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.study import Study
from fissile.lab.task import PAPERS_ENCODER
from fissile.lab.trial import Features, Trial, Work

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Results", "latest", "load", "readable"]


@dataclass(frozen=True)
class Results:
    """The finished trials of one run of a study."""

    study: Study
    run: Run
    works: Sequence[Work]
    rows: Sequence[Row]

    @cached_property
    def frame(self) -> DataFrame:
        """One row for each finished trial, gains over dense included."""
        return table(self.works, {row.key: row.measures for row in self.rows})

    @cached_property
    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """Every claim of the study and what became of it."""
        if not self.rows:
            return [
                (claim, Verdict("no data", "nothing has run yet")) for claim in self.study.claims
            ]
        return [(claim, claim.check(self.frame)) for claim in self.study.claims]

    @property
    def complete(self) -> bool:
        """Tell whether every trial is there."""
        return len(self.rows) == len(self.works)

    @property
    def seconds(self) -> float:
        """The time that went into these trials, wherever they ran."""
        return sum(row.seconds for row in self.rows)

    @property
    def provenances(self) -> list[Provenance]:
        """Who made these numbers: usually one machine and one commit."""
        return list(dict.fromkeys(row.provenance for row in self.rows))

    @cached_property
    def pictures(self) -> dict[str, NDArray[Any]]:
        """What figures show of single networks, by arm.

        The first layers of trial 0, NaN where a weight does not exist; or the accuracies in
        percent (trials, epochs), also by the time of the split: ``"random-4 after 5"``.
        """
        held = {row.key: row.arrays for row in self.rows}
        found: dict[str, list[NDArray[Any]]] = {}
        for work in self.works:
            arrays = held.get(work.key, {})
            if not isinstance(work, Trial):
                continue
            if "w1" in arrays and work.number == 0:
                found[work.arm.name] = [np.asarray(arrays["w1"])]
            if "curve" in arrays:
                dense = work.arm.split == "dense"
                name = work.arm.name if dense else after(work.arm.name, work.warm_up)
                found.setdefault(name, []).append(100 * np.asarray(arrays["curve"]))
        single = all(len(arrays) == 1 and arrays[0].ndim == 2 for arrays in found.values())
        return {name: a[0] if single else np.stack(a) for name, a in found.items()}

    @property
    def foreign(self) -> str:
        """Whose features these are, if they are not the paper's: to be said beside every number."""
        encoder = next((str(row["encoder"]) for row in _described(self.works)), "none")
        return "" if encoder in ("none", PAPERS_ENCODER) else encoder

    @property
    def note(self) -> str:
        """What a figure must say of its features."""
        return f"Features: {self.foreign}; the paper's are CLIP's." if self.foreign else ""


def _described(works: Sequence[Work]) -> Iterator[dict[str, object]]:
    """Yield the settings of trials on features."""
    for work in works:
        if isinstance(work, Trial) and isinstance(work.task, Features):
            yield work.columns()


def load(store: Store, run: Run) -> Results:
    """Return what the store holds of a run.

    >>> results = load(store, store.runs()[0])
    """
    study = STUDIES[run.study]
    works = study.works(run.scale, run.trials, run.changes)
    return Results(study, run, works, store.rows([work.key for work in works]))


def readable(run: Run) -> bool:
    """Tell whether this version of fissile knows the run's study, scale and settings."""
    try:
        return bool(STUDIES[run.study].works(run.scale, run.trials, run.changes))
    except (KeyError, FissileError):
        return False


def latest(store: Store, ids: Sequence[str] = (), scale: str | None = None) -> list[Run]:
    """Return the newest run of each study that can be read, in the order of the paper."""
    runs: dict[str, Run] = {}
    for run in store.runs():  # newest first
        wanted = scale in (None, run.scale) and (not ids or run.study in ids)
        if wanted and run.study not in runs and readable(run):
            runs[run.study] = run
    return [runs[name] for name in STUDIES if name in runs]
