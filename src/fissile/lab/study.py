"""A study: one figure or table of the paper, declared as data.

It knows the grid of settings, the arms, how many trials, what is drawn and tabulated, the paper's
own numbers and its claims. It knows nothing of devices, of storage or of how a picture is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from fissile._common.errors import FissileError, whole
from fissile.data.catalogue import Entry
from fissile.lab.claims import Claim
from fissile.lab.key import hashed
from fissile.lab.readings import applied
from fissile.lab.source import Misnamed
from fissile.lab.trial import Arm, Text, Trial, Work, changed, keys_of, numbered, settings

#: From seconds, through a minute or two, to the paper's own grid, epochs and trials.
SCALES = ("smoke", "quick", "paper")


@dataclass(frozen=True)
class Scale:
    """The settings of a study at one scale, and how often each is tried."""

    trials: int
    settings: tuple[Work, ...]

    def __post_init__(self) -> None:
        whole("trials", self.trials, least=1)


@dataclass(frozen=True)
class Lines:
    """Mean and standard error along an axis, one line for each arm; stars where ``stars`` says."""

    along: str
    measure: str
    arms: tuple[str, ...]
    where: Mapping[str, object] = field(default_factory=dict)
    title: str = ""
    stars: tuple[str, ...] = ()
    baseline: float | None = None  # where the dense network would lie, drawn as a dashed line
    log: bool = False  # the axis below
    above: str = ""  # an arm: the axis begins a little below it, and others may come from below


@dataclass(frozen=True)
class Heat:
    """A measure of one arm over two axes."""

    down: str
    across: str
    measure: str
    arm: str
    title: str = ""
    where: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Regression:
    """Cell means of one measure against another, with a least-squares line for each arm."""

    x: str
    y: str
    arms: tuple[str, ...]
    along: str
    where: Mapping[str, object] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Matrices:
    """The first layer of one trial's networks as pictures, a row for each arm."""

    arms: tuple[str, ...]
    shows: tuple[Literal["gram", "clustered", "w1"], ...] = ("gram", "w1")
    size: int = 4  # inputs per clause


@dataclass(frozen=True)
class Series:
    """Several columns along an axis, such as a closed form beside its simulation."""

    along: str
    measures: tuple[str, ...]
    where: Mapping[str, object] = field(default_factory=dict)
    title: str = ""
    log: bool = False


@dataclass(frozen=True)
class Curves:
    """How the test accuracy grew, epoch by epoch: dense, and an arm split at several times."""

    arm: str
    title: str = ""


@dataclass(frozen=True)
class Equivalence:
    """Accuracy over weights; above each point of an arm, the dense network that is as good."""

    arm: str
    title: str = ""


Panel = Lines | Heat | Regression | Matrices | Series | Curves | Equivalence


@dataclass(frozen=True)
class Published:
    """Numbers of the paper: value and spread for each place along an axis and each arm."""

    table: str
    measure: str
    along: str
    values: Mapping[int, Mapping[str, tuple[float, float] | float | None]]  # None: not published
    where: Mapping[str, object] = field(default_factory=dict)
    digits: int = 1

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm for row in self.values.values() for arm in row))


