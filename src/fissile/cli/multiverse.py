"""The commands ``fissile multiverse``, for studies under every reading, and ``fissile claims``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fissile._common.cores import cores
from fissile._common.errors import FissileError
from fissile._common.progress import duration, number_of
from fissile.cli.common import (
    NAMES,
    OUT,
    Names,
    Out,
    SomeScale,
    cells,
    complete,
    show,
    table_of,
)
from fissile.cli.run import Asked, requested, trains
from fissile.lab import multiverse as lab
from fissile.lab.batching import default_jobs
from fissile.lab.plan import estimate
from fissile.lab.readings import QUESTIONS
from fissile.lab.results import nearest
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES, find
from fissile.lab.study import Study
from fissile.lab.trial import Work

MULTIVERSE = (
    "Examples: fissile multiverse · fissile multiverse codes capacity --full · "
    "fissile multiverse cifar100 --scale paper --device cuda"
)
CLAIMS = "Examples: fissile claims · fissile claims superposition --scale paper"
_NAMED = 5  # readings that are begun
Full = Annotated[bool, typer.Option("--full", help="The whole grid, not its singles and pairs.")]
Some = Annotated[
    list[str] | None,
    typer.Argument(help=f"{NAMES} By default, those of the Boolean task.", autocompletion=complete),
]


@trains
def multiverse(
    asked: Asked,
    names: Some = None,
    full: Full = False,
    to: Annotated[
        Path | None, typer.Option(help="A folder; by default multiverse in the store's.")
    ] = None,
) -> None:
    """Run studies under every reading of what the paper leaves open, and judge each claim by all.

    The default, and every reading with one or two other answers. Trials that readings share are
    computed once, and what is stored already is not computed again.
    """
    asked.check()
    ids = names or [one.id for one in STUDIES.values() if one.data("paper") is None and _open(one)]
    if closed := [one.id for one in find(ids) if not _open(one)]:
        raise FissileError(f"the paper leaves nothing open in {', '.join(closed)}; name others")
    runs, works = requested(ids, asked.scale.value, asked.trials, asked.changes or [])
    parts = [part for run in runs for part in lab.works(run, full=full).values()]
    works += [work for both in parts for part in both for work in part]
    kept = cells(list(dict.fromkeys(works)), asked.only or [])
    with Store(asked.out) as store:
        for run in runs:
            store.note_run(run)
        _announce(runs, len(parts), kept, store, asked)
        asked.train(kept, store)
        found = lab.gathered(store, runs, full=full, kept=set(kept) if asked.only else None)
        print_claims(found)
        if len(found.verdicts):
            typer.echo(f"The page is {lab.write(found, to or asked.out / 'multiverse')}")


def _announce(
    runs: Sequence[Run], readings: int, works: Sequence[Work], store: Store, asked: Asked
) -> None:
    """Print how many trials are to be computed, and how long that takes here."""
    missing, device = store.missing(works), asked.device or "cpu"
    workers = cores() if device == "cpu" else default_jobs(device, missing)
    time = ""
    if missing and asked.on.value == "here":
        seconds = estimate({"": missing}, store.times(), device, workers).seconds
        time = "" if seconds is None else f", about {duration(seconds)} on this machine"
    typer.echo(
        f"{number_of(readings, 'reading')} of {', '.join(run.study for run in runs)}: "
        f"{number_of(len(works), 'trial')}, of which {len(missing):,} are not stored{time}.",
        err=True,
    )


def claims(
    names: Names = None, scale: SomeScale = None, full: Full = False, out: Out = OUT
) -> None:
    """Print how each claim fares over the readings that are stored, and what decides it."""
    with Store(out, create=False) as store:
        runs = nearest(store, names or [], scale.value if scale else None)
        print_claims(lab.gathered(store, runs, full=full))


def print_claims(found: lab.Multiverse) -> None:
    """Print a row for each claim, the distances of the paper's tables, and what is missing."""
    for study, lacking in found.unfinished.items():
        whole = found.verdicts.loc[found.verdicts["study"] == study, "reading"].unique()
        if "default" in lacking:
            _print_unfinished(study, whole, lacking)
    if not len(found.verdicts):
        typer.echo("No reading is finished yet; see: fissile multiverse --help")
        return
    table = table_of("study", "claim", "kind", "default", "holds in", "decided by")
    for row in lab.summary(found.verdicts).to_dict("records"):
        share = f"{row['share']:.0%} of {row['readings']}{' †' if row['breaks'] else ''}"
        table.add_row(
            *(row[k] for k in ("study", "claim", "kind", "default")), share, row["decides"]
        )
    show(table)
    near = table_of("study", "table", "default", "nearest", "unit", "its reading")
    for row in lab.nearest_tables(found.tables).to_dict("records"):
        numbers = (f"{row[name]:.1f}".replace("nan", "–") for name in ("default", "distance"))
        near.add_row(row["study"], row["table"], *numbers, row["unit"], row["reading"])
    if near.row_count:
        show(near)
    typer.echo(f"{lab.THRESHOLDS} †: no reading meets the paper's criterion of 95 %.")
    typer.echo(lab.counted(found.verdicts))


def _print_unfinished(study: str, whole: Sequence[str], lacking: Mapping[str, str]) -> None:
    """Print which readings of a study are whole, and what the default and the nearest lack."""
    parts = [f"{reading} lacks {what}" for reading, what in [*lacking.items()][:_NAMED]]
    parts += [f"{len(lacking) - _NAMED} more are begun"] if len(lacking) > _NAMED else []
    typer.echo(f"{study}: whole is {', '.join(whole) or 'no reading'}; {'; '.join(parts)}.")


def _open(study: Study) -> bool:
    return any(question.concerns(study) for question in QUESTIONS.values())
