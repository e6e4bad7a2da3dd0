"""What the store holds of a study: its table, its claims' verdicts, where the numbers came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import FileError, FissileError
from fissile._common.progress import number_of
from fissile.lab.claims import AXES, Claim, Verdict
from fissile.lab.frame import after, cells, described, table
from fissile.lab.readings import QUESTIONS, Reading, reading, text, under, within
from fissile.lab.source import pointing
from fissile.lab.store import Provenance, Rows, Run, Store
from fissile.lab.studies import CRITERION, GIVEN, STUDIES, find
from fissile.lab.study import SCALES, Study
from fissile.lab.task import PAPERS_ENCODER, source
from fissile.lab.trial import Trial, Work

if TYPE_CHECKING:
    from pandas import DataFrame


_MOST = 2_000_000  # trials of a run
#: What every trial has come to, by its kind.
_ACCURACY = {"accuracy", "nonzeros"}
_NEEDED: dict[str, set[str]] = {"sampling": {"coverage"}, "function": set()}


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
    others: Sequence[Run] = ()  # the study's other runs in the store

    def __post_init__(self) -> None:
        for name in ("rows", "converged_rows"):
            if not isinstance(held := getattr(self, name), Rows):
                object.__setattr__(self, name, Rows(held))

    @cached_property
    def frame(self) -> DataFrame:
        """One row for each finished trial, gains over dense included."""
        rows = self.rows + self.converged_rows
        return table([*self.works, *self.converged], rows, self.study.accuracy)

    @cached_property
    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """Every claim of the study and what became of it."""
        if not self.rows and not self.converged_rows:
            return [
                (claim, Verdict("no data", "nothing has run yet")) for claim in self.study.claims
            ]
        found = judged(self.study, self.frame, self.done, self.changed)
        missing = told(len(self.converged_rows), len(self.converged))
        part = [both for both in judged(self.study, self.frame, missing) if both[0] == CRITERION]
        return [both for both in found if both[0] != CRITERION] + part

    @cached_property
    def changed(self) -> dict[str, object]:
        """What the user changed in the cells of the grid, the data aside."""
        usual, ours = values(self.study.works(self.run.scale, 1)), values(self.works)
        return {
            name: value
            for name, value in self.run.told.items()
            if ours.get(name) != usual.get(name)
        }

    @cached_property
    def apart(self) -> str:
        """The settings in which the run is not the paper's, such as ``clauses = 16``.

        The number of trials and the data are named elsewhere, and so is another answer to what the
        paper leaves open. A part of the paper's grid is the paper's: its cells may stand beside the
        same cells of the paper.
        """
        told = {"reading": self.answers} if self.reading else {}
        paper = self.study.works(self.study.full, 1, told)
        here, there = (
            {tuple(_plain(work).items()) for work in _cells(part)} for part in (self.works, paper)
        )
        if here <= there:
            return ""
        ours, theirs = values(self.works), values(paper)
        answers = (QUESTIONS[name].option(one) for name, one in self.reading.items())
        said = {n for answer in answers for n in answer.settings}
        found = {
            n: v
            for n, v in ours.items()
            if not v <= theirs.get(n, set()) or n in self.changed.keys() - said
        }
        return ", ".join(
            f"{name} = {'/'.join(map(str, sorted(each, key=str)))}" for name, each in found.items()
        )

    @cached_property
    def reading(self) -> Reading:
        """The answers to what the paper leaves open that differ from the study's own.

        They were asked for as a reading, or by settings that are those of an option.
        """
        found = dict(reading(str(self.run.changes.get("reading", "default"))))
        usual, ours = values(self.study.works(self.study.full, 1)), values(self.works)
        for question in QUESTIONS.values():
            if question.name in found or not question.concerns(self.study):
                continue
            for option in question.options:
                told = {n: {v} for n, v in option.settings.items() if not callable(v)}
                if told and all(ours.get(n) == v != usual.get(n) for n, v in told.items()):
                    found[question.name] = option.name
        return found

    @property
    def otherwise(self) -> str:
        """The reading, if it is another than the study's own, and the settings that are apart."""
        return ", ".join(filter(None, (self.answers, self.apart)))

    @property
    def answers(self) -> str:
        """The reading as text, if it is another than the study's own."""
        return text(self.reading) if self.reading else ""

    @property
    def along(self) -> list[str]:
        """The columns that tell the cells of an arm apart, those that tables name first."""
        frame = self.frame
        first = [one.along for one in self.study.published]
        found: list[str] = []
        for name in dict.fromkeys((*first, *AXES, *described(frame))):
            if name in frame and name not in ("arm", "trial", "load"):
                arms = len(frame[[*found, "arm"]].drop_duplicates())
                if len(frame[[*found, "arm", name]].drop_duplicates()) > arms:
                    found.append(name)
        return found or [name for name in ("neurons", *frame) if name in frame][:1]

    def means(self) -> dict[str, DataFrame]:
        """Return, by measure, a row for every cell and arm: mean, standard error, trials."""
        if not self.rows:
            return {}
        measures = [*(one.measure for one in self.study.published), "accuracy"]
        known = [name for name in dict.fromkeys(measures) if name in self.frame]
        known = known or [name for name in self.frame if name not in described(self.frame)]
        frame = self.frame[self.frame["arm"] != "converged"]
        return {name: cells(frame, name, self.along) for name in known}

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

    @cached_property
    def foreign(self) -> str:
        """What the networks saw, if it is not what the paper's did: to be said at every number."""
        task = getattr(self.works[0], "task", None)
        columns = [work.columns() for work in _cells(self.works)]
        if len({row.get("data") for row in columns}) > 1:  # a study on several sets
            encoders = dict.fromkeys(str(row.get("encoder", "none")) for row in columns)
            return " and ".join(one for one in encoders if one not in ("none", PAPERS_ENCODER))
        usual = self.study.data(self.study.full)
        data = getattr(task, "data", None)
        encoder = str(task.columns().get("encoder", "none")) if task else "none"
        papers = self.study.file or encoder in ("none", PAPERS_ENCODER)
        if data is None or (data == usual and papers):
            return ""
        if encoder == "none":
            return str(data)
        # Features of the same samples and classes are told apart by their encoder alone.
        alike = usual is not None and source(data) == source(usual)
        return encoder if alike else f"{source(data)} through {encoder}"

    @property
    def note(self) -> str:
        """What a figure must say of its data and its settings."""
        usual = ["what the paper used", "the paper's settings"]
        if self.study.file:
            usual = [f"what scale {self.study.full} has"] * 2
        data = f"On {self.foreign}: not {usual[0]}." if self.foreign else ""
        settings = f"With {self.apart}: not {usual[1]}." if self.apart else ""
        reading = f"Another reading of the paper: {self.answers}." if self.reading else ""
        return " ".join(filter(None, (data, reading, settings)))

    @property
    def done(self) -> str:
        """Return how many trials are there, if not all, to stand beside what they show."""
        return told(len(self.rows), len(self.works))


