"""The command line of the lab: run the paper's studies, look at them, report on them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fissile.bank import check_device
from fissile.data.catalogue import find as find_set
from fissile.errors import FissileError
from fissile.lab.classifier import meant
from fissile.lab.pool import default_jobs, pool
from fissile.lab.progress import Bar
from fissile.lab.results import Results, latest, load, readable
from fissile.lab.run import run as run_trials
from fissile.lab.store import Run, Store
from fissile.lab.studies import SEVERAL, STUDIES, find
from fissile.lab.study import SCALES, Study
from fissile.lab.trial import Work

__all__ = ["app"]

app = typer.Typer(
    help="The lab of fissile: every figure and table of the paper from one command.",
    epilog="Begin with: fissile run all --scale quick && fissile report",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Scale = Enum("Scale", {name: name for name in SCALES}, type=str)  # type: ignore[misc]
Format = Enum("Format", {name: name for name in ("csv", "json", "parquet")}, type=str)  # type: ignore[misc]


def _complete(incomplete: str) -> list[str]:
    return [name for name in (*STUDIES, *SEVERAL) if name.startswith(incomplete)]


def _complete_one(incomplete: str) -> list[str]:
    return [name for name in STUDIES if name.startswith(incomplete)]


_NAMES = "Studies; several at once: frontier or ablation, on every data set; or all of them: all."
Ids = Annotated[list[str], typer.Argument(help=_NAMES, autocompletion=_complete)]
Out = Annotated[Path, typer.Option(help="The folder of the store.", envvar="FISSILE_LAB")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes side by side; by default 1, on a GPU up to 8."),
]
SomeScale = Annotated[Scale | None, typer.Option(help="Only runs of this scale.")]
_OUT = Path("fissile-lab")


@app.command(epilog="Example: fissile studies --out fissile-lab")
def studies(out: Out = _OUT) -> None:
    """List the studies, what each costs at each scale, and what is already done."""
    table = _table("study", "what the paper shows", *SCALES)
    with _store(out, create=False) if _exists(out) else _Nothing() as store:
        for study in STUDIES.values():
            costs = [_cost(study, scale, store) for scale in SCALES]
            table.add_row(study.id, study.artefact, *costs)
    _print(table)
    typer.echo(
        "Trials, the estimated time on two processor cores, and the share that is done. Trials "
        "that studies share are computed once."
    )


@app.command(
    epilog="Examples: fissile run superposition --scale quick · "
    "fissile run all --scale paper --device cuda · fissile run capacity --set train=5000 · "
    "fissile run cifar100 --data PATH --set data=cifar100-efficientnet-lite2 · "
    "fissile run cnn-256 --device cuda --only neurons=4,8 --for 20 · "
    "fissile run frontier --scale quick"
)
def run(
    ids: Ids,
    scale: Annotated[Scale, typer.Option(help="From seconds to the paper's own grid.")] = "quick",  # type: ignore[assignment]
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per setting; by default the scale's.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")] = "cpu",
    jobs: Jobs = None,
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
    out: Out = _OUT,
    data: Annotated[
        Path | None, typer.Option(help="A folder with data sets; see: fissile data.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train=5000."),
    ] = None,
) -> None:
    """Run studies; what is stored already is not computed again, and Ctrl-C loses little."""
    chosen, changed = find(ids), _parsed(changes or [])
    check_device(device)
    if data is not None:
        _look_in(data)
    runs = [_wanted(study, scale.value, trials, changed) for study in chosen]
    runs = _with_data(runs, skip=not set(SEVERAL).isdisjoint(ids))
    # A setting that only some studies have changes those; one that none has is a mistake.
    for name in set(changed) - {name for one in runs for name in one.changes}:
        chosen[0].works(scale.value, trials, {name: changed[name]})
    works = [w for one in runs for w in STUDIES[one.study].works(one.scale, trials, one.changes)]
    works = _cells(works, only or [])
    with _store(out) as store:
        for one in runs:
            store.note_run(one)
        with (
            _interruptible(store),
            Bar() as bar,
            _executor(jobs, device, works) as (executor, count),
        ):
            tally = run_trials(
                works, store, executor=executor, device=device, in_flight=count, every=every,
                within=None if minutes is None else 60 * minutes, watcher=bar,
            )  # fmt: skip
        typer.echo(f"{tally.text()}; {out} holds {store.count():,}.")
        if len(runs) == 1:
            _print_verdicts(load(store, runs[0]))
        else:
            _print_status([load(store, one) for one in runs])


@app.command(epilog="Example: fissile take from-the-cluster --out fissile-lab")
def take(
    other: Annotated[Path, typer.Argument(help="The folder of another store.")], out: Out = _OUT
) -> None:
    """Take over what another store has finished, such as one that was filled elsewhere."""
    with _store(other, create=False) as theirs, _store(out) as store:
        new = store.take(theirs)
        typer.echo(f"{new:,} trials are new; {out} holds {store.count():,}.")


@app.command(epilog="Example: fissile status --out fissile-lab")
def status(out: Out = _OUT) -> None:
    """Show every run of the store: how far it is, and what became of its claims."""
    with _store(out, create=False) as store:
        runs = store.runs()
        _print_status([load(store, one) for one in runs if readable(one)])
        for one in runs:
            if not readable(one):
                typer.echo(f"Made by another version of fissile: {one.command}")


@app.command(
    epilog="Examples: fissile results capacity > capacity.csv · "
    "fissile results superposition --format parquet --to gains.parquet"
)
def results(
    study: Annotated[str, typer.Argument(help="A study.", autocompletion=_complete_one)],
    format: Annotated[Format, typer.Option(help="csv, json or parquet.")] = "csv",  # type: ignore[assignment]
    to: Annotated[Path | None, typer.Option(help="A file; by default the terminal.")] = None,
    scale: SomeScale = None,
    out: Out = _OUT,
) -> None:
    """Print a study's results: one row per setting, arm, trial and measure."""
    from fissile.lab.frame import tidy

    if len(find([study])) > 1:
        raise FissileError(
            f"{study} stands for several studies, and results are of one: "
            f"{', '.join(one.id for one in find([study]))}"
        )
    with _store(out, create=False) as store:
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
        typer.Argument(help=f"{_NAMES} By default, whatever has run.", autocompletion=_complete),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="A folder; by default report in the store's.")
    ] = None,
    scale: SomeScale = None,
    out: Out = _OUT,
) -> None:
    """Write one HTML page with every claim, figure and table, and the figures beside it."""
    from fissile.lab.report import write

    wanted = ids or []
    find(wanted)
    with _store(out, create=False) as store:
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
    out: Out = _OUT,
) -> None:
    """Fit the settings that the paper leaves open to its published tables."""
    from fissile.lab.fidelity import compared, works
    from fissile.lab.fidelity_text import markdown

    check_device(device)
    with _store(out) as store, _interruptible(store), Bar() as bar:
        with _executor(jobs, device) as (executor, count):
            tally = run_trials(
                works(scale.value), store, executor=executor, device=device, in_flight=count,
                watcher=bar,
            )  # fmt: skip
        fits = compared(store, scale.value)
    text = markdown(fits)
    if to is None:
        Console().print(Markdown(text))
    else:
        with _writing(to):
            to.write_text(text, encoding="utf-8")
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
    table = _table("", "exact", "the paper's approximation", "union bound", "sampled ± error")
    for name, title in (("coverage", "every clause covered"), ("collision_ratio", "collisions")):
        sampled = f"{found[name + '_simulated']:.4g} ± {found[name + '_error']:.2g}"
        bound = f"{found['coverage_bound']:.4g}" if name == "coverage" else ""
        table.add_row(title, f"{found[name]:.4g}", f"{found[name + '_approx']:.4g}", bound, sampled)
    widths = (f"{found['width']:g}", f"{found['width_approx']:.4g}", f"{found['width_bound']:g}")
    table.add_row(f"neurons for {1 - eps:.0%} coverage", *widths, "")
    _print(table)
    typer.echo("Collisions are relative to the dense network's.")


