"""The commands ``fissile run``, for trials of studies, and ``fissile plan``, for their time."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fissile._common.cores import cores
from fissile._common.errors import FissileError
from fissile._common.progress import duration, number_of
from fissile.bank import check_device
from fissile.cli.common import (
    OUT,
    Ids,
    Jobs,
    Out,
    Scale,
    Under,
    cells,
    here,
    interruptible,
    parsed,
    print_means,
    print_status,
    print_verdicts,
    show,
    store_in,
    table_of,
    words_of,
)
from fissile.data.catalogue import find as find_set
from fissile.lab.batching import Backend, default_jobs
from fissile.lab.classifier import meant, meant_all
from fissile.lab.plan import Estimate, estimate
from fissile.lab.readings import told
from fissile.lab.results import load
from fissile.lab.run import Bar
from fissile.lab.run import run as run_trials
from fissile.lab.store import Run, Store
from fissile.lab.studies import SEVERAL, find
from fissile.lab.study import Study
from fissile.lab.trial import Work

RUN = (
    "Examples: fissile run superposition --scale quick · "
    "fissile run all --scale paper --device cuda · fissile run capacity --set train=5000 · "
    "fissile run cifar100 --data PATH --set data=cifar100-efficientnet-lite2 · "
    "fissile run cnn-256 --device cuda --only neurons=4,8 --for 20 · "
    "fissile run frontier --scale quick · "
    "fissile run ./my_study.py --scale smoke · "
    "fissile run all --on ray --address 10.0.0.1:6379"
)
PLAN = (
    "Examples: fissile plan superposition --scale paper · "
    "fissile plan ./my_study.py --scale paper · "
    "fissile plan imagenet1k --scale paper --device cuda --workers 8 · "
    "fissile plan all --scale paper --out fissile-lab --json"
)

On = Enum("On", {name: name for name in ("here", "ray")}, type=str)  # type: ignore[misc]
Device = Enum("Device", {name: name for name in ("cpu", "cuda")}, type=str)  # type: ignore[misc]
Size = Annotated[Scale, typer.Option(help="From seconds to the paper's own grid.")]
Trials = Annotated[
    int | None, typer.Option(min=1, help="Trials per setting; by default the scale's.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE,...", help="Only some cells, e.g. neurons=4,8."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train=5000."),
]
Where = Annotated[
    str | None,
    typer.Option(
        help="Where to train: cpu, cuda, cuda:1, ...; by default cpu, on Ray all workers."
    ),
]
Who = Annotated[On, typer.Option(help="Who trains: this machine, or the workers of a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="A Ray cluster to join, HOST:PORT; by default RAY_ADDRESS, else one is started "
        "on this machine.",
    ),
]
Every = Annotated[
    float | None,
    typer.Option(min=0, help="Store results after about so many seconds of work."),
]
Minutes = Annotated[
    float | None,
    typer.Option("--for", min=0, help="Begin nothing more after so many minutes."),
]
Data = Annotated[Path | None, typer.Option(help="A folder with data sets; see: fissile data.")]


@dataclass(frozen=True)
class Asked:
    """The options of a command that trains: which trials, and where they are computed."""

    scale: Size = "quick"  # type: ignore[assignment]
    trials: Trials = None
    device: Where = None
    jobs: Jobs = None
    on: Who = "here"  # type: ignore[assignment]
    address: Address = None
    every: Every = None
    only: Only = None
    minutes: Minutes = None
    out: Out = OUT
    data: Data = None
    changes: Changes = None

    def check(self) -> None:
        """Refuse what does not go together before anything is looked for; find the data."""
        if self.on.value == "here":
            if self.address is not None:
                raise FissileError("--address is that of a Ray cluster; give --on ray with it")
            check_device(self.device or "cpu")
        elif self.device not in (None, "cpu", "cuda"):
            raise FissileError(
                f"--device {self.device} is one of this machine's; on Ray give cpu, cuda or neither"
            )
        if self.data is not None:
            _look_in(self.data)

    def train(self, works: Sequence[Work], store: Store) -> None:
        """Compute what the store lacks of some trials, and say what was done."""
        within = None if self.minutes is None else 60 * self.minutes
        with (
            interruptible(store),
            Bar() as bar,
            self._backend(store.missing(works)) as backend,
        ):
            tally = run_trials(works, store, backend, within=within, watcher=bar)
        typer.echo(f"{tally.text()}; {store.path} holds {store.count():,}.")

    def _backend(self, works: Sequence[Work]) -> AbstractContextManager[Backend]:
        """Return what computes: this machine, or a cluster."""
        if self.on.value == "here" or not works:
            return here(self.jobs, self.device or "cpu", works, self.every)
        from fissile.lab.ray import cluster

        return cluster(
            works, address=self.address, device=self.device, jobs=self.jobs, every=self.every
        )


def trains(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Asked`, which it takes as its argument ``asked``."""
    kinds = dict[str, Any]()
    for one in (command, Asked):
        kinds |= get_type_hints(one, include_extras=True)
    defaults = {one.name: one.default for one in fields(Asked)}
    names = {one.name: one.default for one in signature(command).parameters.values()} | defaults
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in names.items()
        if name != "asked"
    ]

    @wraps(command)
    def called(**values: Any) -> None:
        command(asked=Asked(**{name: values.pop(name) for name in defaults}), **values)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


