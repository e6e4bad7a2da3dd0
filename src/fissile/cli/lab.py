"""The command line of the lab: run the paper's studies, look at them, report on them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import fissile
from fissile._common.errors import FissileError, printable
from fissile._common.files import atomic_write
from fissile._common.progress import duration, number_of
from fissile.cli import data, embed, pack, play, try_file
from fissile.cli.common import (
    OUT,
    Made,
    Names,
    Out,
    SomeScale,
    Under,
    complete,
    parsed,
    print_means,
    print_status,
    print_verdicts,
    show,
    store_in,
    table_of,
    words_of,
)
from fissile.cli.multiverse import CLAIMS, MULTIVERSE, claims, multiverse
from fissile.cli.run import PLAN, RUN, plan, run
from fissile.lab.results import Results, load, matching, nearest, nothing, readable, shown, unshown
from fissile.lab.store import Store
from fissile.lab.studies import SEVERAL, STUDIES, find, is_file
from fissile.lab.study import SCALES, Study

app = typer.Typer(
    help="The lab of fissile: every figure and table of the paper from one command.",
    epilog="Begin with: fissile run codes && fissile report",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FORMATS = ("table", "csv", "json", "parquet", "trials")
Format = Enum("Format", {name: name for name in FORMATS}, type=str)  # type: ignore[misc]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fissile {fissile.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The lab of fissile: every figure and table of the paper from one command."""


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
app.command(epilog=PLAN)(plan)
app.command(epilog=MULTIVERSE)(multiverse)
app.command(epilog=CLAIMS)(claims)
app.add_typer(data.app, name="data")
app.command(help=embed.HELP, epilog=embed.EPILOG)(embed.embed)
app.command("try", epilog=try_file.TRY)(try_file.try_file)
app.command(epilog=try_file.FIT)(try_file.fit)
app.command(epilog=play.EPILOG)(play.play)
app.command(epilog=pack.PACK)(pack.pack)
app.command(epilog=pack.UNPACK)(pack.unpack)
app.command(epilog=pack.BENCH)(pack.bench)


@app.command(
    epilog="Examples: fissile take from-the-cluster --out fissile-lab · "
    "fissile take results/trials/*.parquet"
)
def take(
    others: Annotated[
        list[Path],
        typer.Argument(help="Folders of other stores, or files of trials (--format trials)."),
    ],
    out: Out = OUT,
) -> None:
    """Take over what other stores have finished, such as one that was filled elsewhere."""
    from fissile.lab.store.parquet import TrialsFile

    with Store(out) as store:
        before = store.count()
        for other in others:
            if other.is_dir() or not other.exists():
                with Store(other, create=False) as theirs:
                    store.take(theirs)
            else:
                store.take(TrialsFile(other))
        new = store.count() - before
        typer.echo(f"{number_of(new, 'new trial')}; {out} holds {store.count():,}.")


@app.command("new-study", epilog="Example: fissile new-study my_study.py")
def new_study(
    path: Annotated[Path, typer.Argument(help="The file; it must not be there.")],
) -> None:
    """Write a study of your own to begin with: it runs at once, and says what to change."""
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
    if not is_file(path.name) or not name or name in (*STUDIES, *SEVERAL):
        raise FissileError(f"{path} is no name for a study's file; give one like my_study.py")
    text = resources.files("fissile.lab").joinpath("new_study.txt").read_text("utf-8")
    try:
        with open(path, "x", encoding="utf-8", newline="\n") as file:
            file.write(text.replace("my-study", name).replace("my_study.py", path.name))
    except FileExistsError:
        raise FissileError(f"{path} is there already; give another name") from None
    except OSError as error:
        raise FissileError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"Run it with: fissile run {shlex.quote(str(path))} --scale smoke")


@app.command(
    epilog="Examples: fissile status --out fissile-lab · fissile status codes · "
    "fissile status ./my_study.py"
)
def status(
    names: Names = None,
    scale: SomeScale = None,
    changes: Made = None,
    reading: Under = None,
    out: Out = OUT,
) -> None:
    """List the runs of the store by name, and how far each is."""
    with Store(out, create=False) as store:
        only = scale.value if scale else None
        runs = matching(store, names or [], only, parsed(words_of(changes, reading)))
        known = [one for one in runs if readable(one)]
        print_status(store, known)
        for one in runs:
            if one not in known:
                typer.echo(printable(unshown(one)))
        if not runs:
            typer.echo("There is no such run; see: fissile run --help")