# --- helpers


class _Nothing:
    """Stands for a store that is not there."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _store(out: Path, *, create: bool = True) -> Store:
    return Store(out, create=create)


def _exists(out: Path) -> bool:
    return (out / "trials.sqlite").exists()


@contextmanager
def _executor(
    jobs: int | None, device: str, works: Sequence[Work] = ()
) -> Iterator[tuple[Executor | None, int]]:
    """Return who computes, and how many batches at once: this process, or several."""
    count = default_jobs(device, works) if jobs is None else jobs
    if count == 1:
        yield None, 1
    else:
        with pool(count) as executor:
            yield executor, count


@contextmanager
def _interruptible(store: Store) -> Iterator[None]:
    """Say what Ctrl-C has left, and end with its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        stored = f"{store.count():,} trials are stored in {store.path}"
        typer.echo(f"Stopped. {stored}; the same command goes on.", err=True)
        raise typer.Exit(130) from None


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


def _parsed(changes: list[str]) -> dict[str, object]:
    """Read ``--set`` options: numbers as numbers, ``none`` as nothing, the rest as words."""
    found: dict[str, object] = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise FissileError(f"--set takes KEY=VALUE, not {text!r}; for example --set train=5000")
        found[name.replace("-", "_")] = _value(value)
    return found


