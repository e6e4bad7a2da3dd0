"""The report: every study's figure, its table beside the paper's, and what became of the claims.

>>> write(Store("results"), Path("report"))  # report/index.html, and the figures and numbers

The page is one file that needs no other and no network; everything in it comes from the store, so
that the same results make the same report to the byte.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import hypot, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

import fissile
from fissile._common.errors import FissileError, printable
from fissile._common.progress import number_of
from fissile.data.catalogue import ENTRIES
from fissile.lab import plots
from fissile.lab.claims import Status, Verdict, counts
from fissile.lab.frame import labelled, pick
from fissile.lab.pages import SYMBOLS, rendered, upper_first, whole_folder, write_csv
from fissile.lab.results import Results, load, nearest, nothing, told
from fissile.lab.source import pointing
from fissile.lab.stats import ENOUGH, LEVEL, Summary, summary
from fissile.lab.store import Store
from fissile.lab.studies import CRITERION
from fissile.lab.study import Published
from fissile.lab.task import WITHIN
from fissile.lab.trial import Contender, Sampling, Trial, Work

MISSING = "–"
#: Combined spreads between our mean and the paper's before it is pointed out.
FAR = 2.0
#: The order in which verdicts are told: what differs from the paper comes first.
_FIRST: dict[Status, str] = {
    "fails": "What came out differently",
    "not significant": "Not significant",
    "holds": "Holds",
    "not tested here": "Not tested here",
    "no data": "No data",
}


def write(
    store: Store,
    folder: Path,
    *,
    ids: Iterable[str] = (),
    scale: str | None = None,
    changes: Mapping[str, object] | None = None,
) -> Path:
    """Write the report on one run of each study and return its page.

    >>> write(store, Path("report"), ids=["capacity", "codes-2"], scale="quick")
    PosixPath('report/index.html')

    Runs are chosen by :func:`fissile.lab.results.nearest`. A report that is already there stays
    whole until the new one is finished beside it.
    """
    runs = nearest(store, list(ids), scale, changes)
    found = [load(store, run, pictures=True) for run in runs]
    if not found:
        raise FissileError(nothing(store, "there is nothing to report", "fissile run"))
    from fissile.lab import multiverse

    with whole_folder(Path(folder), "the report") as beside:
        if any(multiverse.begun(store, run) for run in runs):
            multiverse.fill(multiverse.gathered(store, runs), beside)
        _fill(beside, found)
    return Path(folder) / "index.html"


# --- files


def _fill(folder: Path, found: Sequence[Results]) -> None:
    """Write a whole report into an empty folder."""
    for name in ("figures", "tables"):
        (folder / name).mkdir()
    sections = [_section(results, folder) for results in found]
    rows = claim_rows(found)
    write_csv(folder / "claims.csv", rows)
    (folder / "claims.md").write_text(claims_markdown(rows), "utf-8", newline="\n")
    page = _page(sections, several=(folder / "multiverse.html").exists())
    (folder / "index.html").write_text(page, "utf-8", newline="\n")


def claim_rows(found: Iterable[Results]) -> list[dict[str, Any]]:
    """Return every claim with its verdict, a row each."""
    return [
        {
            "study": results.study.id,
            "claim": claim.text,
            "source": claim.source,
            "verdict": verdict.status,
            "numbers": verdict.numbers,
            "features": results.foreign,
            "settings": results.otherwise,
            "scale": results.run.scale,
            "trials": len(results.rows),
            "trials_asked": len(results.works),
        }
        for results in found
        for claim, verdict in results.verdicts
    ]


# --- our numbers beside the paper's


@dataclass(frozen=True)
class Cell:
    """One number of the paper and what the trials came to; NaN where there is none."""

    place: int
    arm: str
    trials: int
    ours: float
    ours_error: float
    paper: float
    paper_spread: float
    texts: tuple[str, str, str]  # ours, the paper's and the difference
    alike: bool = True  # both are of the same data

    @property
    def difference(self) -> float:
        return self.ours - self.paper

    @property
    def judged(self) -> bool:
        """Return whether both are of the same data, and have a spread to judge them by."""
        return self.alike and not isnan(self.ours_error + self.paper_spread)

    @property
    def far(self) -> bool:
        """Return whether the two lie apart; a spread that is missing is NaN, which says no."""
        apart = abs(self.difference) > FAR * hypot(self.ours_error, self.paper_spread)
        return self.judged and apart


@dataclass(frozen=True)
class Table:
    """A table of the paper with our numbers beside it, by place along the axis."""

    published: Published
    rows: dict[int, list[Cell]]

    @property
    def cells(self) -> list[Cell]:
        return list(chain.from_iterable(self.rows.values()))

    @property
    def beside(self) -> bool:
        """Return whether numbers of the paper stand beside ours."""
        return any(not isnan(cell.paper) for cell in self.cells)

    @property
    def numbers(self) -> list[dict[str, object]]:
        """The cells for a file."""
        names = ("place", "arm", "trials", "ours", "ours_error", "paper", "paper_spread")
        published = self.published
        about = {"table": published.table, "measure": published.measure, "along": published.along}
        return [
            {**about, **{name: getattr(cell, name) for name in (*names, "difference", "far")}}
            for cell in self.cells
        ]


def table(published: Published, results: Results) -> Table:
    """Fill a table of the paper with what the trials came to.

    >>> table(study.published[0], results).rows[8]

    Numbers of the paper stand beside those of its own settings alone.
    """
    paper = {
        (place, arm): value if isinstance(value, tuple) else (nan if value is None else value, nan)
        for place, row in published.values.items()
        for arm, value in row.items()
    }
    if results.apart:
        where = {k: v for k, v in published.where.items() if k not in results.changed}
        published = replace(published, where=where)
        frame = results.frame if results.rows else {}
        places = sorted(set(pick(frame, where)[published.along])) if len(frame) else ()
        paper = {(int(place), arm): (nan, nan) for place in places for arm in published.arms}
    columns = list(zip(*paper.values(), strict=True))
    rows: dict[int, list[Cell]] = {}
    for (place, arm), pair in paper.items():
        ours, digits = _ours(published, results, place, arm), published.digits
        printed = [_printed(*both, digits) for both in zip(pair, columns, strict=True)]
        texts = (MISSING, MISSING if isnan(pair[0]) else _joined(printed), MISSING)
        if ours.count:
            own = _joined([_fixed(number, digits) for number in (ours.mean, ours.error)])
            apart = f"{ours.mean - pair[0]:+z.{digits}f}".replace("-", "−")
            alone = isnan(pair[0]) or bool(results.foreign)
            texts = (own, texts[1], MISSING if alone else apart)
        alike = not results.foreign
        cell = Cell(place, arm, ours.count, ours.mean, ours.error, *pair, texts, alike)
        rows.setdefault(place, []).append(cell)
    return Table(published, rows)


def _ours(published: Published, results: Results, place: int, arm: str) -> Summary:
    if not results.rows or published.measure not in results.frame:
        return Summary(nan, nan, 0)
    part = pick(results.frame, {**published.where, published.along: place}, [arm])
    return summary(part[published.measure])


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


def claims_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the claims and their verdicts for a README: first what came out differently.

    >>> print(claims_markdown(claim_rows([load(store, run) for run in nearest(store)])))
    """
    found = counts(Verdict(row["verdict"], row["numbers"]) for row in rows)
    parts = []
    for status, title in _FIRST.items():
        if found[status]:
            body = [
                (_where(row), row["claim"], row["numbers"])
                for row in rows
                if row["verdict"] == status
            ]
            lines = _markdown_table([("study", "claim", "numbers"), *body])
            head = f"{SYMBOLS[status]} {title}: {found[status]}"
            unfolded = " open" if status == "fails" else ""
            parts.append(f"<details{unfolded}><summary>{head}</summary>\n\n{lines}\n</details>\n")
    return "\n".join(parts)


