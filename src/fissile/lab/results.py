"""What the store holds of a study: its table, its claims' verdicts, where the numbers came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError
from fissile.lab.claims import Claim, Verdict
from fissile.lab.frame import after, table
from fissile.lab.store import Provenance, Row, Rows, Run, Store
from fissile.lab.studies import CRITERION, STUDIES
from fissile.lab.study import Study
from fissile.lab.task import PAPERS_ENCODER, source
from fissile.lab.trial import Contender, Trial, Work

if TYPE_CHECKING:
    from pandas import DataFrame


_MOST = 2_000_000  # trials of a run
#: What every trial has come to, by its kind.
_ACCURACY = {"accuracy", "nonzeros"}
_NEEDED = {"sampling": {"coverage"}}


@dataclass(frozen=True)
class Results:
    """The finished trials of one run of a study.

    Networks that trained until they converged are kept apart: a run is complete without them.
    """

    study: Study
    run: Run
    works: Sequence[Work]
    rows: Rows
    converged: Sequence[Work] = ()
    converged_rows: Rows = field(default_factory=Rows)
    arrays: Mapping[str, Mapping[str, NDArray[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rows", "converged_rows"):
            if not isinstance(held := getattr(self, name), Rows):
                object.__setattr__(self, name, Rows(held))

    @cached_property
    def frame(self) -> DataFrame:
        """One row for each finished trial, gains over dense included."""
        return table([*self.works, *self.converged], self.rows + self.converged_rows)

    @cached_property
    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """Every claim of the study and what became of it."""
        if not self.rows and not self.converged_rows:
            return [
                (claim, Verdict("no data", "nothing has run yet")) for claim in self.study.claims
            ]
        found = judged(self.study, self.frame, self.done)
        missing = _told(self.converged_rows, self.converged)
        part = [both for both in judged(self.study, self.frame, missing) if both[0] == CRITERION]
        return [both for both in found if both[0] != CRITERION] + part

    @property
    def complete(self) -> bool:
        """Tell whether every trial is there."""
        return len(self.rows) == len(self.works)

    @property
    def seconds(self) -> float:
        """The time that went into these trials, wherever they ran."""
        return sum(self.rows.seconds)

    @property
    def provenances(self) -> list[Provenance]:
        """Who made these numbers: usually one machine and one commit."""
        return list(dict.fromkeys(self.rows.provenances))

    @cached_property
    def pictures(self) -> dict[str, NDArray[Any]]:
        """What figures show of single networks, by arm.

        The first layers of trial 0, NaN where a weight does not exist; or the accuracies in
        percent (trials, epochs), also by the time of the split: ``"random-4 after 5"``.
        """
        found: dict[str, list[NDArray[Any]]] = {}
        dense: dict[int, NDArray[Any]] = {}
        for work in self.works:
            arrays = self.arrays.get(work.key, {})
            if not isinstance(work, Trial):
                continue
            if "w1" in arrays and work.number == 0:
                found[work.arm.name] = [np.asarray(arrays["w1"])]
            if "curve" in arrays:
                curve = 100 * np.asarray(arrays["curve"])
                if work.arm.split != "dense":
                    found.setdefault(after(work.arm.name, work.warm_up), []).append(curve)
                elif work.number not in dense:  # whenever others split, it is the same network
                    dense[work.number] = curve
        single = {name: a[0] for name, a in found.items() if a[0].ndim == 2}
        curves = {"dense": list(dense.values()), **found} if dense else found
        return single or {name: _padded(several) for name, several in curves.items()}

    @property
    def foreign(self) -> str:
        """What the networks saw, if it is not what the paper's did: to be said at every number."""
        tasks = [work.task for work in self.works if isinstance(work, Trial | Contender)]
        usual = self.study.data("paper")
        data = getattr(tasks[0], "data", None) if tasks else None
        encoder = str(tasks[0].columns().get("encoder", "none")) if tasks else "none"
        if data is None or (data == usual and encoder in ("none", PAPERS_ENCODER)):
            return ""
        if encoder == "none":
            return str(data)
        # Features of the same samples and classes are told apart by their encoder alone.
        alike = usual is not None and source(data) == source(usual)
        return encoder if alike else f"{source(data)} through {encoder}"

    @property
    def note(self) -> str:
        """What a figure must say of its data."""
        return f"On {self.foreign}: not what the paper used." if self.foreign else ""

    @property
    def done(self) -> str:
        """Say how many trials are there, if not all: to be said beside what they show."""
        return _told(self.rows, self.works)


def _told(rows: Sequence[Row], works: Sequence[Work]) -> str:
    return "" if len(rows) == len(works) else f"{len(rows):,} of {len(works):,} trials"


def judged(study: Study, frame: DataFrame, missing: str = "") -> list[tuple[Claim, Verdict]]:
    """Return every claim and its verdict; with some trials missing, none holds or fails yet.

    >>> judged(study, results.frame, results.done)
    """
    found = [(claim, claim.check(frame)) for claim in study.claims]
    return [(claim, _so_far(verdict, missing) if missing else verdict) for claim, verdict in found]


def _so_far(verdict: Verdict, missing: str) -> Verdict:
    if verdict.status == "no data":
        return verdict
    return Verdict("not significant", f"so far ({missing}) {verdict.status}: {verdict.numbers}")


def _padded(curves: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return curves one below the other, NaN where one has ended."""
    longest = max(map(len, curves))
    return np.stack([np.pad(c, (0, longest - len(c)), constant_values=np.nan) for c in curves])


def load(store: Store, run: Run, *, pictures: bool = False) -> Results:
    """Return what the store holds of a run, with what its figures show of single networks or not.

    >>> results = load(store, store.runs()[0])
    """
    study = STUDIES[run.study]
    works = study.works(run.scale, run.trials, run.changes)
    converged = study.converged(run.scale, run.changes)
    rows, more = (store.rows(work.key for work in part) for part in (works, converged))
    for names in {*rows.names, *more.names}:
        if missing := _NEEDED.get(works[0].kind, _ACCURACY) - set(names):
            raise FileError(
                f"{store.path}: a trial of {run.study} is damaged: it has no {', '.join(missing)}; "
                "put a whole copy of the store in its place"
            )
    shown = [work.key for work in works if pictures and getattr(work, "pictures", False)]
    return Results(study, run, works, rows, converged, more, store.arrays(shown))


def readable(run: Run) -> bool:
    """Return whether this version of fissile knows the run's study, scale and settings.

    A run of more trials than anybody has computed would only keep its reader busy.
    """
    try:
        cells = STUDIES[run.study].works(run.scale, 1, run.changes)
    except (KeyError, FissileError):
        return False
    return len(cells) * (run.trials or 1) <= _MOST


def latest(store: Store, ids: Sequence[str] = (), scale: str | None = None) -> list[Run]:
    """Return the newest run of each study that can be read, in the order of the paper."""
    runs: dict[str, Run] = {}
    for run in store.runs():  # newest first
        wanted = scale in (None, run.scale) and (not ids or run.study in ids)
        if wanted and run.study not in runs and readable(run):
            runs[run.study] = run
    return [runs[name] for name in STUDIES if name in runs]
