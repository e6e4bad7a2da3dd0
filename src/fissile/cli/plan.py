"""The command ``fissile plan``: how long a run will take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from fissile._common.cores import cores
from fissile._common.progress import duration
from fissile.cli.common import OUT, Ids, Out, Scale, cells, parsed, show, table_of
from fissile.lab.batching import default_jobs
from fissile.lab.plan import Estimate
from fissile.lab.plan import plan as planned
from fissile.lab.store import Store
from fissile.lab.studies import find
from fissile.lab.study import Study
from fissile.lab.trial import Work

__all__ = ["PLAN", "plan"]

PLAN = (
    "Examples: fissile plan superposition --scale paper · "
    "fissile plan imagenet1k --scale paper --device cuda --workers 8 · "
    "fissile plan all --scale paper --out fissile-lab --json"
)
#: What a run notes of the arrays it saw; results on others are other results.
_NOTED = ("fingerprint", "encoder")

Device = Enum("Device", {name: name for name in ("cpu", "cuda")}, type=str)  # type: ignore[misc]


def plan(
    ids: Ids,
    scale: Annotated[Scale, typer.Option(help="From seconds to the paper's own grid.")] = "quick",  # type: ignore[assignment]
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per setting; by default the scale's.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores, or processes on GPUs; by default as many as a run here has."
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to train.")] = "cpu",  # type: ignore[assignment]
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Only some cells, e.g. neurons=4,8."),
    ] = None,
    out: Out = OUT,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train=5000."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate how long a run will take, from the times of stored trials.

    Trials that the store holds are left out. Kinds of trials that it has no times for are tried
    for some seconds. Data sets need not be here.
    """
    store = Store(out, create=False) if (out / "trials.sqlite").exists() else None
    all_of = _asked(find(ids), scale.value, trials, parsed(changes or []), only or [], store)
    works = [work for each in all_of.values() for work in each]
    missing = all_of
    if store is not None:
        missing = {study: store.missing(each) for study, each in all_of.items()}
    if workers is None:
        workers = cores() if device.value == "cpu" else default_jobs(device.value, works)
    estimate = planned(missing, store.times() if store else (), device.value, workers)
    if store is not None:
        store.close()
    if as_json:
        counts = {study: len(each) for study, each in missing.items()}
        told = asdict(estimate) | {"error": estimate.error and estimate.error._asdict()}
        typer.echo(json.dumps({**told, "missing": counts}))
    elif not estimate.trials:
        typer.echo(f"There is nothing to do: {out} holds every trial.")
    else:
        _print(estimate, all_of, missing)


def _asked(
    studies: Sequence[Study],
    scale: str,
    trials: int | None,
    changes: dict[str, object],
    only: Sequence[str],
    store: Store | None,
) -> dict[str, list[Work]]:
    """Return the trials of every study."""
    for name in set(changes).difference(*(study.settings for study in studies)):
        studies[0].works(scale, trials, {name: changes[name]})  # which raises an error
    works: dict[str, list[Work]] = {}
    for study in studies:
        known = {name: value for name, value in changes.items() if name in study.settings}
        works[study.id] = study.everything(
            scale, trials, _noted(store, study, scale, known) | known
        )
    wanted = set(cells([work for each in works.values() for work in each], only))
    return {study: [work for work in each if work in wanted] for study, each in works.items()}


def _noted(
    store: Store | None, study: Study, scale: str, changes: dict[str, object]
) -> dict[str, object]:
    """Return which arrays the store's newest run on the same data saw, to find its trials."""
    data = study.data(scale, changes)
    for run in store.runs() if store else ():
        if (run.study, run.scale) == (study.id, scale) and study.data(scale, run.changes) == data:
            return {name: value for name, value in run.changes.items() if name in _NOTED}
    return {}


def _print(
    estimate: Estimate,
    all_of: Mapping[str, Sequence[Work]],
    missing: Mapping[str, Sequence[Work]],
) -> None:
    table = table_of("study", "trials", "missing", "time")
    for study, seconds in estimate.studies.items():
        counts = f"{len(all_of[study]):,}", f"{len(missing[study]):,}"
        table.add_row(study, *counts, _time(seconds))
    show(table)
    typer.echo(
        f"All {estimate.trials:,} on {estimate.workers:,} workers: {_time(estimate.seconds)}."
    )
    if estimate.unknown:
        typer.echo(
            f"No time is known, and none can be tried here, of: {', '.join(estimate.unknown)}."
        )
    for batches, source in ((0, "a short trial run"), (1, "one stored batch")):
        kinds = [kind for kind, rate in estimate.rates.items() if rate.batches == batches]
        if kinds:
            typer.echo(f"From {source}, with an unknown error: {', '.join(kinds)}.")
    if error := estimate.error:
        typer.echo(
            f"Stored batches took {error.median:.2f} times as long as the other batches' times say "
            f"(median of {error.batches:,}; 90 % took {error.low:.2f} to {error.high:.2f} times)."
        )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)