def _where(row: Mapping[str, Any]) -> str:
    """Return the study of a claim, with what its numbers are not the paper's in."""
    done = told(int(row["trials"]), int(row["trials_asked"]))
    apart = ", ".join(filter(None, (row["features"], row["settings"], done)))
    return f"{row['study']} ({apart})" if apart else str(row["study"])


def _seen(published: Published, results: Results) -> str:
    """Return what the networks of a table saw, if it is not what the paper's did."""
    data = str(published.where.get("data", ""))  # of a study on several sets
    return ENTRIES[data].encoder if data in ENTRIES else results.foreign


def tables_markdown(results: Results) -> str:
    """Return the tables of a study for a README: our numbers, and in brackets the paper's.

    >>> print(tables_markdown(load(store, nearest(store, ["fashionmnist"])[0])))
    """
    parts = []
    for published in results.study.published:
        held = table(published, results)
        rows = [(labelled(published.along), *published.arms)]
        for place, cells in held.rows.items():
            rows.append((str(place), *map(_both, cells)))
        on = f" on {_markdown(seen)}" if (seen := _seen(published, results)) else ""
        on += f" with {_markdown(results.otherwise)}" if results.otherwise else ""
        on += f" ({results.done})" if results.done else ""
        none = "; not the paper’s settings" if results.apart else "; the paper has none"
        paper = ", and (the paper’s)" if held.beside else none
        title = f"{upper_first(published.table)}: ours{on}{paper}."
        parts.append(f"{title}\n\n{_markdown_table(rows)}")
    return "\n".join(parts)