@dataclass(frozen=True)
class Study:
    """One figure or table of the paper.

    >>> study = Study("mine", "Title", "Figure 0", "About.", {"smoke": Scale(2, (Trial(),))})
    >>> len(study.works("smoke"))
    2
    """

    id: str
    title: str
    artefact: str
    about: str
    scales: Mapping[str, Scale]
    arms: tuple[Arm, ...] = (Arm(),)
    figure: tuple[tuple[Panel, ...], ...] = ()
    published: tuple[Published, ...] = ()
    claims: tuple[Claim, ...] = ()
    differs: Sequence[str] = ()
    accuracy: str = "accuracy"  # the measure that is reported as the accuracy
    file: str = ""  # where it was read from, if it is no study of the package

    @property
    def full(self) -> str:
        """The largest scale that it has: the paper's, or its author's own."""
        return max(self.scales, key=SCALES.index)

    def grid(
        self,
        scale: str,
        trials: int | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> str:
        """Return a hash of the trials that a run asks for, if the study is in a user's file."""
        if not self.file:
            return ""
        return hashed("".join(self.keys(scale, trials, changes)[1]))[:16]

    def works(
        self,
        scale: str,
        trials: int | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> list[Work]:
        """Return every trial of the study at a scale, the arms of a network side by side."""
        count, found = self._count(scale, trials), list[Work]()
        for cells in self._cells(scale, changes):
            each = [numbered(cell, count) for cell in cells]
            found += [work for side_by_side in zip(*each, strict=True) for work in side_by_side]
        return found

    def keys(
        self,
        scale: str,
        trials: int | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> tuple[int, Iterator[str]]:
        """Return how many trials :meth:`works` has, and their keys, one by one and cell by cell."""
        count = self._count(scale, trials)
        cells = list(chain.from_iterable(self._cells(scale, changes)))
        return count * len(cells), (key for cell in cells for key in keys_of(cell, count))

    def _count(self, scale: str, trials: int | None) -> int:
        """Return how often each cell is tried."""
        if scale not in self.scales:
            raise FissileError(f"unknown scale {scale!r}; {self.id} has {', '.join(self.scales)}")
        return self.scales[scale].trials if trials is None else whole("trials", trials, least=1)

    def _cells(self, scale: str, changes: Mapping[str, object] | None) -> list[list[Work]]:
        """Return trial 0 of every arm, for each setting of the grid."""
        unknown = [name for name in changes or {} if name not in self.settings]
        if unknown:
            raise FissileError(
                f"{self.id} has no setting {unknown[0]!r} to change; it has "
                f"{', '.join(sorted(self.settings))}"
            )
        known, found = set[Work](), list[list[Work]]()
        for setting in self._settings(scale, changes):
            cells = dict.fromkeys(self._changed(work, changes) for work in self._arms_of(setting))
            found.append([cell for cell in cells if cell not in known])
            known |= cells.keys()
        return found

    def converged(self, scale: str, changes: Mapping[str, object] | None = None) -> list[Work]:
        """Return, for each cell, the dense network of trial 0, trained until it has converged.

        >>> len(study.converged("paper"))
        64

        The smallest scale has none: it takes seconds. Cells that are split at another time than
        half way are left out: the paper's criterion is about the warm-up of its recipe. So are
        GPTs.
        """
        cells = [
            setting
            for setting in self._settings(scale, changes)
            if isinstance(setting, Trial) and setting.warm_up == setting.fine_tune
            if not isinstance(setting.task, Text)
        ]
        found: list[Work] = []
        for setting in cells if scale != "smoke" and not self.file else []:
            plain = replace(setting, arm=Arm("converged"), pictures=False, diagnosed=False)
            one = self._changed(plain, changes)
            assert isinstance(one, Trial)
            # How long other arms are tuned decides nothing here, and is no part of the key.
            found.append(replace(one, fine_tune=max(1, one.warm_up)))
        return list(dict.fromkeys(found))

    def everything(
        self,
        scale: str,
        trials: int | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> list[Work]:
        """Return what a run of the study computes: its trials, and its converged networks."""
        return self.works(scale, trials, changes) + self.converged(scale, changes)

    def _changed(self, work: Work, changes: Mapping[str, object] | None) -> Work:
        told = dict(changes or {})
        if seen := _seen(changes):
            told["fingerprint"] = seen[_data_of(work)]
        try:
            if "reading" in told:
                work = applied(work, str(told.pop("reading")))
            return changed(work, told) if told else work
        except FissileError as error:
            raise FissileError(f"{self.id}: {error}") from None

    def data(self, scale: str, changes: Mapping[str, object] | None = None) -> str | None:
        """Return the name of the data set that the study needs, if it needs one."""
        entry = self.entry(scale, changes)
        return None if entry is None else entry.name

    def entry(self, scale: str, changes: Mapping[str, object] | None = None) -> Entry | None:
        """Return what is known of the data set that the study needs, if it needs one."""
        return next(iter(self.entries(scale, changes)), None)

    def entries(self, scale: str, changes: Mapping[str, object] | None = None) -> list[Entry]:
        """Return what is known of every data set that the study needs."""
        tasks = (getattr(work, "task", None) for work in self.works(scale, 1, changes))
        known = {one.name: one for task in tasks if (one := getattr(task, "entry", None))}
        return list(known.values())

    @property
    def settings(self) -> set[str]:
        """What may be changed in the study: settings of its trials, and the reading."""
        return settings(next(iter(self.scales.values())).settings[0]) | {"reading"}

    def _settings(self, scale: str, changes: Mapping[str, object] | None) -> list[Work]:
        """Return the settings of a scale, of a study on several sets those whose set was found."""
        seen = _seen(changes)
        return [
            setting
            for setting in self.scales[scale].settings
            if not seen or _data_of(setting) in seen
        ]

    def _arms_of(self, setting: Work) -> list[Work]:
        if not isinstance(setting, Trial):
            return [replace(setting, number=0)]
        return [replace(setting, arm=arm, number=0) for arm in self.arms]


def _seen(changes: Mapping[str, object] | None) -> dict[str, str]:
    """Return the fingerprints of several data sets by name, where a run notes several.

    >>> _seen({"fingerprint": "digits=0123456789abcdef,generated=fedcba9876543210"})
    {'digits': '0123456789abcdef', 'generated': 'fedcba9876543210'}
    """
    parts = str((changes or {}).get("fingerprint", "")).split(",")
    return dict(part.split("=") for part in parts if "=" in part)


def _data_of(work: Work) -> str:
    """Return the name of a trial's data set."""
    return str(getattr(getattr(work, "task", None), "data", ""))


#: What panels, tables and claims call arms by, and what they call columns by.
_ARMS, _COLUMNS = ("arm", "arms", "stars", "above", "over", "others"), ("along", "down", "across")


def check(study: Study) -> None:
    """Raise an error at the first name in a study that no trial of it has.

    >>> check(STUDIES["capacity"])

    It looks at the scales, the splits, and the arms and axes of panels, tables and claims.
    """
    for name in study.scales or ("no scale",):
        if name not in SCALES:
            raise Misnamed(name, f"{name!r} is no scale; scales are {', '.join(SCALES)}")
    works = [work for scale in study.scales for work in study.works(scale, 1)]
    for trial in {work.arm: work for work in works if isinstance(work, Trial)}.values():
        _check_split(trial)
    cells = [work.columns() for work in works]
    arms, columns = ({str(c["arm"]): None for c in cells}, dict.fromkeys(chain(*cells)))
    parts: list[object] = [*chain(*study.figure), *study.published]
    for claim in study.claims:
        parts += [claim.check, *getattr(claim.check, "checks", ())]
    for part in parts:
        words = {name: getattr(part, name, ()) for name in (*_ARMS, *_COLUMNS, "where")}
        for name, value in words.items():
            known, what = (arms, "arm") if name in _ARMS else (columns, "column")
            for word in (value,) if isinstance(value, str) else value:
                if word and word not in known:
                    text = f"no trial has the {what} {word!r}, which {type(part).__name__} names"
                    raise Misnamed(word, f"{text}; there are {', '.join(known)}")


def _check_split(trial: Trial) -> None:
    """Refuse a split whose code the key of a trial would not tell from any other's."""
    from fissile.lab.compute import bank_arm

    name = trial.arm.split
    try:
        split = getattr(bank_arm(trial.arm, trial), "split", None)
    except FissileError as error:
        raise Misnamed(name, str(error)) from None
    if split is not None and not type(split).__module__.startswith("fissile."):
        raise Misnamed(
            name,
            f"the split {name!r} is not one of fissile's, and a trial's key has its name "
            "alone; train with it in a function of your own: see fissile.lab.function",
        )
