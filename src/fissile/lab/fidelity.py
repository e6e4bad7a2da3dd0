"""Fidelity: which of the settings that the paper leaves open fit its published tables.

A *reading* fixes the open settings of a table: how many samples, what makes a negative, and so on.
Every reading is trained like a study; its residual is how far its numbers lie from the paper's.

>>> run(works("quick"), store)
>>> best(compared(store, "quick"), "capacity").reading
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import sqrt
from statistics import geometric_mean
from typing import Any

from fissile._common.errors import FissileError
from fissile.lab.stats import summary
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES
from fissile.lab.study import Published
from fissile.lab.trial import Boolean, Trial, changed

Reading = Mapping[str, Any]  # the value of each open setting
Axes = Mapping[str, tuple[object, ...]]

_TINY = 1e-6  # a table that is matched to the digit has no multiples
#: What all tables must agree on in one setting; alpha and the kind of cosine may differ.
SHARED = ("train", "negatives", "others", "embedding", "moments")
#: The settings that a scale does not search in full.
_LIMITS: dict[str, Axes] = {
    "smoke": {
        "train": (5_000,),
        "negatives": ("literal", "flip"),
        "moments": ("carry",),
        "embedding": ("8",),
    },
    "quick": {"train": (10_000,), "moments": ("carry",), "embedding": ("8", "literals")},
    "paper": {},
}


@dataclass(frozen=True)
class Target:
    """A published table, the settings it leaves open, and the places that are compared."""

    study: str
    axes: Axes
    places: tuple[int, ...] = ()  # all
    #: Tried one at a time, with 10,000 samples and an embedding as wide as the input.
    extras: Axes = field(default_factory=dict)

    @property
    def published(self) -> Published:
        """The paper's numbers."""
        return STUDIES[self.study].published[0]

    @property
    def relative(self) -> bool:
        """Return whether residuals are in percent of the paper's number, not in its units."""
        return self.published.measure != "accuracy"

    def place(self, trial: Trial) -> Any:
        """Return where a trial stands in the table."""
        return trial.columns()[self.published.along]

    def paper(self, place: int, split: str) -> float:
        """Return the paper's number, whatever its alpha."""
        row = self.published.values[place]
        number: Any = next(row[arm] for arm in row if arm.partition("-")[0] == split)
        return float(number[0] if isinstance(number, tuple) else number)

    def readings(self, limits: Axes) -> list[Reading]:
        """Return every combination of the open settings, and the extras of the usual one."""
        values = [
            [value for value in axis if value in limits.get(name, axis)]
            for name, axis in self.axes.items()
        ]
        readings = [dict(zip(self.axes, chosen, strict=True)) for chosen in product(*values)]
        extras = [
            reading | {name: value}
            for reading in readings
            if (reading["train"], reading.get("embedding")) == (10_000, "literals")
            for name, others in self.extras.items()
            for value in others
        ]
        return [*readings, *extras]


_DATA: Axes = {
    "train": (5_000, 10_000, 20_000),
    "negatives": ("literal", "clause", "flip"),
    "others": ("matched", "arbitrary"),
}
_SPLIT: Axes = {"alpha": (2, 4), "moments": ("carry", "fresh")}
_COSINES = ("cosine", "absolute_cosine", "diagonal_cosine")
_LAST_OR_BEST = ("accuracy", "best")
_EMBEDDED: Axes = {
    **_DATA,
    "embedding": ("8", "32", "literals", "clauses"),
    "alpha": (2, 4),
    "measure": _LAST_OR_BEST,
    "clusters": (4,),
    "moments": ("carry",),
}
_EXTRAS: Axes = {"clusters": (1, 2), "moments": ("fresh",)}

TARGETS = (
    Target("codes", {**_DATA, **_SPLIT, "alpha": (2,), "measure": _LAST_OR_BEST}),
    Target("capacity", {**_DATA, **_SPLIT, "measure": ("capacity",)}),
    Target("cosine", {**_DATA, **_SPLIT, "measure": _COSINES}),
    Target("embed-neurons", _EMBEDDED, (4, 8, 16, 32), _EXTRAS),
    Target("embed-clauses", _EMBEDDED, (4, 8, 16, 32), _EXTRAS),
)


def under(reading: Reading, trial: Trial) -> Trial:
    """Return a study's trial under a reading."""
    changes = {name: reading[name] for name in ("train", "negatives", "others", "alpha", "moments")}
    if trial.embedding is not None:
        assert isinstance(trial.task, Boolean)
        widths = {"literals": trial.task.literals, "clauses": trial.task.clauses}
        changes["embedding"] = widths.get(reading["embedding"]) or int(reading["embedding"])
    if reading.get("clusters", 4) != 4:  # of the Gram matrix, for each child
        changes["clusters"] = reading["clusters"] * reading["alpha"]
    new = changed(trial, changes)
    assert isinstance(new, Trial)
    return replace(new, pictures=False)


