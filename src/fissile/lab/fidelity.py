"""Fidelity: which of the settings that the paper leaves open fit its published tables.

A *reading* fixes them all: how many samples, what makes a negative, how wide the embedding is, and
so on. Every reading is trained like any study; its residual is how far its numbers lie from the
paper's.

>>> run(works("quick"), store)
>>> best(compared(store, "quick"), "capacity").reading
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, hypot, isfinite, log, sqrt

from fissile._common.errors import FissileError
from fissile.data import Negatives, Others
from fissile.lab.stats import Summary, summary
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES
from fissile.lab.study import Published
from fissile.lab.trial import Boolean, Moments, Trial, changed

__all__ = [
    "TARGETS",
    "Fit",
    "Reading",
    "best",
    "common",
    "compared",
    "markdown",
    "unreached",
    "works",
]

#: How wide an embedding is: a number, or as many as the formula has literals or clauses.
_EMBEDDINGS = ("8", "32", "literals", "clauses")
_ALL = (4, 8, 16, 32)
_TINY = 1e-6  # a table that is matched to the digit has no multiples


@dataclass(frozen=True)
class Reading:
    """One way to settle what the paper leaves open."""

    train: int = 10_000
    negatives: Negatives = "literal"
    others: Others = "matched"
    embedding: str = "literals"
    alpha: int = 4
    moments: Moments = "carry"
    clusters: int = 4  # of the Gram matrix, for each child
    measure: str = "accuracy"

    def trial(self, trial: Trial) -> Trial:
        """Return a study's trial under this reading."""
        changes = {
            "train": self.train,
            "negatives": self.negatives,
            "others": self.others,
            "alpha": self.alpha,
            "moments": self.moments,
        }
        new = changed(trial, changes)
        assert isinstance(new, Trial)
        if new.embedding is not None:
            assert isinstance(new.task, Boolean)
            width = {"literals": new.task.literals, "clauses": new.task.clauses}.get(self.embedding)
            new = replace(new, embedding=width or int(self.embedding))
        if new.arm.split == "gram" and self.clusters != 4:
            new = replace(new, arm=replace(new.arm, clusters=self.clusters * self.alpha))
        return new

    def text(self, names: Sequence[str]) -> str:
        """Write some of its settings in a line."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


_DATA: dict[str, tuple[object, ...]] = {
    "train": (5_000, 10_000, 20_000),
    "negatives": ("literal", "clause", "flip"),
    "others": ("matched", "arbitrary"),
}
_BY_EPOCH = {"measure": ("accuracy", "best")}
#: What all tables must agree on in one setting; alpha and the kind of cosine may differ.
SHARED = ("train", "negatives", "others", "embedding", "moments")


@dataclass(frozen=True)
class Target:
    """A published table, the settings it leaves open, and the places that are compared."""

    study: str
    axes: Mapping[str, tuple[object, ...]]
    places: tuple[int, ...] | None = None
    relative: bool = False  # residuals in percent of the paper's number, not in its units
    #: Tried one at a time, and only where the other settings are at their defaults.
    extras: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def published(self) -> Published:
        """The paper's numbers."""
        return STUDIES[self.study].published[0]

    def paper(self, place: int, split: str) -> tuple[float, float]:
        """Return the paper's number and its spread, whatever its alpha."""
        row = self.published.values[place]
        number = next(value for arm, value in row.items() if arm.partition("-")[0] == split)
        assert number is not None
        return number if isinstance(number, tuple) else (number, 0.0)

    def readings(self, limits: Mapping[str, tuple[object, ...]]) -> list[Reading]:
        """Return every combination of the open settings."""
        names = list(self.axes)
        values = [[v for v in self.axes[n] if v in limits.get(n, self.axes[n])] for n in names]
        found = [Reading(**dict(zip(names, some, strict=True))) for some in product(*values)]  # type: ignore[arg-type]
        return found + [
            replace(reading, **{name: value})  # type: ignore[arg-type]
            for reading in found
            if (reading.train, reading.embedding) == (Reading.train, Reading.embedding)
            for name, others in self.extras.items()
            for value in others
        ]


_SPLIT: dict[str, tuple[object, ...]] = {"alpha": (2, 4), "moments": ("carry", "fresh")}
_EXTRAS: dict[str, tuple[object, ...]] = {"clusters": (1, 2), "moments": ("fresh",)}
_EMBEDDED = _DATA | {"embedding": _EMBEDDINGS, "alpha": (2, 4)} | _BY_EPOCH

TARGETS = (
    Target("codes", _DATA | {"alpha": (2,), "moments": _SPLIT["moments"]} | _BY_EPOCH),
    Target("capacity", _DATA | _SPLIT | {"measure": ("capacity",)}, relative=True),
    Target(
        "cosine",
        _DATA | _SPLIT | {"measure": ("cosine", "absolute_cosine", "diagonal_cosine")},
        relative=True,
    ),
    Target("embed-neurons", _EMBEDDED, _ALL, extras=_EXTRAS),
    Target("embed-clauses", _EMBEDDED, _ALL, extras=_EXTRAS),
)


@dataclass(frozen=True)
class _Scale:
    trials: int
    limits: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    base: str = "paper"  # the scale of the studies whose grid is used


_SCALES = {
    "smoke": _Scale(
        2,
        {
            "train": (5_000,),
            "negatives": ("literal", "flip"),
            "moments": ("carry",),
            "embedding": ("8",),
        },
        "smoke",
    ),
    "quick": _Scale(
        2, {"train": (10_000,), "moments": ("carry",), "embedding": ("8", "literals")}, "quick"
    ),
    "paper": _Scale(5),
}


