"""The report: every study's figure, its table beside the paper's, and what became of the claims.

>>> write(Store("results"), Path("report"))  # report/index.html, and the figures and numbers

The page is one file that needs no other and no network; everything in it comes from the store, so
that the same results make the same report to the byte.
"""

from __future__ import annotations

import base64
import csv
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain
from math import hypot, isnan, nan
from pathlib import Path
from typing import Any

import fissile
from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import move_finished
from fissile._common.progress import duration
from fissile.lab import plots
from fissile.lab.claims import Status, Verdict
from fissile.lab.frame import labelled, pick
from fissile.lab.results import Results, latest, load
from fissile.lab.stats import LEVEL, Summary, summary
from fissile.lab.store import Store
from fissile.lab.studies import CRITERION, find
from fissile.lab.study import (
    Curves,
    Equivalence,
    Heat,
    Lines,
    Matrices,
    Panel,
    Published,
    Regression,
    Series,
)
from fissile.lab.task import WITHIN
from fissile.lab.trial import Contender, Sampling, Trial, Work

__all__ = ["write"]

MISSING = "–"
#: Combined spreads between our mean and the paper's before it is pointed out.
FAR = 2.0
#: A verdict must be told apart without colour, on paper and by those who see none.
SYMBOLS: dict[Status, str] = {"holds": "✓", "not significant": "○", "fails": "✗", "no data": "–"}
#: The order in which verdicts are told: what differs from the paper comes first.
_FIRST: dict[Status, str] = {
    "fails": "What came out differently",
    "not significant": "Not significant",
    "holds": "Holds",
    "no data": "No data",
}


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
            move_finished(Path(beside), folder, last="index.html")
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
    (folder / "claims.md").write_text(claims_markdown(found), "utf-8", newline="\n")
    (folder / "index.html").write_text(_page(sections), "utf-8", newline="\n")


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


# --- our numbers beside the paper's


@dataclass(frozen=True)
class Beside:
    """One number of the paper and what the trials came to."""

    place: int
    arm: str
    ours: Summary
    paper: float
    spread: float  # NaN where the paper gives none
    printed: str
    digits: int

    @property
    def difference(self) -> float:
        return self.ours.mean - self.paper

    @property
    def judged(self) -> bool:
        """Return whether both sides have a spread to judge the difference by."""
        return not isnan(self.ours.error + self.spread)

    @property
    def far(self) -> bool:
        """Return whether the two lie apart; a spread that is missing is NaN, which says no."""
        return abs(self.difference) > FAR * hypot(self.ours.error, self.spread)

    def texts(self) -> tuple[str, str, str]:
        """Return ours, the paper's and the difference."""
        if not self.ours.count:
            return MISSING, self.printed, MISSING
        ours = [_fixed(number, self.digits) for number in (self.ours.mean, self.ours.error)]
        difference = f"{self.difference:+z.{self.digits}f}".replace("-", "−")
        return _joined(ours), self.printed, MISSING if isnan(self.paper) else difference


@dataclass(frozen=True)
class Table:
    """A table of the paper with our numbers beside it."""

    published: Published
    cells: Sequence[Beside]

    @property
    def rows(self) -> dict[int, list[Beside | None]]:
        """The cells by place along the axis, in the order of the arms."""
        held = {(cell.place, cell.arm): cell for cell in self.cells}
        arms = self.published.arms
        return {place: [held.get((place, arm)) for arm in arms] for place in self.published.values}


def table(published: Published, results: Results) -> Table:
    """Fill a table of the paper with what the trials came to.

    >>> table(study.published[0], results).rows[8]
    """
    digits = published.digits
    values = {
        (place, arm): value if isinstance(value, tuple) else (nan if value is None else value, nan)
        for place, row in published.values.items()
        for arm, value in row.items()
    }
    means, spreads = zip(*values.values(), strict=True)
    cells = []
    for (place, arm), (paper, spread) in values.items():
        known = not isnan(paper)
        printed = [_printed(paper, means, digits), _printed(spread, spreads, digits)]
        ours = _ours(published, results, place, arm)
        cells.append(
            Beside(place, arm, ours, paper, spread, _joined(printed) if known else MISSING, digits)
        )
    return Table(published, cells)


def _ours(published: Published, results: Results, place: int, arm: str) -> Summary:
    if not results.rows or published.measure not in results.frame:
        return Summary(nan, nan, 0)
    part = pick(results.frame, {**published.where, published.along: place}, [arm])
    return summary(part[published.measure])


