"""Our numbers beside the paper's: each table it publishes, filled from the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, isnan, nan

from fissile.lab.frame import pick
from fissile.lab.results import Results
from fissile.lab.stats import Summary, summary
from fissile.lab.study import Published

__all__ = ["FAR", "MISSING", "Beside", "Table", "table", "table_rows"]

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
