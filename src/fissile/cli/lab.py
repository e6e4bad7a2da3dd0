"""The command line of the lab: run the paper's studies, look at them, report on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markdown import Markdown

from fissile._common.errors import FissileError
from fissile._common.files import atomic_write
from fissile._common.progress import duration, printable
from fissile.bank import check_device
from fissile.cli.common import (
    NAMES,
    OUT,
    Jobs,
    Out,
    Scale,
    complete,
    here,
    interruptible,
    print_status,
    show,
    store_in,
    table_of,
)
from fissile.cli.run import RUN, run
from fissile.lab.results import latest, load, readable
from fissile.lab.run import Bar
from fissile.lab.run import run as run_trials
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES, find
from fissile.lab.study import SCALES, Study

app = typer.Typer(
    help="The lab of fissile: every figure and table of the paper from one command.",
    epilog="Begin with: fissile run all --scale quick && fissile report",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Format = Enum("Format", {name: name for name in ("csv", "json", "parquet")}, type=str)  # type: ignore[misc]


SomeScale = Annotated[Scale | None, typer.Option(help="Only runs of this scale.")]


@app.command(epilog="Example: fissile studies --out fissile-lab")
def studies(out: Out = OUT) -> None:
    """List the studies, what each costs at each scale, and what is already done."""
    table = table_of("study", "what the paper shows", *SCALES)
    with store_in(out) as store:
        for study in STUDIES.values():
            costs = [_cost(study, scale, store) for scale in SCALES]
            table.add_row(study.id, study.artefact, *costs)
    show(table)
    typer.echo(
        "Trials, the estimated time on two processor cores, and the share that is done. Trials "
        "that studies share are computed once."
    )


app.command(epilog=RUN)(run)


@app.command(epilog="Example: fissile take from-the-cluster --out fissile-lab")
def take(
    other: Annotated[Path, typer.Argument(help="The folder of another store.")], out: Out = OUT
) -> None:
    """Take over what another store has finished, such as one that was filled elsewhere."""
    with Store(other, create=False) as theirs, Store(out) as store:
        new = store.take(theirs)
        typer.echo(f"{new:,} trials are new; {out} holds {store.count():,}.")


@app.command(epilog="Example: fissile status --out fissile-lab")
def status(out: Out = OUT) -> None:
    """Show every run of the store: how far it is, and what became of its claims."""
    with Store(out, create=False) as store:
        runs = store.runs()
        known = [one for one in runs if readable(one)]
        print_status(load(store, one) for one in known)
        for one in runs:
            if one not in known:
                typer.echo(printable(f"Made by another version of fissile: {one.command}"))


@app.command(
    epilog="Examples: fissile results capacity > capacity.csv · "
    "fissile results superposition --format parquet --to gains.parquet"
)
def results(
    study: Annotated[str, typer.Argument(help="A study.", autocompletion=complete)],
    format: Annotated[Format, typer.Option(help="csv, json or parquet.")] = "csv",  # type: ignore[assignment]
    to: Annotated[Path | None, typer.Option(help="A file; by default the terminal.")] = None,
    scale: SomeScale = None,
    out: Out = OUT,
) -> None:
    """Print a study's results: one row per setting, arm, trial and measure."""
    from fissile.lab.frame import tidy

    if len(find([study])) > 1:
        raise FissileError(
            f"{study} stands for several studies, and results are of one: "
            f"{', '.join(one.id for one in find([study]))}"
        )
    with Store(out, create=False) as store:
        runs = latest(store, [study], scale.value if scale else None)
        found = load(store, runs[0]) if runs else None
    if found is None or not found.rows:
        raise FissileError(f"{out} holds no results of {study}; run: fissile run {study}")
    _write(tidy(found.frame), format.value, to)


@app.command(
    epilog="Examples: fissile report --out fissile-lab --to report · fissile report frontier"
)
def report(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help=f"{NAMES} By default, whatever has run.", autocompletion=complete),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="A folder; by default report in the store's.")
    ] = None,
    scale: SomeScale = None,
    out: Out = OUT,
) -> None:
    """Write one HTML page with every claim, figure and table, and the figures beside it."""
    from fissile.lab.report import write

    wanted = ids or []
    find(wanted)
    with Store(out, create=False) as store:
        page = write(store, to or out / "report", ids=wanted, scale=scale.value if scale else None)
    typer.echo(f"The report is in {page}")