def _both(cell: Cell) -> str:
    ours, paper, _ = cell.texts
    return ours if isnan(cell.paper) else f"{ours} ({paper})"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(map(_markdown, row))} |\n" for row in ruled)


def _markdown(text: str) -> str:
    """Return a text as Markdown shows it: names from data are never markup, a link or a formula."""
    text = re.sub(r"[\\|*`~$]|\b_|_\b|\](?=\()", r"\\\g<0>", printable(" ".join(text.split())))
    return text.replace("&", "&amp;").replace("<", "&lt;")


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
        return f"{len(self.results.rows):,} of {number_of(len(self.results.works), 'trial')}"

    @property
    def verdict_counts(self) -> Mapping[Status, int]:
        """How many claims have each verdict."""
        return counts(verdict for _, verdict in self.results.verdicts)

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
        return int((self.results.rows.columns().get("diverged", np.zeros(0)) == 1).sum())

    @property
    def finished(self) -> list[str]:
        """When the first and the last trial were finished; one time if they are the same."""
        times = sorted(set(self.results.rows.finished))
        return list(dict.fromkeys(time[:16].replace("T", " ") for time in times[:1] + times[-1:]))

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """What was run: each setting here and at the scale of the paper."""
        paper = _settings(self.results.study.works(self.results.study.full))
        here = _settings(self.results.works)
        return [(name, value, paper.get(name, MISSING)) for name, value in here.items()]


def _section(results: Results, folder: Path) -> _Section:
    tables = [table(published, results) for published in results.study.published]
    if tables:
        rows = [
            {**row, "features": _seen(one.published, results)}
            for one in tables
            for row in one.numbers
        ]
        path = folder / "tables" / results.study.id
        write_csv(path.with_suffix(".csv"), rows)
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
    with pointing(study.file, study.id, "the figure cannot be drawn: "):
        drawn = plots.draw(study, results.frame, results.pictures, results.note)
    if drawn is None:
        return None
    paths = plots.save(drawn, folder, study.id)
    numbers = plots.numbers(study, results.frame, results.pictures)
    if len(numbers):
        numbers.to_csv(folder / f"{study.id}.csv", index=False, lineterminator="\n")
    svg = next(path for path in paths if path.suffix == ".svg").read_bytes()
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    alt = "; ".join(map(plots.in_words, chain.from_iterable(study.figure)))
    return _Figure(source, f"{study.title}. {alt}.", drawn.get_figwidth(), len(numbers) > 0)


def _settings(works: Sequence[Work]) -> dict[str, str]:
    """Return the settings that scales and changes differ in, as text."""
    numbers = {work.number for work in works}
    first = min(numbers, default=0)
    works = [work for work in works if work.number == first]
    trained = [work for work in works if isinstance(work, Trial)]
    contenders = [work for work in works if isinstance(work, Contender)]
    sampled = [work for work in works if isinstance(work, Sampling)]
    tasks: dict[str, list[Any]] = {}
    for work in works:
        depth = getattr(work, "depth", 2)
        deep = {"Layers of weights": depth} if depth > 2 else {}
        described: dict[str, Any] = getattr(getattr(work, "task", work), "described", dict)()
        for name, value in {**described, **deep}.items():
            tasks.setdefault(name, []).append(value)
    alphas = [work.arm.alpha for work in trained] + [work.alpha for work in sampled]
    found: dict[str, list[Any]] = {
        "Cells of the grid": [len({replace(work.network(), number=0) for work in works})],
        "Trials of each cell": [len(numbers)],
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


def _page(sections: Sequence[_Section], *, several: bool = False) -> str:
    every = [(one, *both) for one in sections for both in one.results.verdicts]
    titles = [one.results.study.title for one in sections]
    versions = {made.version for one in sections for made in one.results.provenances}
    return rendered(
        "report.html.jinja",
        sections=sections,
        several=several,
        heading=" · ".join(titles) if all(one.results.study.file for one in sections) else "",
        versions=sorted(versions or {fissile.__version__}),
        newest=max((max(one.results.rows.finished, default="") for one in sections), default="")[
            :10
        ],
        scales=list(dict.fromkeys(one.results.run.scale for one in sections)),
        counts=counts(verdict for _, _, verdict in every),
        own=sum(claim.own for _, claim, _ in every),
        differently=[told for told in every if told[2].status == "fails"],
        level=LEVEL,
        enough=ENOUGH,
        within=WITHIN,
        far=FAR,
    )
