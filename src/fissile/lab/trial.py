"""A trial: everything that decides one result of the lab, and the key it is stored under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from fissile.data import Formula, Negatives, Others
from fissile.errors import FissileError, whole
from fissile.theory import RandomSparse
from fissile.train import Recipe

__all__ = [
    "REVISION",
    "Arm",
    "Boolean",
    "Sampling",
    "Trial",
    "Work",
    "changed",
    "from_spec",
    "settings",
]

Moments = Literal["carry", "fresh"]
#: Raised when the same trial would come to other numbers, so that stored ones are not mixed in.
REVISION = 1


@dataclass(frozen=True)
class Boolean:
    """The Boolean task; the paper leaves the numbers of samples and the negatives open.

    >>> Boolean(clauses=8).literals
    32
    """

    clauses: int = 8
    size: int = 4
    train: int = 10_000
    test: int = 2_000
    negatives: Negatives = "literal"
    others: Others = "matched"

    def __post_init__(self) -> None:
        _ = self.formula  # which checks its own sizes
        for name in ("train", "test"):
            whole(name, getattr(self, name), least=2)
        _one_of("negatives", self.negatives, Negatives)
        _one_of("others", self.others, Others)

    @property
    def formula(self) -> Formula:
        """The formula to learn."""
        return Formula(self.clauses, self.size)

    @property
    def literals(self) -> int:
        """How many inputs the network has."""
        return self.clauses * self.size


@dataclass(frozen=True)
class Arm:
    """What becomes of a warm network: ``Arm()`` stays dense, ``Arm("clause", 4)`` is expanded.

    >>> Arm("clause", 4).name
    'clause-4'
    """

    split: str = "dense"
    alpha: int = 1
    clusters: int | None = None
    moments: Moments = "carry"

    def __post_init__(self) -> None:
        whole("alpha", self.alpha, least=1)
        if self.clusters is not None:
            whole("clusters", self.clusters, least=1)
        _one_of("moments", self.moments, Moments)

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.split if self.alpha == 1 else f"{self.split}-{self.alpha}"


@dataclass(frozen=True)
class Trial:
    """One network of one arm: its task, its shape, how it is trained, and its number.

    >>> Trial(Boolean(clauses=8), neurons=8, arm=Arm("random", 2), number=3)

    The number is the seed of the data, the weights, the batches and the split: the arms of a trial
    share them all.
    """

    kind: ClassVar[str] = "network"

    task: Boolean = field(default_factory=Boolean)
    neurons: int = 8
    embedding: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    warm_up: int = 25
    fine_tune: int = 25
    arm: Arm = field(default_factory=Arm)
    number: int = 0
    pictures: bool = False  # keep the first layer, to draw it

    def __post_init__(self) -> None:
        for name in ("neurons", "fine_tune"):
            whole(name, getattr(self, name), least=1)
        for name in ("warm_up", "number"):
            whole(name, getattr(self, name), least=0)
        if self.embedding is not None:
            whole("embedding", self.embedding, least=1)
            if self.arm.split == "clause":
                raise FissileError("behind an embedding there are no clauses to split by")

    @property
    def key(self) -> str:
        """The name of the result: equal for equal trials, whoever runs them."""
        return _key(self)

    def network(self) -> Trial:
        """Return the dense network that all arms of this trial go on from."""
        return replace(self, arm=Arm())

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be trained side by side."""
        return self.kind, self.warm_up, self.fine_tune, self.task.size, bool(self.embedding)

    @property
    def steps(self) -> int:
        """Count the training steps, the warm-up once for each arm."""
        return (self.warm_up + self.fine_tune) * -(-self.task.train // self.recipe.batch)

    @property
    def cost(self) -> float:
        """Estimate the seconds on two cores, fitted to a run of all Boolean studies.

        The warm-up, which all arms share, counts for the dense one.
        """
        first = self.embedding or self.task.literals
        weights, behind = self.neurons * first, first * self.task.literals
        step = 0.74e-6 + (3.9e-9 + 0.19e-9 * self.arm.alpha) * weights
        step += 2.6e-9 * behind if self.embedding else 0.0
        measures = 0.0 if self.embedding else 7e-4 + 8.8e-6 * self.task.literals * self.task.clauses
        epochs = self.fine_tune + (self.warm_up if self.arm.split == "dense" else 0)
        return epochs * -(-self.task.train // self.recipe.batch) * step + measures

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table: what it is, without what came of it."""
        return {
            "clauses": self.task.clauses,
            "literals": self.task.literals,
            "neurons": self.neurons,
            "load": self.task.clauses / self.neurons,
            "embedding": self.embedding or 0,
            "train": self.task.train,
            "negatives": self.task.negatives,
            "others": self.task.others,
            "lr": self.recipe.lr,
            "warm_up": self.warm_up,
            "fine_tune": self.fine_tune,
            "arm": self.arm.name,
            "split": self.arm.split,
            "alpha": self.arm.alpha,
            "clusters": self.arm.clusters or 0,
            "moments": self.arm.moments,
            "trial": self.number,
        }


@dataclass(frozen=True)
class Sampling:
    """A trial of the theory: random sparse networks, drawn and counted, beside the closed forms."""

    kind: ClassVar[str] = "sampling"

    literals: int = 32
    size: int = 4
    neurons: int = 8
    alpha: int = 2
    networks: int = 2_000
    eps: float = 0.05
    number: int = 0

    @property
    def key(self) -> str:
        """The name of the result."""
        return _key(self)

    def network(self) -> Sampling:
        """Return itself: there is nothing to share."""
        return self

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be computed side by side."""
        return (self.kind,)

    @property
    def steps(self) -> int:
        """Count nothing: a sampled network is not trained."""
        return 0

    @property
    def cost(self) -> float:
        """Estimate the seconds, from measured runs."""
        return 1.3e-8 * self.networks * self.alpha * self.neurons * self.literals

    @property
    def formula(self) -> RandomSparse:
        """The closed forms."""
        return RandomSparse(self.literals, self.size, self.neurons, self.alpha)

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table."""
        return {
            "clauses": self.literals // self.size,
            "literals": self.literals,
            "neurons": self.neurons,
            "arm": f"sparse-{self.alpha}",
            "alpha": self.alpha,
            "networks": self.networks,
            "trial": self.number,
        }


Work = Trial | Sampling
_KINDS: dict[str, type[Trial] | type[Sampling]] = {one.kind: one for one in (Trial, Sampling)}
_PARTS: dict[str, type[Any]] = {"task": Boolean, "recipe": Recipe, "arm": Arm}


def _key(work: Work) -> str:
    spec = {"revision": REVISION, "kind": work.kind, **asdict(work)}
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def from_spec(kind: str, spec: dict[str, Any]) -> Work:
    """Build a trial from its stored form: ``from_spec(trial.kind, asdict(trial))``."""
    values = {
        name: _PARTS[name](**value) if name in _PARTS else value for name, value in spec.items()
    }
    return _KINDS[kind](**values)


def changed(work: Work, changes: Mapping[str, object]) -> Work:
    """Return a trial with other settings, wherever they live: ``changed(t, {"lr": 3e-3})``."""
    for name, value in changes.items():
        work = _with(work, name, value)
    return work


def _with(work: Work, name: str, value: object) -> Work:
    found: Any = work
    if name in _settings(work):
        return _replaced(found, name, _typed(name, getattr(found, name), value))  # type: ignore[no-any-return]
    for part in _PARTS:
        inner: Any = getattr(work, part, None)
        if name in _settings(inner):
            # An option means nothing to an arm without it, whose trials stay shared.
            if part == "arm" and not _concerns(name, inner):
                return work
            new = _replaced(inner, name, _typed(name, getattr(inner, name), value))
            return _replaced(found, part, new)  # type: ignore[no-any-return]
    known = ", ".join(sorted(settings(work)))
    raise FissileError(f"there is no setting {name!r} to change; there are {known}")


def _concerns(name: str, arm: Arm) -> bool:
    return arm.split == "gram" if name == "clusters" else arm.split != "dense"


def settings(work: Work) -> set[str]:
    """Return the names of what may be changed in the trials of a study; its arms are its own."""
    parts = (_settings(getattr(work, part, None)) for part in _PARTS)
    return _settings(work).union(*parts) - ({"alpha"} if isinstance(work, Trial) else set())


def _replaced(part: Any, name: str, value: object) -> Any:
    return replace(part, **{name: value})


def _settings(part: Any) -> set[str]:
    """Return the names of what may be changed in a part of a trial."""
    if not is_dataclass(part):
        return set()
    return {one.name for one in fields(part)} - _PARTS.keys() - {"number", "pictures", "split"}


def _typed(name: str, old: object, new: object) -> object:
    """Return the new value if it is of the old one's kind."""
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        return float(new)
    optional = name in ("embedding", "clusters")
    wanted = int if optional else type(old)
    if (isinstance(new, wanted) and not isinstance(new, bool)) or (optional and new is None):
        return new
    kind = {str: "a word", int: "a whole number"}.get(wanted, "a number")
    raise FissileError(f"{name}={new!r} is not {kind}")


def _one_of(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        known = " or ".join(repr(one) for one in get_args(choices))
        raise FissileError(f"{name}={value!r} is not known; give {known}")
