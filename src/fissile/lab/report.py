"""The report: every study's figure, its table beside the paper's, and what became of the claims.

>>> write(Store("results"), Path("report"))  # report/index.html, and the figures and numbers

The page is one file that needs no other and no network; everything in it comes from the store, so
that the same results make the same report to the byte.
"""

from __future__ import annotations

import base64
import csv
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import fissile
from fissile._common.errors import FileError, FissileError, needs
from fissile._common.progress import duration
from fissile.lab import plots
from fissile.lab.claims import Verdict
from fissile.lab.comparison_table import (
    FAR,
    MISSING,
    SYMBOLS,
    Table,
    claims_markdown,
    table,
    table_rows,
    tables_markdown,
)
from fissile.lab.frame import labelled
from fissile.lab.results import Results, latest, load
from fissile.lab.stats import LEVEL
from fissile.lab.store import Store
from fissile.lab.studies import CRITERION, find
from fissile.lab.study import (
    Curves,
    Equivalence,
    Heat,
    Lines,
    Matrices,
    Panel,
    Regression,
    Series,
)
from fissile.lab.task import WITHIN
from fissile.lab.trial import Contender, Sampling, Trial, Work

__all__ = ["write"]


def write(store: Store, folder: Path, *, ids: Iterable[str] = (), scale: str | None = None) -> Path:
    """Write the report on the newest run of each study and return its page.

    >>> write(store, Path("report"), ids=["capacity"], scale="quick")
    PosixPath('report/index.html')

    A report that is already there stays whole until the new one is finished beside it.
    """
    found = [load(store, run) for run in latest(store, [s.id for s in find(ids)], scale)]
    if not found:
        raise FissileError("there is nothing to report; fill the store with `fissile run` first")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=".unfinished-", ignore_cleanup_errors=True
        ) as beside:
            _fill(Path(beside), found)
            _move(Path(beside), folder)
    except OSError as error:
        raise FileError(
            f"could not write the report to {folder}: {error.strerror or error}; free some space "
            "or give another folder"
        ) from None
    return folder / "index.html"


# --- files


def _fill(folder: Path, found: Sequence[Results]) -> None:
    """Write a whole report into an empty folder."""
    for name in ("figures", "tables"):
        (folder / name).mkdir()
    sections = [_section(results, folder) for results in found]
    _write_csv(folder / "claims.csv", _claim_rows(found))
    (folder / "claims.md").write_text(claims_markdown(found), encoding="utf-8", newline="\n")
    for results in found:
        if results.study.published:
            path = folder / "tables" / f"{results.study.id}.md"
            path.write_text(tables_markdown(results), encoding="utf-8", newline="\n")
    (folder / "index.html").write_text(_page(sections), encoding="utf-8", newline="\n")


def _move(made: Path, folder: Path) -> None:
    """Put finished files in their places, the page last; each replaces its elder in one step."""
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for name in files:
        with open(made / name, "rb") as written:
            os.fsync(written.fileno())
        (folder / name).parent.mkdir(exist_ok=True)
    for name in sorted(files, key=lambda name: name.name == "index.html"):
        os.replace(made / name, folder / name)


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _claim_rows(found: Sequence[Results]) -> list[dict[str, object]]:
    return [
        {
            "study": one.study.id,
            "claim": claim.text,
            "source": claim.source,
            "verdict": verdict.status,
            "numbers": verdict.numbers,
            "features": one.foreign,
            "scale": one.run.scale,
            "trials": len(one.rows),
            "trials_asked": len(one.works),
        }
        for one in found
        for claim, verdict in one.verdicts
    ]


# --- the page


@dataclass(frozen=True)
class _Figure:
    """A drawing as the page holds it."""

    source: str
    alt: str
    inches: float
    numbers: bool  # pictures of weights have none


@dataclass(frozen=True)
class _Section:
    """What the page says of one study."""

    results: Results
    figure: _Figure | None
    tables: Sequence[Table]

    @property
    def done(self) -> str:
        return f"{len(self.results.rows):,} of {len(self.results.works):,} trials"

    @property
    def altered(self) -> bool:
        """Tell whether the run was asked for anything but what its scale has."""
        run, scale = self.results.run, self.results.study.scales[self.results.run.scale]
        return bool(run.told) or run.trials not in (None, scale.trials)

    @property
    def warm_up(self) -> Verdict | None:
        """The verdict on the paper's criterion, if there is one."""
        found = (verdict for claim, verdict in self.results.verdicts if claim == CRITERION)
        return next((verdict for verdict in found if verdict.status in ("holds", "fails")), None)

    @property
    def diverged(self) -> int:
        return sum(row.measures.get("diverged", 0) == 1 for row in self.results.rows)

    @property
    def finished(self) -> list[str]:
        """When the first and the last trial were finished; one time if they are the same."""
        times = sorted(row.finished for row in self.results.rows)
        return list(dict.fromkeys(time[:16].replace("T", " ") for time in times[:1] + times[-1:]))

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """What was run: each setting here and at the scale of the paper."""
        paper = _settings(self.results.study.works("paper"))
        here = _settings(self.results.works)
        return [(name, value, paper.get(name, MISSING)) for name, value in here.items()]