@app.command(
    epilog="Examples: fissile fidelity --scale quick · fissile fidelity --scale paper --to found.md"
)
def fidelity(
    scale: Annotated[Scale, typer.Option(help="How wide to search.")] = "quick",  # type: ignore[assignment]
    device: Annotated[str, typer.Option(help="Where to train.")] = "cpu",
    jobs: Jobs = None,
    to: Annotated[Path | None, typer.Option(help="A Markdown file; else the terminal.")] = None,
    out: Out = OUT,
) -> None:
    """Fit the settings that the paper leaves open to its published tables."""
    from fissile.lab.fidelity import compared, markdown, works

    check_device(device)
    with Store(out) as store, interruptible(store), Bar() as bar:
        with here(jobs, device) as backend:
            tally = run_trials(works(scale.value), store, backend, watcher=bar)
        fits = compared(store, scale.value)
    text = markdown(fits)
    if to is None:
        Console().print(Markdown(text))
    else:
        with _writing(to, "w") as file:
            file.write(text)
    typer.echo(f"{tally.text()}; {len(fits):,} readings compared with the paper.")


@app.command(epilog="Example: fissile theory --literals 32 --neurons 64 --alpha 2 --simulate 1000")
def theory(
    literals: Annotated[int, typer.Option(help="Inputs of the formula.")] = 32,
    size: Annotated[int, typer.Option(help="Literals in a clause.")] = 4,
    neurons: Annotated[int, typer.Option(help="Neurons of the dense network.")] = 8,
    alpha: Annotated[int, typer.Option(help="Children of a neuron.")] = 2,
    eps: Annotated[float, typer.Option(help="How likely a missed clause may be.")] = 0.05,
    simulate: Annotated[int, typer.Option(min=2, help="Networks to draw.")] = 1000,
) -> None:
    """Print coverage, collisions and required width: exact, as the paper has it, and sampled."""
    from fissile.lab.compute import compute
    from fissile.lab.trial import Sampling

    work = Sampling(literals, size, neurons, alpha, simulate, eps)
    found = compute([work])[0].measures
    table = table_of("", "exact", "the paper's approximation", "union bound", "sampled ± error")
    for name, title in (("coverage", "every clause covered"), ("collision_ratio", "collisions")):
        sampled = f"{found[name + '_simulated']:.4g} ± {found[name + '_error']:.2g}"
        bound = f"{found['coverage_bound']:.4g}" if name == "coverage" else ""
        table.add_row(title, f"{found[name]:.4g}", f"{found[name + '_approx']:.4g}", bound, sampled)
    widths = (f"{found['width']:g}", f"{found['width_approx']:.4g}", f"{found['width_bound']:g}")
    table.add_row(f"neurons for {1 - eps:.0%} coverage", *widths, "")
    show(table)
    typer.echo("Collisions are relative to the dense network's.")


# --- helpers


def _cost(study: Study, scale: str, store: Store | None) -> str:
    """Say how many trials a scale has, how long they take, and how many are done."""
    asked = [] if store is None else store.runs()  # newest first; it knows which arrays were here
    changes = next((r.changes for r in asked if (r.study, r.scale) == (study.id, scale)), {})
    works = study.everything(scale, changes=changes)
    done = 0 if store is None else len(store.finished(work.key for work in works))
    cost = f"{len(works):,}, {duration(sum(work.cost for work in works))}"
    return f"{cost}, {100 * done // len(works)} % done" if done else cost


def _write(frame: Any, format: str, to: Path | None) -> None:
    """Write a table to a file or, text formats only, to the terminal."""
    if to is None and format == "parquet" and sys.stdout.isatty():
        raise FissileError("parquet is not for a terminal; give a file with --to")
    with _writing(to, "wb" if format == "parquet" else "w") as file:
        if format == "csv":
            frame.to_csv(file, index=False)
        elif format == "json":
            frame.to_json(file, orient="records", indent=1)
        else:
            frame.to_parquet(file, index=False)
        sys.stdout.flush()


@contextmanager
def _writing(to: Path | None, mode: Literal["wb", "w"]) -> Iterator[Any]:
    """Open a file that is replaced whole or not at all, or else the terminal or a pipe."""
    try:
        if to is None:
            yield sys.stdout if mode == "w" else sys.stdout.buffer
        elif to.exists() and not to.is_file():  # a pipe or a device, which nothing may replace
            with open(to, mode) as file:
                yield file
        else:
            with atomic_write(to, mode) as file:
                yield file
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise FissileError(f"cannot write {to or 'the table'}: {error.strerror or error}") from None