def told(rows: int, works: int) -> str:
    """Return how many trials are there, if not all."""
    return "" if rows == works else f"{rows:,} of {number_of(works, 'trial')}"


def judged(
    study: Study,
    frame: DataFrame,
    missing: str = "",
    changed: Mapping[str, object] | None = None,
) -> list[tuple[Claim, Verdict]]:
    """Return every claim and its verdict; with some trials missing, none holds or fails yet."""
    found = []
    for claim in study.claims:
        with pointing(study.file, claim.text, "a claim cannot be judged: "):
            found.append((claim, claim.judge(frame, changed)))
    return [(claim, _so_far(verdict, missing) if missing else verdict) for claim, verdict in found]


def _so_far(verdict: Verdict, missing: str) -> Verdict:
    if verdict.status in ("no data", "not tested here"):
        return verdict
    return Verdict("not significant", f"so far ({missing}) {verdict.status}: {verdict.numbers}")


def _padded(curves: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return curves one below the other, NaN where one has ended."""
    longest = max(map(len, curves))
    return np.stack([np.pad(c, (0, longest - len(c)), constant_values=np.nan) for c in curves])


#: What decides a trial's result and is no setting of the grid; data are named beside each number.
_ASIDE = {"number", "pictures", "data", "encoder", "fingerprint", "function", "code"}


def _plain(work: Work) -> dict[str, Any]:
    """Return the settings of a trial, those of its parts among them."""
    spec = asdict(work)
    for part in ("task", "recipe", "arm"):
        spec |= spec.pop(part, {})
    spec |= dict(spec.pop("settings", ()))
    return {name: value for name, value in spec.items() if name not in _ASIDE}


def _cells(works: Sequence[Work]) -> Iterable[Work]:
    """Return one trial of each cell."""
    return (work for work in works if work.number == works[0].number)


def values(works: Sequence[Work]) -> dict[str, set[Any]]:
    """Return the values of every setting in some trials."""
    found: dict[str, set[Any]] = {}
    for work in _cells(works):
        for name, value in _plain(work).items():
            found.setdefault(name, set()).add(value)
    return found


def load(store: Store, run: Run, *, pictures: bool = False) -> Results:
    """Return what the store holds of a run, with what its figures show of single networks or not.

    >>> results = load(store, store.runs()[0])
    """
    study = under(study_of(run), str(run.changes.get("reading", "default")))
    works = study.works(run.scale, run.trials, run.changes)
    converged = study.converged(run.scale, run.changes)
    rows, more = (store.rows(work.key for work in part) for part in (works, converged))
    for names in {*rows.names, *more.names}:
        if missing := _NEEDED.get(works[0].kind, _ACCURACY) - set(names):
            raise FileError(
                f"{store.path}: a trial of {run.study} is damaged: it has no {', '.join(missing)}; "
                "put a whole copy of the store in its place"
            )
    arrays = store.arrays(
        [work.key for work in works if pictures and getattr(work, "pictures", False)]
    )
    runs = [one for one in store.runs() if one.study == run.study]
    own = next((one for one in runs if one.asked == run.asked), run)
    others = [one for one in runs if one.asked != run.asked]
    return Results(study, own, works, rows, converged, more, arrays, others)


def study_of(run: Run) -> Study:
    """Return the study of a run, if it still has the trials that the run asked for.

    >>> study_of(store.runs()[0]).id

    A file with a study is never run because a store names it: it was given, or it is not known.
    """
    study = (GIVEN if run.grid else STUDIES).get(run.study)
    with suppress(FissileError):  # its file has not even this scale or setting any more
        if study is not None and study.grid(run.scale, run.trials, run.changes) == run.grid:
            return study
    raise FissileError(unshown(run))


def unshown(run: Run) -> str:
    """Return why a run cannot be shown."""
    if not run.grid:
        return f"Made by another version of fissile: {run.command}"
    why = "its study is in a file, which runs only where it is named: give the file too"
    if run.study in GIVEN:
        why = f"{GIVEN[run.study].file} has other trials now: run it, or give it as it was"
    return f"{run.name} cannot be shown: {why}. Made by: {run.command}"


def readable(run: Run) -> bool:
    """Return whether this version of fissile knows the run's study, scale and settings.

    A run of more trials than anybody has computed would only keep its reader busy.
    """
    try:
        cells = study_of(run).works(run.scale, 1, run.changes)
    except FissileError:
        return False
    return len(cells) * (run.trials or 1) <= _MOST


def shown(run: Run) -> str:
    """Return a run's name and what was asked of it: ``codes-2 (quick, clauses=16)``."""
    trials = [] if run.trials is None else [f"trials={run.trials}"]
    told = [f"{name}={value}" for name, value in run.told.items()]
    return f"{run.name} ({', '.join([run.scale, *trials, *told])})"


def nothing(store: Store, what: str, command: str) -> str:
    """Return the error that says what the store holds, where that is not what was asked for."""
    held = ", ".join(shown(run) for run in store.runs() if readable(run))
    runs = f"; the store holds {held}" if held else ""
    if files := ", ".join(run.name for run in store.runs() if run.grid and not readable(run)):
        runs += f"; give the files of the studies of {files} to see those"
    return f"{what}; fill the store with `{command}` first{runs}"


def matching(
    store: Store,
    asked: Sequence[str] = (),
    scale: str | None = None,
    changes: Mapping[str, object] | None = None,
) -> list[Run]:
    """Return the runs that go by these names or are of these studies, newest first."""
    runs, told = store.runs(), dict(changes or {})
    chosen = reading(str(told.pop("reading", "default")))
    studies = {study.id for study in find([w for w in asked if w not in {r.name for r in runs}])}
    return [
        run
        for run in runs
        if (not asked or run.name in asked or run.study in studies)
        and scale in (None, run.scale)
        and all(run.told.get(name) == value for name, value in told.items())
        and (
            "reading" not in (changes or {})
            or (
                run.study in STUDIES
                and run.told.get("reading", "default") == text(within(STUDIES[run.study], chosen))
            )
        )
    ]


def nearest(
    store: Store,
    asked: Sequence[str] = (),
    scale: str | None = None,
    changes: Mapping[str, object] | None = None,
) -> list[Run]:
    """Return one run of each study, in the order of the paper.

    >>> nearest(store, ["capacity", "codes-2"])

    It is the run that was asked for by its name, or else the nearest to the paper's scale and
    settings that has results; of several, the newest.
    """

    def distance(run: Run) -> tuple[bool, int, int, bool]:
        study = study_of(run)
        _, keys = study.keys(run.scale, run.trials, run.changes)
        few = run.trials is not None and run.trials < study.scales[run.scale].trials
        nothing = not store.progress(keys)[0]
        return nothing, -SCALES.index(run.scale), len(run.told), few

    found: dict[str, Run] = {}
    by_study: dict[str, list[Run]] = {}
    for run in matching(store, asked, scale, changes):
        if readable(run):
            by_study.setdefault(run.study, []).append(run)
        elif run.name in asked:
            raise FissileError(unshown(run))
    for study, runs in by_study.items():
        named = [run for run in runs if run.name in asked]
        if len(named) > 1:
            names = " ".join(run.name for run in named)
            raise FissileError(
                f"{' and '.join(names.split())} are runs of one study; name one of them, or see "
                f"them side by side: fissile compare {names}"
            )
        left = named or runs
        found[study] = left[0] if len(left) == 1 else min(left, key=distance)
    return [found[name] for name in (*STUDIES, *GIVEN) if name in found]
