"""The command ``fissile run``: trials of studies, on this machine or on a cluster."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fissile._common.errors import FissileError
from fissile.bank import check_device
from fissile.cli.common import (
    OUT,
    Ids,
    Jobs,
    Out,
    Scale,
    cells,
    here,
    interruptible,
    parsed,
    print_status,
    print_verdicts,
)
from fissile.data.catalogue import find as find_set
from fissile.lab.classifier import meant
from fissile.lab.progress import Bar
from fissile.lab.results import load
from fissile.lab.run import run as run_trials
from fissile.lab.store import Run, Store
from fissile.lab.studies import SEVERAL, STUDIES, find
from fissile.lab.study import Study
from fissile.lab.trial import Work

__all__ = ["RUN", "run"]

RUN = (
    "Examples: fissile run superposition --scale quick · "
    "fissile run all --scale paper --device cuda · fissile run capacity --set train=5000 · "
    "fissile run cifar100 --data PATH --set data=cifar100-efficientnet-lite2 · "
    "fissile run cnn-256 --device cuda --only neurons=4,8 --for 20 · "
    "fissile run frontier --scale quick · "
    "fissile run all --on ray --address 10.0.0.1:6379"
)

On = Enum("On", {name: name for name in ("here", "ray")}, type=str)  # type: ignore[misc]


def run(
    ids: Ids,
    scale: Annotated[Scale, typer.Option(help="From seconds to the paper's own grid.")] = "quick",  # type: ignore[assignment]
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per setting; by default the scale's.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to train: cpu, cuda, cuda:1, ...; by default cpu, on Ray all workers."
        ),
    ] = None,
    jobs: Jobs = None,
    on: Annotated[
        On, typer.Option(help="Who trains: this machine, or the workers of a Ray cluster.")
    ] = "here",  # type: ignore[assignment]
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster to join, HOST:PORT; by default RAY_ADDRESS, else one is started "
            "on this machine.",
        ),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(min=0, help="Store results after about so many seconds of work."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Only some cells, e.g. neurons=4,8."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--for", min=0, help="Begin nothing more after so many minutes."),
    ] = None,
    out: Out = OUT,
    data: Annotated[
        Path | None, typer.Option(help="A folder with data sets; see: fissile data.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train=5000."),
    ] = None,
) -> None:
    """Run studies; what is stored already is not computed again, and Ctrl-C loses little."""
    _check_place(on.value, address, device)
    if data is not None:
        _look_in(data)
    runs, works = _asked(ids, scale.value, trials, changes or [])
    works = cells(works, only or [])
    with Store(out) as store:
        for one in runs:
            store.note_run(one)
        with (
            interruptible(store),
            Bar() as bar,
            _who(on.value, address, jobs, device, every, store.missing(works)) as who,
        ):
            within = None if minutes is None else 60 * minutes
            tally = run_trials(works, store, every=every, within=within, watcher=bar, **who)
        typer.echo(f"{tally.text()}; {out} holds {store.count():,}.")
        if len(runs) == 1:
            print_verdicts(load(store, runs[0]))
        else:
            print_status([load(store, one) for one in runs])


def _check_place(on: str, address: str | None, device: str | None) -> None:
    """Refuse what does not go together before anything is looked for."""
    if on == "here":
        if address is not None:
            raise FissileError("--address is that of a Ray cluster; give --on ray with it")
        check_device(device or "cpu")
    elif device not in (None, "cpu", "cuda"):
        raise FissileError(
            f"--device {device} is one of this machine's; on Ray give cpu, cuda or neither"
        )


@contextmanager
def _who(
    on: str,
    address: str | None,
    jobs: int | None,
    device: str | None,
    every: float | None,
    works: Sequence[Work],
) -> Iterator[dict[str, Any]]:
    """Say, in the words of :func:`fissile.lab.run.run`, who computes."""
    if on == "here" or not works:
        with here(jobs, device or "cpu", works) as who:
            yield who
        return
    from fissile.lab.ray import cluster

    with cluster(works, address=address, device=device, jobs=jobs, every=every) as lanes:
        yield {"lanes": lanes}


def _asked(
    ids: Sequence[str], scale: str, trials: int | None, changes: Sequence[str]
) -> tuple[list[Run], list[Work]]:
    """Return the runs that were asked for, and all their trials."""
    chosen, changed = find(ids), parsed(changes)
    runs = [_wanted(study, scale, trials, changed) for study in chosen]
    runs = _with_data(runs, skip=not set(SEVERAL).isdisjoint(ids))
    # A setting that only some studies have changes those; one that none has is a mistake.
    for name in set(changed) - {name for one in runs for name in one.changes}:
        chosen[0].works(scale, trials, {name: changed[name]})
    works = [
        w for one in runs for w in STUDIES[one.study].everything(one.scale, trials, one.changes)
    ]
    return runs, works


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _wanted(study: Study, scale: str, trials: int | None, changes: dict[str, object]) -> Run:
    """Return the run that makes one study, with the command that makes it again."""
    known = {name: value for name, value in changes.items() if name in study.settings}
    words = ["fissile", "run", study.id, "--scale", scale]
    words += ["--trials", str(trials)] if trials is not None else []
    for name, value in known.items():
        words += ["--set", f"{name}={value}"]
    return Run(study.id, scale, trials, known, shlex.join(words), _now())


def _look_in(folder: Path) -> None:
    """Look for data sets in a folder first, here and in the processes that compute."""
    if not folder.is_dir():
        raise FissileError(f"there is no folder {folder}; give one that holds data sets")
    others = os.environ.get("FISSILE_DATA", "")
    os.environ["FISSILE_DATA"] = os.pathsep.join(filter(None, (str(folder.resolve()), others)))


def _with_data(runs: list[Run], *, skip: bool) -> list[Run]:
    """Note which arrays each run will see; where they are missing, say so or leave the run out."""
    found, missing = [], []
    for one in runs:
        name = STUDIES[one.study].data(one.scale, one.changes)
        if name is None:
            found.append(one)
        elif skip and find_set(name) is None:
            missing.append(f"{one.study} (needs {name})")
        else:
            found.append(replace(one, changes={**one.changes, **meant(name)}))
    if missing:
        typer.echo(f"Left out for want of data: {', '.join(missing)}. See: fissile data", err=True)
    if not found:
        raise FissileError("there is nothing to run; see: fissile data")
    return found