@trains
def run(ids: Ids, asked: Asked, reading: Under = None) -> None:
    """Run studies; what is stored already is not computed again, and Ctrl-C loses little."""
    asked.check()
    words = words_of(asked.changes, reading)
    runs, works = requested(ids, asked.scale.value, asked.trials, words)
    works = cells(works, asked.only or [])
    with Store(asked.out) as store:
        for one in runs:
            store.note_run(one)
        asked.train(works, store)
        if len(runs) == 1:
            found = load(store, runs[0])
            print_means(found)
            print_verdicts(found)
        else:
            mine = {one.asked for one in runs}
            print_status(store, [one for one in reversed(store.runs()) if one.asked in mine])


def requested(
    ids: Sequence[str], scale: str, trials: int | None, changes: Sequence[str]
) -> tuple[list[Run], list[Work]]:
    """Return the runs that were asked for, and all their trials."""
    studies = {study.id: study for study in find(ids)}
    known = _changes(list(studies.values()), scale, changes)
    runs = [_wanted(study, scale, trials, known[study.id]) for study in studies.values()]
    runs = _with_data(runs, studies, skip=not set(SEVERAL).isdisjoint(ids))
    asked = [(studies[one.study], (one.scale, trials, one.changes)) for one in runs]
    runs = [replace(one, grid=s.grid(*how)) for one, (s, how) in zip(runs, asked, strict=True)]
    return runs, [work for study, how in asked for work in study.everything(*how)]


