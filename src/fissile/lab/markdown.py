"""Claims and tables as Markdown, for a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

from fissile.lab.claims import Status
from fissile.lab.comparison_table import Beside, table
from fissile.lab.frame import labelled
from fissile.lab.results import Results

__all__ = ["SYMBOLS", "claims_markdown", "tables_markdown"]

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