def _section(results: Results, folder: Path) -> _Section:
    tables = [table(published, results) for published in results.study.published]
    if tables:
        rows = [{**row, "features": results.foreign} for row in table_rows(tables)]
        _write_csv(folder / "tables" / f"{results.study.id}.csv", rows)
    return _Section(results, _figure(results, folder / "figures"), tables)


def _figure(results: Results, folder: Path) -> _Figure | None:
    """Draw a study and take the drawing into the page.

    It becomes an image with a data: address, not markup of the page: lines stay sharp in print,
    it has an alternative text, and names inside two drawings cannot clash.
    """
    study = results.study
    if not results.rows:
        return None
    drawn = plots.draw(study, results.frame, results.pictures, results.note)
    if drawn is None:
        return None
    paths = plots.save(drawn, folder, study.id)
    numbers = plots.numbers(study, results.frame, results.pictures)
    if len(numbers):
        numbers.to_csv(folder / f"{study.id}.csv", index=False, lineterminator="\n")
    svg = next(path for path in paths if path.suffix == ".svg").read_bytes()
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    alt = "; ".join(map(_in_words, chain.from_iterable(study.figure)))
    return _Figure(source, f"{study.title}. {alt}.", drawn.get_figwidth(), len(numbers) > 0)


def _in_words(panel: Panel) -> str:
    """Return what a panel shows, for those who do not see it."""
    match panel:
        case Matrices(arms=arms):
            return f"First layers and their Gram matrices of {', '.join(arms)}"
        case Lines(measure=y, along=x, arms=arms) | Regression(y=y, x=x, arms=arms):
            text = f"{labelled(y)} against {labelled(x)} for {', '.join(arms)}"
        case Heat(measure=measure, arm=arm, down=down, across=across):
            text = f"{labelled(measure)} of {arm} by {labelled(down)} and {labelled(across)}"
        case Curves(arm=arm):
            text = f"{labelled('accuracy')} over epochs, dense and {arm} split at several times"
        case Equivalence(arm=arm):
            text = f"{labelled('accuracy')} over weights, dense and {arm}"
        case Series(measures=measures, along=along):
            text = f"{', '.join(map(labelled, measures))} against {labelled(along)}"
    return f"{panel.title}: {text}" if panel.title else text


def _settings(works: Sequence[Work]) -> dict[str, str]:
    """Return the settings that scales and changes differ in, as text."""
    trained = [work for work in works if isinstance(work, Trial)]
    contenders = [work for work in works if isinstance(work, Contender)]
    sampled = [work for work in works if isinstance(work, Sampling)]
    alphas = [work.arm.alpha for work in trained] + [work.alpha for work in sampled]
    found: dict[str, list[Any]] = {
        "Cells of the grid": [len({replace(work.network(), number=0) for work in works})],
        "Trials of each cell": [len({work.number for work in works})],
        **_tasks([*trained, *contenders]),
        "Non-zeros": [work.budget for work in contenders],
        "Epochs": [work.epochs for work in contenders],
        "Width of the embedding": [work.embedding for work in trained if work.embedding],
        "Epochs before the split": [work.warm_up for work in trained],
        "Epochs after the split": [work.fine_tune for work in trained],
        "Networks drawn": [work.networks for work in sampled],
        "Alpha": [alpha for alpha in alphas if alpha != 1],
    }
    return {
        name: ", ".join(f"{n:,}" if isinstance(n, int) else str(n) for n in sorted(set(values)))
        for name, values in found.items()
        if values
    }


def _tasks(trained: Sequence[Trial | Contender]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for work in trained:
        depth = getattr(work, "depth", 2)
        deep = {"Layers of weights": depth} if depth > 2 else {}
        for name, value in {**work.task.described(), **deep}.items():
            found.setdefault(name, []).append(value)
    return found


def _page(sections: Sequence[_Section]) -> str:
    needs("jinja2", "lab")
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters |= {"labelled": labelled, "duration": duration, "upper_first": _upper_first}
    text = resources.files("fissile.lab").joinpath("report.html.jinja").read_text("utf-8")
    every = [both for one in sections for both in one.results.verdicts]
    found = Counter(verdict.status for claim, verdict in every if not claim.own)
    rows = [row for one in sections for row in one.results.rows]
    versions = {row.provenance.version for row in rows} or {fissile.__version__}
    return jinja.from_string(text).render(
        sections=sections,
        versions=sorted(versions),
        newest=max((row.finished for row in rows), default="")[:10],
        scales=list(dict.fromkeys(one.results.run.scale for one in sections)),
        counts={status: found[status] for status in SYMBOLS},
        own=sum(claim.own for claim, _ in every),
        differently=[
            (one, claim, verdict)
            for one in sections
            for claim, verdict in one.results.verdicts
            if verdict.status == "fails"
        ],
        symbols=SYMBOLS,
        level=LEVEL,
        within=WITHIN,
        far=FAR,
    )


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