def _changes(
    studies: Sequence[Study], scale: str, words: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Return what changes in each study: a setting that none of them has is a mistake."""
    changes = parsed(words)
    chosen = changes.pop("reading", None)
    readings = {} if chosen is None else told(studies, str(chosen))
    for name in set(changes).difference(*(study.settings for study in studies)):
        studies[0].works(scale, 1, {name: changes[name]})  # which raises an error
    found: dict[str, dict[str, object]] = {
        study.id: {name: value for name, value in changes.items() if name in study.settings}
        for study in studies
    }
    for study, one in readings.items():
        found[study] |= {} if one == "default" else {"reading": one}
    return found


def _wanted(study: Study, scale: str, trials: int | None, changes: dict[str, object]) -> Run:
    """Return the run that makes one study, with the command that makes it again."""
    words = ["fissile", "run", study.file or study.id, "--scale", scale]
    words += ["--trials", str(trials)] if trials is not None else []
    for name, value in changes.items():
        words += [f"--{name}", str(value)] if name == "reading" else ["--set", f"{name}={value}"]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Run(study.id, scale, trials, changes, shlex.join(words), now)


def _look_in(folder: Path) -> None:
    """Look for data sets in a folder first, here and in the processes that compute."""
    if not folder.is_dir():
        raise FissileError(f"there is no folder {folder}; give one that holds data sets")
    others = os.environ.get("FISSILE_DATA", "")
    os.environ["FISSILE_DATA"] = os.pathsep.join(filter(None, (str(folder.resolve()), others)))


def _with_data(runs: list[Run], studies: Mapping[str, Study], *, skip: bool) -> list[Run]:
    """Note which arrays each run will see; where they are missing, say so or leave the run out."""
    found, missing = [], []
    for one in runs:
        entries = studies[one.study].entries(one.scale, one.changes)
        # Of several data sets, those that are not here are left out; one alone is asked for.
        wanted = [e for e in entries if not (skip or entries[1:]) or find_set(e) is not None]
        missing += [f"{one.study} (needs {entry.name})" for entry in entries if entry not in wanted]
        if wanted or not entries:
            seen = meant_all(wanted) if entries[1:] else meant(wanted[0]) if wanted else {}
            found.append(replace(one, changes={**one.changes, **seen}))
    if missing:
        typer.echo(f"Left out for want of data: {', '.join(missing)}. See: fissile data", err=True)
    if not found:
        raise FissileError("there is nothing to run; see: fissile data")
    return found


def plan(
    ids: Ids,
    scale: Size = "quick",  # type: ignore[assignment]
    trials: Trials = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores, or processes on GPUs; by default as many as a run here has."
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to train.")] = "cpu",  # type: ignore[assignment]
    only: Only = None,
    out: Out = OUT,
    changes: Changes = None,
    reading: Under = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate how long a run will take, from the times of stored trials.

    Trials that the store holds are left out. Kinds of trials that it has no times for are tried
    for some seconds. Data sets need not be here.
    """
    known = _changes(find(ids), scale.value, words_of(changes, reading))
    with store_in(out) as store:
        studies = {
            study.id: study.everything(
                scale.value, trials, _noted(store, study, scale.value, known[study.id])
            )
            for study in find(ids)
        }
        works = set(cells([work for each in studies.values() for work in each], only or []))
        asked = {study: [w for w in each if w in works] for study, each in studies.items()}
        missing = {s: store.missing(each) if store else each for s, each in asked.items()}
        times = store.times() if store else ()
    here = cores() if device.value == "cpu" else default_jobs(device.value, list(works))
    expected = estimate(missing, times, device.value, workers or here)
    if as_json:
        counts = {study: len(each) for study, each in missing.items()}
        typer.echo(json.dumps(asdict(expected) | {"error": expected.error, "missing": counts}))
    elif not expected.trials:
        typer.echo(f"There is nothing to do: {out} holds every trial.")
    else:
        _print_estimate(expected, asked, missing)


def _noted(
    store: Store | None, study: Study, scale: str, changes: dict[str, object]
) -> dict[str, object]:
    """Add to the changes which arrays the store's newest run on the same data saw."""
    data = study.data(scale, changes)
    for run in store.runs() if store else ():
        if (run.study, run.scale) == (study.id, scale) and study.data(scale, run.changes) == data:
            arrays = run.changes.keys() - run.told.keys()
            return {name: run.changes[name] for name in arrays} | changes
    return changes


def _print_estimate(
    expected: Estimate,
    asked: Mapping[str, Sequence[Work]],
    missing: Mapping[str, Sequence[Work]],
) -> None:
    table = table_of("study", "trials", "missing", "time")
    for study, seconds in expected.studies.items():
        table.add_row(study, f"{len(asked[study]):,}", f"{len(missing[study]):,}", _time(seconds))
    show(table)
    total = _time(expected.seconds)
    typer.echo(f"All {expected.trials:,} on {number_of(expected.workers, 'worker')}: {total}.")
    if expected.unknown:
        kinds = ", ".join(expected.unknown)
        typer.echo(f"No time is known, and none can be tried here, of: {kinds}.")
    if single := [kind for kind, rate in expected.rates.items() if not rate.ratios]:
        typer.echo(f"From a single measurement, with an unknown error: {', '.join(single)}.")
    if error := expected.error:
        typer.echo(
            f"Stored batches took {error['median']:.2f} times as long as the other batches' times "
            f"say (median of {error['batches']:,}; 90 % took {error['low']:.2f} to "
            f"{error['high']:.2f} times)."
        )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)
