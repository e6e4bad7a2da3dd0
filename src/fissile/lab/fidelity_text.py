"""What the search for fidelity found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fissile.lab.fidelity import SHARED, TARGETS, Fit, Target, best, common, unreached

__all__ = ["markdown"]

_UNITS = "Residuals are root mean squares over a table: points of accuracy, or percent of a number."


def markdown(fits: Sequence[Fit]) -> str:
    """Write everything the search found, as tables.

    >>> Path("fidelity.md").write_text(markdown(fits))
    """
    parts = (_bests(fits), _commons(fits), _settings(fits), _besides(fits), _misses(fits))
    return "\n".join(line for part in parts for line in part) + "\n"


def _bests(fits: Sequence[Fit]) -> Iterator[str]:
    yield from ("## The best reading of each table", "", _UNITS, "")
    yield from _head("table", "readings tried", "residual", "best reading")
    for target in TARGETS:
        one = best(fits, target.study)
        tried = sum(fit.target is target for fit in fits)
        yield _row(target.study, tried, one, one.reading.text(_open(target)))


def _commons(fits: Sequence[Fit]) -> Iterator[str]:
    yield from ("", "## One setting for all tables", "")
    yield (
        "The score is the geometric mean of the residuals, each as a multiple of its table's best. "
        "Alpha and the kind of cosine may differ between tables; the rest is shared."
    )
    yield ""
    yield from _head("score", *SHARED, *(target.study for target in TARGETS))
    for score, chosen in common(fits)[:10]:
        reading = chosen[-1].reading  # of a table with an embedding, which has all these settings
        settings = [getattr(reading, name) for name in SHARED]
        yield _row(f"{score:.2f}", *settings, *(f"{one.residual:.1f}" for one in chosen))


def _settings(fits: Sequence[Fit]) -> Iterator[str]:
    yield from ("", "## What each setting is worth", "")
    yield (
        "The best residual that is left when one setting is held to a value. In tables with an "
        "embedding, clusters of the Gram matrix and fresh moments were tried only with 10,000 "
        "samples and an embedding as wide as the input."
    )
    yield ""
    yield from _head("setting", "value", *(target.study for target in TARGETS))
    names = {name: None for target in TARGETS for name in (*target.axes, *target.extras)}
    for name in names:
        for value in {getattr(one.reading, name): None for one in fits}:
            cells = [_held(fits, target, name, value) for target in TARGETS]
            if any(cells):
                yield _row(name, value, *cells)


def _held(fits: Sequence[Fit], target: Target, name: str, value: object) -> str:
    held = [
        one.residual
        for one in fits
        if one.target is target
        and (name in target.axes or name in target.extras)
        and getattr(one.reading, name) == value
    ]
    return f"{min(held):.1f}" if held else ""


def _besides(fits: Sequence[Fit]) -> Iterator[str]:
    yield from ("", "## Ours beside the paper's", "")
    yield "The paper's number, then ours in the table's best reading, then in the setting for all."
    shared = {one.target.study: one for one in common(fits)[0][1]}
    for target in TARGETS:
        mine, all_ = best(fits, target.study), shared[target.study]
        splits = list(dict.fromkeys(split for _, split in mine.ours))
        yield from ("", f"**{target.study}** ({target.published.table})", "")
        yield from _head(target.published.along, *splits)
        for place in dict.fromkeys(place for place, _ in mine.ours):
            yield _row(place, *(_three(target, mine, all_, place, split) for split in splits))


def _three(target: Target, mine: Fit, all_: Fit, place: int, split: str) -> str:
    digits = target.published.digits
    paper = target.paper(place, split)[0]
    found = (paper, mine.ours[place, split].mean, all_.ours[place, split].mean)
    return " · ".join(f"{value:.{digits}f}" for value in found)


def _misses(fits: Sequence[Fit]) -> Iterator[str]:
    missed = unreached(fits)
    yield from ("", "## Numbers that no reading reaches", "")
    yield (
        "Published numbers further than two combined spreads from every reading tried, each judged "
        f"alone: {len(missed)}."
    )
    yield ""
    yield from _head("table", "at", "arm", "paper", "nearest of ours")
    for one in missed:
        digits = one.target.published.digits
        where = f"{one.place} {one.target.published.along}"
        yield _row(
            one.target.study,
            where,
            one.split,
            f"{one.paper:.{digits}f}",
            f"{one.nearest:.{digits}f}",
        )


def _open(target: Target) -> list[str]:
    """Return the settings that a table leaves open, as far as there is a choice."""
    axes = {**target.axes, **{name: (None, *values) for name, values in target.extras.items()}}
    return [name for name, values in axes.items() if len(values) > 1]


def _head(*cells: object) -> tuple[str, str]:
    return _row(*cells), "|" + "---|" * len(cells)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