@dataclass(frozen=True)
class Fit:
    """How a reading compares with a table."""

    target: Target
    reading: Reading
    ours: Mapping[tuple[int, str], Summary]  # by place and arm
    residual: float

    def __str__(self) -> str:
        unit = "%" if self.target.relative else "points"
        return f"{self.residual:.1f} {unit}"


def works(scale: str) -> list[Trial]:
    """Return every trial of the search."""
    return list(dict.fromkeys(t for *_, trials in _plan(scale) for t in trials))


def _plan(scale: str) -> Iterator[tuple[Target, Reading, list[Trial]]]:
    if scale not in _SCALES:
        raise FissileError(f"unknown scale {scale!r}; there are {', '.join(_SCALES)}")
    chosen = _SCALES[scale]
    for target in TARGETS:
        base = [
            work
            for work in STUDIES[target.study].works(chosen.base, chosen.trials)
            if isinstance(work, Trial) and _place(target, work) in _compared(target)
        ]
        for reading in target.readings(chosen.limits):
            # A smaller grid keeps its own number of samples: it is there to be quick.
            small = chosen.base == "smoke"
            kept = replace(reading, train=base[0].task.samples) if small else reading
            yield target, reading, [replace(kept.trial(w), pictures=False) for w in base]


def _place(target: Target, trial: Trial) -> int:
    place = trial.columns()[target.published.along]
    assert isinstance(place, int)
    return place


def _compared(target: Target) -> Sequence[int]:
    return list(target.published.values) if target.places is None else target.places


def compared(store: Store, scale: str) -> list[Fit]:
    """Compare every reading with the paper; the store must hold all trials of the search."""
    fits = []
    for target, reading, trials in _plan(scale):
        rows = {row.key: row.measures for row in store.rows([trial.key for trial in trials])}
        fits.append(_fit(target, reading, trials, rows))
    return fits


def _fit(
    target: Target,
    reading: Reading,
    trials: Sequence[Trial],
    rows: Mapping[str, Mapping[str, float]],
) -> Fit:
    values: dict[tuple[int, str], list[float]] = {}
    for trial in trials:
        value = _value(rows[trial.key], reading.measure)
        values.setdefault((_place(target, trial), trial.arm.split), []).append(value)
    ours = {key: summary(found) for key, found in values.items()}
    squares = [
        ((mine.mean - paper) / (0.01 * paper if target.relative else 1)) ** 2
        for key, mine in ours.items()
        for paper, _ in [target.paper(*key)]
    ]
    return Fit(target, reading, ours, sqrt(sum(squares) / len(squares)))


def _value(measures: Mapping[str, float], name: str) -> float:
    return 100 * measures[name] if name in ("accuracy", "best") else measures[name]


def best(fits: Sequence[Fit], study: str) -> Fit:
    """Return the reading that fits a table best."""
    return min((one for one in fits if one.target.study == study), key=lambda one: one.residual)


def common(fits: Sequence[Fit]) -> list[tuple[float, list[Fit]]]:
    """Return the settings that tables can share, from best to worst, each with its fits.

    A setting's score is the geometric mean, over the tables, of its residual as a multiple of the
    table's best. Where a table leaves more open (alpha, the kind of cosine), its best is taken.
    """
    floors = {one.study: best(fits, one.study).residual for one in TARGETS}
    values = [list(dict.fromkeys(getattr(one.reading, name) for one in fits)) for name in SHARED]
    found = []
    for shared in product(*values):
        each = [
            _best_within(fits, target, dict(zip(SHARED, shared, strict=True))) for target in TARGETS
        ]
        chosen = [one for one in each if one is not None]
        if len(chosen) == len(TARGETS):
            ratios = [(one.residual + _TINY) / (floors[one.target.study] + _TINY) for one in chosen]
            found.append((exp(sum(map(log, ratios)) / len(ratios)), chosen))
    return sorted(found, key=lambda one: one[0])


def _best_within(fits: Sequence[Fit], target: Target, shared: Mapping[str, object]) -> Fit | None:
    """Return a table's best fit with these settings; those it does not have do not matter."""
    asked = [name for name in SHARED if name in target.axes or name in target.extras]
    mine = [
        one
        for one in fits
        if one.target is target and all(getattr(one.reading, n) == shared[n] for n in asked)
    ]
    return min(mine, key=lambda one: one.residual, default=None)


@dataclass(frozen=True)
class Miss:
    """A published number that no reading reaches, and the nearest that one came."""

    target: Target
    place: int
    split: str
    paper: float
    nearest: float
    reading: Reading


def unreached(fits: Sequence[Fit]) -> list[Miss]:
    """Return the published numbers further than two standard errors and spreads from every reading.

    Each number is judged alone: a reading that reaches one may be far from its neighbours.
    """
    misses = []
    for target in TARGETS:
        mine = [one for one in fits if one.target is target]
        for key in dict.fromkeys(key for one in mine for key in one.ours):
            paper, spread = target.paper(*key)
            each = [(one, one.ours[key]) for one in mine if key in one.ours]
            if all(_apart(found, paper, spread) for _, found in each):
                one, found = min(each, key=lambda both: abs(both[1].mean - paper))
                misses.append(Miss(target, *key, paper, found.mean, one.reading))
    return misses


def _apart(found: Summary, paper: float, spread: float) -> bool:
    error = found.error if isfinite(found.error) else 0.0
    return abs(found.mean - paper) > 2 * hypot(error, spread)


# --- what the search found, as Markdown


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