def table_rows(tables: Sequence[Table]) -> list[dict[str, object]]:
    """Return the tables for a file: all digits, and nothing where there is no number."""
    return [
        {
            "table": table.published.table,
            "measure": table.published.measure,
            "along": table.published.along,
            "place": cell.place,
            "arm": cell.arm,
            "trials": cell.ours.count,
            "ours": _plain(cell.ours.mean),
            "ours_error": _plain(cell.ours.error),
            "paper": _plain(cell.paper),
            "paper_spread": _plain(cell.spread),
            "difference": _plain(cell.difference),
            "far": cell.far,
        }
        for table in tables
        for cell in table.cells
    ]


def _plain(number: float) -> float | str:
    return "" if isnan(number) else number


def _fixed(number: float, digits: int) -> str:
    return "" if isnan(number) else f"{number:.{digits}f}"


def _printed(number: float, column: Iterable[float], digits: int) -> str:
    """Return a number as the paper has it: 2.740, where its neighbour is 2.907, and 15.00."""
    alike = [one for one in column if len(f"{one:.0f}") == len(f"{number:.0f}")]
    decimals = [len(f"{one:.10f}".rstrip("0").partition(".")[2]) for one in alike]
    return _fixed(number, max(digits, *decimals))


def _joined(mean_and_error: Sequence[str]) -> str:
    return " ± ".join(filter(None, mean_and_error))


# --- Markdown


def claims_markdown(results: Iterable[Results]) -> str:
    """Return the claims and their verdicts for a README: first what came out differently.

    >>> print(claims_markdown(load(store, run) for run in latest(store)))
    """
    rows: dict[Status, list[Sequence[str]]] = {status: [] for status in _FIRST}
    for one in results:
        for claim, verdict in one.verdicts:
            told = ", ".join(filter(None, (one.foreign, one.done)))
            where = f"{one.study.id} ({told})" if told else one.study.id
            rows[verdict.status].append((where, claim.text, verdict.numbers))
    parts = []
    for status, title in _FIRST.items():
        if rows[status]:
            shown = _markdown_table([("study", "claim", "numbers"), *rows[status]])
            head = f"{SYMBOLS[status]} {title}: {len(rows[status])}"
            unfolded = " open" if status == "fails" else ""
            parts.append(f"<details{unfolded}><summary>{head}</summary>\n\n{shown}\n</details>\n")
    return "\n".join(parts)


def tables_markdown(results: Results) -> str:
    """Return the tables of a study for a README: our numbers, and in brackets the paper's.

    >>> print(tables_markdown(load(store, latest(store, ["fashionmnist"])[0])))
    """
    parts = []
    for published in results.study.published:
        held = table(published, results)
        rows = [(labelled(published.along), *published.arms)]
        for place, cells in held.rows.items():
            rows.append((str(place), *(_both(cell) if cell else "" for cell in cells)))
        on = f" on {results.foreign}" if results.foreign else ""
        on += f" ({results.done})" if results.done else ""
        known = any(not isnan(cell.paper) for cell in held.cells)
        paper = ", and (the paper’s)" if known else "; the paper has none"
        title = f"{_upper_first(published.table)}: ours{on}{paper}."
        parts.append(f"{title}\n\n{_markdown_table(rows)}")
    return "\n".join(parts)


def _both(cell: Beside) -> str:
    ours, paper, _ = cell.texts()
    return ours if isnan(cell.paper) else f"{ours} ({paper})"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(map(_markdown, row))} |\n" for row in ruled)


def _markdown(text: str) -> str:
    for special, shown in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        text = text.replace(special, shown)
    return " ".join(text.split())


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
        """Return whether the run was asked for anything but what its scale has."""
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
        path = folder / "tables" / results.study.id
        _write_csv(path.with_suffix(".csv"), rows)
        path.with_suffix(".md").write_text(tables_markdown(results), "utf-8", newline="\n")
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
    tasks: dict[str, list[Any]] = {}
    for work in works:
        if isinstance(work, Sampling):
            continue
        depth = getattr(work, "depth", 2)
        deep = {"Layers of weights": depth} if depth > 2 else {}
        for name, value in {**work.task.described(), **deep}.items():
            tasks.setdefault(name, []).append(value)
    alphas = [work.arm.alpha for work in trained] + [work.alpha for work in sampled]
    found: dict[str, list[Any]] = {
        "Cells of the grid": [len({replace(work.network(), number=0) for work in works})],
        "Trials of each cell": [len({work.number for work in works})],
        **tasks,
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
