"""What the commands of the lab share: their options, who computes, and how results are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fissile._common.errors import FissileError, printable
from fissile._common.progress import duration, number_of
from fissile.lab.batching import Local, default_jobs, pool
from fissile.lab.frame import labelled
from fissile.lab.readings import NAMED, QUESTIONS
from fissile.lab.results import Results, study_of
from fissile.lab.store import Run, Store
from fissile.lab.studies import SEVERAL, STUDIES
from fissile.lab.study import SCALES
from fissile.lab.trial import Work


def complete(incomplete: str) -> list[str]:
    """Return the names that a word may become."""
    return [name for name in (*STUDIES, *SEVERAL) if name.startswith(incomplete)]


Scale = Enum("Scale", {name: name for name in SCALES}, type=str)  # type: ignore[misc]
NAMES = (
    "Studies; several at once: frontier or ablation, on every data set; or all of them: all. A "
    "file such as ./my_study.py is run as Python; fissile new-study writes one."
)
Ids = Annotated[list[str], typer.Argument(help=NAMES, autocompletion=complete)]
Out = Annotated[Path, typer.Option(help="The folder of the store.", envvar="FISSILE_LAB")]
SomeScale = Annotated[Scale | None, typer.Option(help="Only runs of this scale.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"Runs, as `fissile status` calls them. {NAMES} By default, whatever has run.",
        autocompletion=complete,
    ),
]
Made = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Only runs with this setting."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Batches side by side; by default 1, on a GPU up to 8, on Ray all workers."
    ),
]
Under = Annotated[
    str | None,
    typer.Option(
        "--reading",
        help=f"A reading of the paper: {', '.join(NAMED)}, or QUESTION=OPTION,... of the questions "
        f"{', '.join(QUESTIONS)}.",
    ),
]
OUT = Path("fissile-lab")


def store_in(out: Path) -> AbstractContextManager[Store | None]:
    """Open the store of a folder, if there is one."""
    return Store(out, create=False) if (out / "trials.sqlite").exists() else nullcontext()


@contextmanager
def here(
    jobs: int | None, device: str, works: Sequence[Work] = (), every: float | None = None
) -> Iterator[Local]:
    """Compute on this machine, in this process or in several."""
    count = default_jobs(device, works) if jobs is None else jobs
    with pool(count) if count > 1 else nullcontext() as executor:
        yield Local(device, executor=executor, slots=count, every=every)


@contextmanager
def interruptible(store: Store) -> Iterator[None]:
    """Say what Ctrl-C has left, and end with its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        stored = f"{store.path} holds {number_of(store.count(), 'trial')}"
        typer.echo(printable(f"Stopped. {stored}; the same command goes on."), err=True)
        raise typer.Exit(130) from None


def print_status(store: Store, runs: Iterable[Run]) -> None:
    """Print how far runs are, a row for each; no trial's results are read."""
    table = table_of("run", "scale", "trials", "changed", "started", "done", "time")
    for one in runs:
        asked, keys = study_of(one).keys(one.scale, one.trials, one.changes)
        stored, seconds = store.progress(keys)
        trials = "" if one.trials is None else str(one.trials)
        changes = " ".join(f"{name}={value}" for name, value in one.told.items())
        done = f"{stored:,} of {asked:,}"
        table.add_row(
            one.name, one.scale, trials, changes, one.started[:10], done, duration(seconds)
        )
    if not table.row_count:
        return
    show(table)
    typer.echo(
        "The time is that of the trials, wherever they ran. What became of a run's claims: "
        "fissile results RUN"
    )


def print_means(found: Results) -> None:
    """Print the mean and standard error of every cell and arm."""
    for measure, table in found.means().items():
        arms = list(dict.fromkeys(table["arm"]))
        title = f"{labelled(measure)}, mean ± standard error"
        title += f" of {found.done}" if found.done else ""
        printed = table_of(*map(labelled, found.along), *arms, title=title)
        for place, part in table.groupby(found.along, sort=True):
            texts = {r["arm"]: spread(r["mean"], r["error"]) for r in part.to_dict("records")}
            printed.add_row(*map(str, place), *(texts.get(arm, "") for arm in arms))
        show(printed)
    if found.note:
        typer.echo(found.note)


def spread(mean: float, error: float) -> str:
    """Return a mean and its standard error, which one trial does not have."""
    digits = 2 if abs(mean) >= 1 else 4
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if error >= 0 else "")


def print_verdicts(found: Results) -> None:
    """Print what became of a study's claims."""
    table = table_of("claim", "verdict", "numbers", title=f"{found.study.id}: {found.study.title}")
    for claim, verdict in found.verdicts:
        table.add_row(claim.text, verdict.status, verdict.numbers)
    show(table)


def table_of(*columns: str, title: str = "", numbers: Sequence[str] = ()) -> Table:
    """Return a table whose names and columns of numbers are never cut."""
    table = _Plain(title=_plain(title), box=box.SIMPLE_HEAD, title_justify="left")
    for place, name in enumerate(columns):
        whole = name in numbers or (place == 0 and name in ("study", "run", "set"))
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify, no_wrap=whole, overflow="fold")
    return table


def _plain(text: str) -> Text:
    return Text(printable(text))


class _Plain(Table):
    """A table whose cells are what they say: what comes from data is no markup and no command."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_plain, cells), **options)


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


def words_of(changes: Sequence[str] | None, reading: str | None) -> list[str]:
    """Return ``--set`` options, and ``--reading`` as one of them."""
    return [*(changes or []), *([] if reading is None else [f"reading={reading}"])]


def parsed(changes: Sequence[str]) -> dict[str, object]:
    """Read ``--set`` options: numbers, ``none``, ``true`` and ``false``, the rest as words."""
    values: dict[str, object] = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise FissileError(f"--set takes KEY=VALUE, not {text!r}; for example --set train=5000")
        values[name.replace("-", "_")] = _value(value)
    return values


def cells(works: list[Work], only: Sequence[str]) -> list[Work]:
    """Return the trials of the cells that were asked for."""
    asked = works
    for text in only:
        name, equals, values = text.partition("=")
        known = {column for work in works for column in work.columns()}
        if not equals or name not in known:
            raise FissileError(
                f"--only takes KEY=VALUE,..., not {text!r}; keys are {', '.join(sorted(known))}"
            )
        wanted = [_value(value) for value in values.split(",")]
        works = [work for work in works if work.columns().get(name) in wanted]
        if not works:
            there = dict.fromkeys(str(work.columns().get(name)) for work in asked)
            raise FissileError(f"there is no cell with {text}; {name} is one of {', '.join(there)}")
    return works


def _value(text: str) -> object:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
