"""The command ``fissile plan``: how long a run will take, and what it needs, before it begins."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fissile.cli.common import OUT, Ids, Out, Scale, cells, parsed, show, table_of
from fissile.lab.plan import Estimate, duration
from fissile.lab.plan import plan as planned
from fissile.lab.store import Store
from fissile.lab.studies import find
from fissile.lab.study import Study
from fissile.lab.trial import Work

__all__ = ["PLAN", "plan"]

PLAN = (
    "Examples: fissile plan superposition --scale paper --workers 4 · "
    "fissile plan imagenet1k --scale paper --device cuda --workers 8 --workers 1000 · "
    "fissile plan all --scale paper --device cuda --out fissile-lab --json"
)
#: What a run notes of the arrays it saw; results on others are other results.
_NOTED = ("fingerprint", "encoder")

#: Where time goes, in words.
_PARTS = {
    "start": "start-up",
    "data": "data",
    "set_up": "set-up",
    "training": "training",
    "waiting": "waiting",
}

Device = Enum("Device", {name: name for name in ("cpu", "cuda")}, type=str)  # type: ignore[misc]


def plan(
    ids: Ids,
    scale: Annotated[Scale, typer.Option(help="From seconds to the paper's own grid.")] = "quick",  # type: ignore[assignment]
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per setting; by default the scale's.")
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Workers: a core or a GPU each, with one process. Give it again for another "
            "column; by default this machine's cores, or one GPU.",
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="What a worker has.")] = "cpu",  # type: ignore[assignment]
    every: Annotated[
        float | None,
        typer.Option(min=0, help="Store results after about so many seconds of work."),
    ] = None,
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
    """Say how long a run will take and what it needs, from runs that were measured.

    What the store holds already is left out. Data sets need not be here.
    """
    studies = _open(find(ids), scale.value, trials, parsed(changes or []), only or [], out)
    if not any(studies.values()):
        if as_json:
            typer.echo(json.dumps({"plans": []}))
        else:
            typer.echo(f"There is nothing to do: {out} holds every trial.")
        return
    counts = workers or [os.cpu_count() or 1 if device.value == "cpu" else 1]
    found = [planned(studies, count, device.value, every=every) for count in counts]
    if as_json:
        typer.echo(json.dumps({"plans": [one.plain() for one in found]}))
    else:
        _print(found)


def _open(
    studies: Sequence[Study],
    scale: str,
    trials: int | None,
    changes: dict[str, object],
    only: Sequence[str],
    out: Path,
) -> dict[str, list[Work]]:
    """Return the trials of every study that the store does not hold."""
    for name in set(changes).difference(*(study.settings for study in studies)):
        studies[0].works(scale, trials, {name: changes[name]})  # which says what is wrong with it
    store = Store(out, create=False) if (out / "trials.sqlite").exists() else None
    works: dict[str, list[Work]] = {}
    for study in studies:
        known = {name: value for name, value in changes.items() if name in study.settings}
        works[study.id] = study.everything(
            scale, trials, _noted(store, study, scale, known) | known
        )
    wanted = set(cells([work for each in works.values() for work in each], only))
    if store is None:
        return {study: [w for w in each if w in wanted] for study, each in works.items()}
    with store:
        done = store.finished(work.key for work in wanted)
    return {
        study: [work for work in each if work in wanted and work.key not in done]
        for study, each in works.items()
    }


def _noted(
    store: Store | None, study: Study, scale: str, changes: dict[str, object]
) -> dict[str, object]:
    """Return which arrays the store's newest run on the same data saw, to find its trials."""
    runs = [] if store is None else store.runs()
    data = study.data(scale, changes)
    mine = (
        run.changes
        for run in runs
        if (run.study, run.scale) == (study.id, scale) and study.data(scale, run.changes) == data
    )
    return {name: value for name, value in next(mine, {}).items() if name in _NOTED}


# --- as tables


def _print(found: Sequence[Estimate]) -> None:
    first = found[0]
    unit = "GPU" if first.device == "cuda" else "core"
    counts = [f"{one.workers:,} {unit}{'s' if one.workers > 1 else ''}" for one in found]
    table = table_of("", *counts, title=f"{first.trials:,} trials on {first.measured_on}")
    for name, values in _rows(found, unit):
        table.add_row(name, *values)
    show(table)
    if len(first.studies) > 1:
        show(_by_study(first))
    for name in ("notes", "advice"):
        _say(found, name)


def _rows(found: Sequence[Estimate], unit: str) -> list[tuple[str, list[str]]]:
    rows = [
        ("time", [_time(one) for one in found]),
        (f"{unit}-hours", [f"{one.work / 3600:,.2f}" for one in found]),
        ("batches", [f"{one.batches:,}" for one in found]),
        ("longest batch", [duration(one.longest) for one in found]),
        ("idle workers", [f"{one.workers - one.busy:,}" for one in found]),
    ]
    rows += [
        ("memory: networks, data", [_bytes(one.device_bytes) for one in found]),
        ("memory: process", [_bytes(one.process_bytes) for one in found]),
        ("data on a machine", [_bytes(one.data_bytes) for one in found]),
    ]
    for name, title in _PARTS.items():
        shares = [getattr(one.parts, name) / one.wall for one in found]
        rows.append((f"share: {title}", [f"{share:.0%}" for share in shares]))
    return rows


def _time(one: Estimate) -> str:
    if one.low is None or one.high is None:
        return f"{duration(one.wall)} (in part a guess)"
    return f"{duration(one.wall)} ({duration(one.low)} to {duration(one.high)})"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _by_study(one: Estimate) -> Table:
    table = table_of("study", "share of the work")
    for study, share in one.studies.items():
        table.add_row(study, f"{share:.1%}")
    return table


def _say(found: Sequence[Estimate], name: str) -> None:
    """Print sentences, each once; what holds for one column only says for which."""
    console = Console(soft_wrap=True, highlight=False)
    for sentence in dict.fromkeys(text for one in found for text in getattr(one, name)):
        mine = [one for one in found if sentence in getattr(one, name)]
        front = "" if len(mine) == len(found) else ", ".join(f"{one.workers:,}" for one in mine)
        console.print(f"{front}: {sentence}" if front else sentence, markup=False)
