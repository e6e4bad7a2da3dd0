"""What the store holds of a study: its table, its claims' verdicts, where the numbers came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile.errors import FissileError
from fissile.lab.claims import Claim, Verdict
from fissile.lab.frame import table
from fissile.lab.store import Provenance, Row, Run, Store
from fissile.lab.studies import STUDIES
from fissile.lab.study import Study
from fissile.lab.trial import Trial, Work

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
        """The first layers of trial 0 by arm, NaN where a weight does not exist."""
        held = {row.key: row.arrays for row in self.rows}
        return {
            work.arm.name: np.asarray(held[work.key]["w1"])
            for work in self.works
            if isinstance(work, Trial) and work.number == 0 and "w1" in held.get(work.key, {})
        }


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