def _cells(works: list[Work], only: list[str]) -> list[Work]:
    """Return the trials of the cells that were asked for."""
    for text in only:
        name, equals, values = text.partition("=")
        wanted = [_value(value) for value in values.split(",")]
        known = {column for work in works for column in work.columns()}
        if not equals or name not in known:
            raise FissileError(
                f"--only takes KEY=VALUE,..., not {text!r}; keys are {', '.join(sorted(known))}"
            )
        works = [work for work in works if work.columns().get(name) in wanted]
        if not works:
            raise FissileError(f"there is no cell with {text}")
    return works


def _value(text: str) -> object:
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _cost(study: Study, scale: str, store: Store | None) -> str:
    """Say how many trials a scale has, how long they take, and how many are done."""
    asked = [] if store is None else store.runs()  # newest first; it knows which arrays were here
    changes = next((r.changes for r in asked if (r.study, r.scale) == (study.id, scale)), {})
    works = study.works(scale, changes=changes)
    done = 0 if store is None else len(store.finished(work.key for work in works))
    cost = f"{len(works):,}, {_time(sum(work.cost for work in works))}"
    return f"{cost}, {100 * done // len(works)} % done" if done else cost


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _status(found: Results) -> list[str]:
    wanted, words = found.run, [verdict.status for _, verdict in found.verdicts]
    changes = " ".join(f"{name}={value}" for name, value in wanted.told.items())
    counts = [str(words.count(status)) for status in ("holds", "not significant", "fails")]
    done = f"{len(found.rows):,} of {len(found.works):,}"
    trials = "" if wanted.trials is None else str(wanted.trials)
    return [wanted.study, wanted.scale, trials, changes, done, *counts, _time(found.seconds)]


def _print_status(found: list[Results]) -> None:
    table = _table("study", "scale", "trials", "changed", "done", "holds", "n.s.", "fails", "time")
    for one in found:
        table.add_row(*_status(one))
    _print(table)
    typer.echo("n.s.: not significant. The time is that of the trials, wherever they ran.")


def _print_verdicts(found: Results) -> None:
    table = _table("claim", "verdict", "numbers", title=f"{found.study.id}: {found.study.title}")
    for claim, verdict in found.verdicts:
        table.add_row(claim.text, verdict.status, verdict.numbers)
    _print(table)


def _table(*columns: str, title: str | None = None) -> Table:
    """Return a table whose first column is never cut."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, no_wrap=number == 0 and name == "study")
    return table


def _print(table: Table) -> None:
    Console().print(table)


def _write(frame: Any, format: str, to: Path | None) -> None:
    """Write a table to a file or, text formats only, to the terminal."""
    if to is None and format == "parquet" and sys.stdout.isatty():
        raise FissileError("parquet is not for a terminal; give a file with --to")
    target: Any = to if to is not None else sys.stdout
    with _writing(to):
        if format == "csv":
            frame.to_csv(target, index=False)
        elif format == "json":
            frame.to_json(target, orient="records", indent=1)
        else:
            frame.to_parquet(to if to is not None else sys.stdout.buffer, index=False)
        sys.stdout.flush()


@contextmanager
def _writing(to: Path | None) -> Iterator[None]:
    """Turn what can go wrong with a file into one clear error."""
    try:
        yield
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise FissileError(f"cannot write {to or 'the table'}: {error.strerror or error}") from None
