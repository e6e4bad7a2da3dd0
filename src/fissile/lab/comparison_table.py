"""Our numbers beside the paper's, and the claims with their verdicts, also as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, isnan, nan

from fissile.lab.claims import Status
from fissile.lab.frame import labelled, pick
from fissile.lab.results import Results
from fissile.lab.stats import Summary, summary
from fissile.lab.study import Published

__all__ = [
    "FAR",
    "MISSING",
    "SYMBOLS",
    "Beside",
    "Table",
    "claims_markdown",
    "table",
    "table_rows",
    "tables_markdown",
]

MISSING = "–"
#: Combined spreads between our mean and the paper's before it is pointed out.
FAR = 2.0


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
        """Tell whether both sides have a spread to judge the difference by."""
        return not isnan(self.ours.error + self.spread)

    @property
    def far(self) -> bool:
        """Tell whether the two lie apart; a spread that is missing is NaN, which says no."""
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


#: A verdict must be told apart without colour, on paper and by those who see none.
SYMBOLS: dict[Status, str] = {"holds": "✓", "not significant": "○", "fails": "✗", "no data": "–"}
#: The order in which verdicts are told: what differs from the paper comes first.
_FIRST: dict[Status, str] = {
    "fails": "What came out differently",
    "not significant": "Not significant",
    "holds": "Holds",
    "no data": "No data",
}
_OPEN: dict[Status, str] = {"fails": " open", "not significant": "", "holds": "", "no data": ""}


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
            parts.append(
                f"<details{_OPEN[status]}><summary>{head}</summary>\n\n{shown}\n</details>\n"
            )
    return "\n".join(parts)


def tables_markdown(results: Results) -> str:
    """Return the tables of a study for a README: our numbers, and in brackets the paper's.

    >>> print(tables_markdown(load(store, latest(store, ["fashionmnist"])[0])))
    """
    parts = []
    for published in results.study.published:
        held = table(published, results)
        name = labelled(published.along)
        rows = [(name, *published.arms)]
        for place, cells in held.rows.items():
            shown = [_both(cell) if cell else "" for cell in cells]
            rows.append((str(place), *shown))
        on = f" on {results.foreign}" if results.foreign else ""
        on += f" ({results.done})" if results.done else ""
        told = published.table[:1].upper() + published.table[1:]
        known = any(not isnan(cell.paper) for cell in held.cells)
        title = f"{told}: ours{on}{', and (the paper’s)' if known else '; the paper has none'}."
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
