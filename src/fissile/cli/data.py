"""The command ``fissile data``: which data sets there are, what they hold, how to get them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import progress
from rich.console import Console

from fissile._common.errors import FissileError
from fissile.cli import common
from fissile.data.catalogue import ENTRIES, Entry, Remote, entry, find, places
from fissile.data.check import Report
from fissile.data.check import check as check_set
from fissile.data.download import download

app = typer.Typer(
    help="Data sets: what there is, where it is, how to get it.",
    epilog="Examples: fissile data · fissile data show cifar100 · fissile data get fashionmnist",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete(incomplete: str) -> list[str]:
    return [name for name in ENTRIES if name.startswith(incomplete)]


Data = Annotated[
    Path | None,
    typer.Option(help="A folder to look in first, before those in FISSILE_DATA and the cache."),
]
Name = Annotated[str, typer.Argument(help="A data set.", autocompletion=_complete)]


@app.callback(invoke_without_command=True)
def every(context: typer.Context, data: Data = None) -> None:
    """List every data set that fissile knows: what it is, on which terms, and where it lies."""
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    table = common.table_of("set", "what it is", "terms", "samples", "where")
    for name, known in ENTRIES.items():
        table.add_row(name, known.about, known.terms, _samples(known), _where(name, data))
    common.show(table)
    typer.echo("How to get one: fissile data show NAME")


@app.command(epilog="Example: fissile data show imagenet1k-clip")
def show(context: typer.Context, name: Name, data: Data = None) -> None:
    """Show all that is known of a data set, where it was looked for, and how to get it."""
    known, data = entry(name), data or context.obj
    rows = {
        "what it is": known.about,
        "terms": known.terms,
        "a sample": " x ".join(map(str, known.shape)) or "a text",
        "classes": f"{known.classes:,}",
        "samples": _samples(known),
        "encoder": known.encoder,
        "where": _where(name, data),
        "files": "\n".join(map(str, known.files)),
        "looked in": "\n".join(map(str, places(data))) if known.files else "",
        "to get it": known.get,
        "downloads": "\n".join(
            f"{remote.url} ({remote.size:,} bytes, md5 {remote.md5})" for remote in known.urls
        ),
    }
    table = common.table_of("set", "known", title=name)
    table.box, table.show_header = None, False
    for title, text in rows.items():
        if text:
            table.add_row(title, text)
    common.show(table)


@app.command(epilog="Examples: fissile data check · fissile data check cifar100 --data my-data")
def check(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets; by default all that are here.", autocompletion=_complete),
    ] = None,
    data: Data = None,
) -> None:
    """Read data sets and compare files, samples, classes and labels with what is known."""
    data = data or context.obj
    chosen = [entry(name).name for name in names or ()]
    bad = 0
    for name in chosen or [name for name in ENTRIES if find(name, data) is not None]:
        report = check_set(name, data)
        _print(report)
        bad += bool(report.problems)
    if bad:
        raise typer.Exit(1)


@app.command(epilog="Example: fissile data get fashionmnist --data my-data")
def get(context: typer.Context, name: Name, data: Data = None) -> None:
    """Download a data set and check it; after Ctrl-C or a lost connection, run it again."""
    known, data = entry(name), data or context.obj
    if not known.urls:
        raise FissileError(f"{name} cannot be downloaded. To get it: {known.get}")
    typer.echo(f"Terms of {name}: {known.terms}")
    place = places(data)[0]
    _download(known.urls, place)
    report = check_set(name, place)
    _print(report)
    if report.problems:
        raise typer.Exit(1)


def _download(remotes: Sequence[Remote], place: Path) -> None:
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        for remote in remotes:
            task = bar.add_task(Path(remote.to).name, total=None)

            def advance(done: int, total: int | None, task: progress.TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            to, most = place / remote.to, remote.size * 9 // 8 + 2**16
            try:
                download(remote.url, to, md5=remote.md5, most=most, progress=advance)
            except KeyboardInterrupt:
                typer.echo("Stopped. What came is kept; the same command goes on.", err=True)
                raise typer.Exit(130) from None


def _samples(known: Entry) -> str:
    train, test = (f"{n:,}" if n is not None else "?" for n in (known.train, known.test))
    return f"{train} + {test}"


def _where(name: str, data: Path | None) -> str:
    found = find(name, data)
    if found is None:
        return "not here"
    return "always here" if found.path is None else str(found.path)


def _print(report: Report) -> None:
    typer.echo(f"{report.name}: {'bad' if report.problems else 'good'}")
    for path, size in report.files:
        typer.echo(f"  {path} ({size:,} bytes)")
    for fact in report.facts:
        typer.echo(f"  {fact}")
    for problem in report.problems:
        typer.echo(f"  problem: {problem}")