@app.command(
    epilog="Examples: fissile results capacity · fissile results codes-2 > codes.csv · "
    "fissile results codes --set clauses=16 · fissile results ./my_study.py · "
    "fissile results superposition --format parquet --to gains.parquet · "
    "fissile results codes --format trials --to codes.parquet"
)
def results(
    names: Annotated[
        list[str],
        typer.Argument(
            help="A run or a study; for a run of a study in a file, the file and the run.",
            autocompletion=complete,
        ),
    ],
    format: Annotated[
        Format | None,
        typer.Option(
            help="By default a table of means on the terminal, and csv elsewhere; trials is what "
            "fissile take reads."
        ),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="A file; by default the terminal.")] = None,
    scale: SomeScale = None,
    changes: Made = None,
    reading: Under = None,
    out: Out = OUT,
) -> None:
    """Print a run's results: means by arm, or one row per setting, arm, trial and measure."""
    from fissile.lab.frame import tidy

    for name in set(names).intersection(SEVERAL):
        raise FissileError(
            f"{name} stands for several studies, and results are of one: "
            f"{', '.join(one.id for one in find([name]))}"
        )
    with Store(out, create=False) as store:
        only = scale.value if scale else None
        runs = nearest(store, names, only, parsed(words_of(changes, reading)))
        if len(runs) > 1:
            raise FissileError(f"results are of one run; name one of {', '.join(map(shown, runs))}")
        name, found = " ".join(names), load(store, runs[0]) if runs else None
        if found is None or not found.rows:
            what = f"{out} holds no such results of {name}"
            raise FissileError(nothing(store, what, f"fissile run {name}"))
        if format is not None and format.value == "trials":
            _keep(store, found, to)
            return
    for_reading = to is None and sys.stdout.isatty()
    kind = format.value if format else "table" if for_reading else "csv"
    if kind == "table" and to is not None:
        raise FissileError(
            "--format table is for the terminal; give csv, json, parquet or trials with --to"
        )
    if kind == "table":
        typer.echo(shown(found.run))
        print_means(found)
        print_verdicts(found)
    else:
        _write(tidy(found.frame), kind, to)
    if found.others:
        typer.echo(f"Not shown: {', '.join(map(shown, found.others))}.", err=True)


@app.command(
    epilog="Examples: fissile report --out fissile-lab --to report · fissile report frontier · "
    "fissile report codes-2 · fissile report ./my_study.py"
)
def report(
    names: Names = None,
    to: Annotated[
        Path | None, typer.Option(help="A folder; by default report in the store's.")
    ] = None,
    scale: SomeScale = None,
    changes: Made = None,
    reading: Under = None,
    out: Out = OUT,
) -> None:
    """Write one HTML page with every claim, figure and table, and the figures beside it.

    Of several runs of a study, it shows the one nearest to the paper's scale and settings.
    """
    from fissile.lab.report import write

    told, only = parsed(words_of(changes, reading)), scale.value if scale else None
    with Store(out, create=False) as store:
        page = write(store, to or out / "report", ids=names or [], scale=only, changes=told)
        runs = nearest(store, names or [], only, told)
        here = {run.study for run in runs}
        others = [run for run in store.runs() if run.study in here and run not in runs]
        hidden = [run for run in store.runs() if not names and not readable(run)]
    typer.echo(f"The report is in {page}")
    for one in hidden:
        typer.echo(printable(unshown(one)))
    if others:
        typer.echo(f"Not shown: {', '.join(map(shown, others))}; name one to see it.")


@app.command(
    epilog="Examples: fissile compare codes-1 codes-2 --to both · "
    "fissile compare ./my_study.py my-study-1 my-study-2"
)
def compare(
    names: Annotated[
        list[str],
        typer.Argument(help="Two or more runs, and the files of their studies if they are in any."),
    ],
    measure: Annotated[str, typer.Option(help="What to compare.")] = "accuracy",
    to: Annotated[
        Path | None, typer.Option(help="A folder for a page, its figure and its numbers.")
    ] = None,
    out: Out = OUT,
) -> None:
    """Show runs side by side: their settings, and the differences between paired trials."""
    from fissile.lab.compare import differences, settings, texts, write

    files = {name: study.id for name in filter(is_file, names) for study in find([name])}
    with Store(out, create=False) as store:
        named = {run.study for run in store.runs() if run.name in names}
        names = [name for name in names if files.get(name) not in named]
        if len(names) < 2:
            raise FissileError("fissile compare takes two runs or more; see: fissile status")
        found = [load(store, one) for name in names for one in nearest(store, [name])]
    table = differences(found, measure)
    first = found[0].run.name
    apart = table_of("setting", *(shown(one.run) for one in found))
    for row in settings(found):
        apart.add_row(*row)
    show(apart)
    title = f"{measure}: differences from {first}, by paired trials"
    printed = table_of("cell", "arm", "run", first, "mean", "difference", "95 %", "n", title=title)
    for row in texts(table):
        printed.add_row(*row)
    show(printed)
    for one in found:
        if one.note:
            typer.echo(f"{one.run.name}: {one.note}")
    if to is not None:
        typer.echo(f"The comparison is in {write(found, to, measure)}")


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


def _keep(store: Store, found: Results, to: Path | None) -> None:
    """Write the trials of a run as another store can take them over."""
    from fissile.lab.store.parquet import write

    if to is None:
        raise FissileError("--format trials is a file; give its name with --to")
    with _writing(to, "wb") as file:
        write(file, store, found.run, [work.key for work in (*found.works, *found.converged)])


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
        raise FissileError(f"cannot write the table: {error.strerror or error}") from None