@dataclass(frozen=True)
class Fit:
    """How a reading compares with a table."""

    target: Target
    reading: Reading
    residual: float


def works(scale: str) -> list[Trial]:
    """Return every trial of the search."""
    return list(dict.fromkeys(trial for *_, trials in _plan(scale) for trial in trials))


def _plan(scale: str) -> Iterator[tuple[Target, Reading, list[Trial]]]:
    """Yield every reading of every table, with its trials."""
    if scale not in _LIMITS:
        raise FissileError(f"unknown scale {scale!r}; there are {', '.join(_LIMITS)}")
    for target in TARGETS:
        places = target.places or tuple(target.published.values)
        base = [
            trial
            for trial in STUDIES[target.study].works(scale, 5 if scale == "paper" else 2)
            if isinstance(trial, Trial) and target.place(trial) in places
        ]
        # The smallest grid keeps its own number of samples: it is there to be quick.
        kept = {"train": base[0].task.samples} if scale == "smoke" else {}
        for reading in target.readings(_LIMITS[scale]):
            yield target, reading, [under({**reading, **kept}, trial) for trial in base]


def compared(store: Store, scale: str) -> list[Fit]:
    """Compare every reading with the paper; the store must hold all trials of the search."""
    fits = []
    for target, reading, trials in _plan(scale):
        measures = {row.key: row.measures for row in store.rows([trial.key for trial in trials])}
        percent = 100 if reading["measure"] in _LAST_OR_BEST else 1
        values: dict[tuple[int, str], list[float]] = {}
        for trial in trials:
            value = percent * measures[trial.key][reading["measure"]]
            values.setdefault((target.place(trial), trial.arm.split), []).append(value)
        squares = []
        for (place, split), own in values.items():
            paper = target.paper(place, split)
            unit = 0.01 * paper if target.relative else 1
            squares.append(((summary(own).mean - paper) / unit) ** 2)
        fits.append(Fit(target, reading, sqrt(sum(squares) / len(squares))))
    return fits


def best(fits: Iterable[Fit], study: str) -> Fit:
    """Return the reading that fits a table best."""
    return min((fit for fit in fits if fit.target.study == study), key=lambda fit: fit.residual)


def common(fits: Sequence[Fit]) -> list[tuple[float, list[Fit]]]:
    """Return the settings that tables can share, from best to worst, each with its fits.

    A setting's score is the geometric mean, over the tables, of its residual as a multiple of the
    table's best. Where a table leaves more open (alpha, the kind of cosine), its best is taken.
    """
    studies = [target.study for target in TARGETS]
    floors = [best(fits, study).residual for study in studies]
    last = [fit.reading for fit in fits if fit.target is TARGETS[-1]]  # it has all these settings
    scored = []
    for shared in product(*(dict.fromkeys(reading[name] for reading in last) for name in SHARED)):
        setting = dict(zip(SHARED, shared, strict=True))
        agreeing = [
            fit
            for fit in fits
            if all(fit.reading.get(name, value) == value for name, value in setting.items())
        ]
        if {fit.target.study for fit in agreeing} == set(studies):
            chosen = [best(agreeing, study) for study in studies]
            multiples = [
                (fit.residual + _TINY) / (floor + _TINY)
                for fit, floor in zip(chosen, floors, strict=True)
            ]
            scored.append((geometric_mean(multiples), chosen))
    return sorted(scored, key=lambda pair: pair[0])


def markdown(fits: Sequence[Fit]) -> str:
    """Return everything the search found, as tables."""
    head = ["table", "readings tried", "residual", "best reading"]
    rows = []
    for target in TARGETS:
        fit = best(fits, target.study)
        tried = sum(other.target is target for other in fits)
        unit = "%" if target.relative else "points"
        choices = [n for n, axis in target.axes.items() if len(axis) > 1 or n in target.extras]
        settings = ", ".join(f"{name} {fit.reading[name]}" for name in choices)
        rows.append([target.study, str(tried), f"{fit.residual:.1f} {unit}", settings])
    parts = [
        "## The best reading of each table\n\nResiduals are root mean squares over a table: "
        "points of accuracy, or percent of a number.\n",
        _table(head, rows),
        "## One setting for all tables\n\nThe score is the geometric mean of the residuals, each "
        "as a multiple of its table's best. Alpha and the kind of cosine may differ between "
        "tables; the rest is shared.\n",
    ]
    head = ["score", *SHARED, *(target.study for target in TARGETS)]
    rows = []
    for score, chosen in common(fits)[:10]:
        shared = [str(chosen[-1].reading[name]) for name in SHARED]
        rows.append([f"{score:.2f}", *shared, *(f"{fit.residual:.1f}" for fit in chosen)])
    return "\n".join([*parts, _table(head, rows)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])
