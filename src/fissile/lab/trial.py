"""A trial: everything that decides one result of the lab, and the key it is stored under."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import isfinite, prod
from typing import Any, ClassVar, Literal, get_args

from fissile._common.errors import FissileError, whole
from fissile.bank.loop import Recipe
from fissile.bank.sparse import Plan
from fissile.lab.budget_methods import METHODS, SETTINGS
from fissile.lab.key import Keyed, around_number, hashed
from fissile.lab.task import EPOCHS, LATER, limit, one_of, patience_of, task_from
from fissile.lab.task import Boolean as Boolean
from fissile.lab.task import Features as Features
from fissile.lab.task import Images as Images
from fissile.lab.task import Task as Task
from fissile.lab.task import Text as Text
from fissile.measure.theory import RandomSparse


def _check_whole(part: Any, **least: int) -> None:
    """Refuse settings that are no whole numbers, or too small."""
    for name, value in least.items():
        if getattr(part, name) is not None or name not in _OPTIONAL:
            whole(name, getattr(part, name), least=value)


#: Settings that may be None.
_OPTIONAL = ("embedding", "clusters")
#: The seeds that settings are searched with; no trial has one of these.
SEARCHED = (1_000_000, 1_000_001)


@dataclass(frozen=True)
class Contender(Keyed):
    """A method, the budget of a dense network of some width, and the trial's number.

    >>> Contender(Features("clinc150-minilm"), neurons=8, method="gradual").budget
    4430

    Its six settings are tried on held-out training samples; the best is trained on all of them,
    and tested once. Trials of a cell share that search. On a GPU, sums depend on what is trained
    beside, and close settings may change places; on a processor the search is always the same.
    """

    kind: ClassVar[str] = "contender"

    task: Features
    neurons: int = 8
    method: str = "dense"
    epochs: int = 50
    batch: int = 64
    number: int = 0

    def __post_init__(self) -> None:
        _check_whole(self, neurons=1, epochs=1, batch=1, number=0)
        if self.number >= SEARCHED[0]:
            raise FissileError(f"number={self.number} is kept for searching; give a smaller one")
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            raise FissileError(f"there is no method {self.method!r}; there are {known}")

    @property
    def plans(self) -> list[Plan]:
        """The settings that the method may choose from."""
        return METHODS[self.method](self.budget, self.inputs, self.task.outputs)

    @property
    def inputs(self) -> int:
        return prod(self.task.entry.shape)

    @property
    def budget(self) -> int:
        """The parameters of a dense network with these neurons, biases included."""
        outputs = self.task.outputs
        return self.neurons * (self.inputs + 1 + outputs) + outputs

    def network(self) -> Contender:
        """Return the cell, whose trials are computed together: they share its search."""
        return replace(self, number=0)

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be trained side by side."""
        return self.kind, self.task, self.epochs, self.batch

    @property
    def cost(self) -> float:
        """About the seconds on two cores, a share of the search among them."""
        steps = self.epochs * -(-self.task.samples // self.batch) * (1 + SETTINGS // 3)
        weights = max(plan.weights(self.inputs, self.task.outputs) for plan in self.plans)
        return steps * (1e-4 + weights * (5e-9 + 1.5e-10 * self.batch))

    def columns(self) -> dict[str, object]:
        return {
            **self.task.columns(),
            "neurons": self.neurons,
            "budget": self.budget,
            "epochs": self.epochs,
            "arm": self.method,
            "trial": self.number,
        }


Moments = Literal["carry", "fresh"]
Grow = Literal["random", "gradient"]
Shared = Literal["magnitude", "layer"]
#: Splits that keep the inputs of a feature of the data together; see :mod:`fissile.lab.directions`.
GUIDES = ("means", "atoms")


@dataclass(frozen=True)
class Arm:
    """What becomes of a warm network: ``Arm()`` stays dense, ``Arm("clause", 4)`` is expanded.

    >>> Arm("clause", 4).name
    'clause-4'

    ``means`` and ``atoms`` are splits that features of the data guide. Three arms are no splits:
    ``overlapping``, whose children share inputs; ``dropconnect``, with a fresh mask at every step;
    and ``dynamic``, a random split whose masks move: every so many steps a fraction of the weights
    dies, and as many ``grow`` at random or where the gradient is large. ``allocation`` is how the
    two layers of a GPT's pairs share their budget.
    ``converged`` stays dense and trains on until its accuracy no longer rises: see
    :mod:`fissile.lab.task`.
    """

    split: str = "dense"
    alpha: int = 1
    clusters: int | None = None
    moments: Moments = "carry"
    every: int = field(default=100, metadata=LATER)
    fraction: float = field(default=0.1, metadata=LATER)
    grow: Grow = field(default="random", metadata=LATER)
    allocation: Shared = field(default="magnitude", metadata=LATER)

    def __post_init__(self) -> None:
        _check_whole(self, alpha=1, every=1, clusters=1)
        one_of("moments", self.moments, get_args(Moments))
        one_of("grow", self.grow, get_args(Grow))
        one_of("allocation", self.allocation, get_args(Shared))
        if not 0 < self.fraction <= 1:
            raise FissileError(f"fraction={self.fraction!r} is not a share between 0 and 1")

    @property
    def unsplit(self) -> bool:
        """Return whether the network stays as it is."""
        return self.split in ("dense", "converged")

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        split = self.split
        if split == "dynamic" and self.grow == "gradient":
            split = "dynamic-gradient"
        if self.allocation == "layer":
            split = f"{split}-layer"
        return split if self.alpha == 1 else f"{split}-{self.alpha}"

    def columns(self, task: Task) -> dict[str, object]:
        """Return the arm as columns of a table, how its masks move among them where they may."""
        columns: dict[str, object] = {
            "arm": self.name,
            "split": self.split,
            "alpha": self.alpha,
            "clusters": self.clusters or 0,
            "moments": self.moments,
        }
        if isinstance(task, Features | Text):
            dynamic = self.split == "dynamic"
            columns["every"] = self.every if dynamic else 0
            columns["fraction"] = self.fraction if dynamic else 0.0
            columns["grow"] = self.grow if dynamic else "none"
        if isinstance(task, Text):
            columns["allocation"] = self.allocation
        return columns


@dataclass(frozen=True)
class Trial(Keyed):
    """One network of one arm: its task, its shape, how it is trained, and its number.

    >>> Trial(Boolean(clauses=8), neurons=8, arm=Arm("random", 2), number=3)
    >>> Trial(Features("cifar100-clip"), neurons=12, depth=5, layer_norm=True)

    The number is the seed of the data, the weights, the batches and the split: the arms of a trial
    share them all. ``depth`` counts the layers of weights. With ``diagnosed``, features of the
    data are measured, at the split and at the end: see :mod:`fissile.lab.directions`.
    """

    kind: ClassVar[str] = "network"

    task: Task = field(default_factory=Boolean)
    neurons: int = 8
    embedding: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    warm_up: int = 25
    fine_tune: int = 25
    arm: Arm = field(default_factory=Arm)
    number: int = 0
    pictures: bool = False  # keep what is drawn: the first layer, or how the accuracy grew
    depth: int = field(default=2, metadata=LATER)
    layer_norm: bool = field(default=False, metadata=LATER)
    diagnosed: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        _check_whole(self, neurons=1, fine_tune=1, warm_up=0, number=0, depth=2, embedding=1)
        if self.embedding is not None and self.arm.split == "clause":
            raise FissileError("behind an embedding there are no clauses to split by")
        if self.arm.split == "clause" and not isinstance(self.task, Boolean):
            raise FissileError("only the Boolean task has clauses to split by")
        if isinstance(self.task, Text):
            self._check_text()
        elif self.arm.allocation != "magnitude":
            raise FissileError("allocation is for a GPT alone; of classifiers, see the frontier")
        plain = self.depth == 2 and not (self.layer_norm or self.diagnosed)
        if not isinstance(self.task, Features) and not (plain and self.arm.split not in GUIDES):
            raise FissileError(
                "depth, layer_norm, diagnosed and splits by means or atoms are for classifiers of "
                "features alone"
            )

    def _check_text(self) -> None:
        """Refuse what the trainer of GPTs cannot do."""
        able = (
            self.arm.split in ("dense", "random", "gram", "dynamic") and self.arm.grow == "random"
        )
        if not able or self.embedding or self.pictures:
            raise FissileError(f"a GPT has no arm {self.arm.name!r}, no embedding and no pictures")
        if self.recipe.l1 or self.recipe.l2 or self.recipe.orthogonal:
            raise FissileError("a GPT is trained without penalties; give l1=0 and l2=0")

    def network(self) -> Trial:
        """Return the dense network that all arms of this trial share, except ``converged``."""
        return self if self.arm.split == "converged" else replace(self, arm=Arm())

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be trained side by side."""
        task = self.task.size if isinstance(self.task, Boolean) else self.task
        # A bank takes every network's own recipe; a backbone is trained by one for all.
        recipe = self.recipe if isinstance(self.task, Images) else None
        more: tuple[object, ...] = bool(self.embedding), recipe, self.diagnosed
        if isinstance(self.task, Text):  # one shape, one recipe
            more = self.neurons, self.recipe
        return self.kind, self.warm_up, self.fine_tune, task, *more

    @property
    def cost(self) -> float:
        """About the seconds on two cores, of one network among many.

        The warm-up, which all arms share, counts for the dense one.
        """
        epochs = self.fine_tune
        if self.arm.split == "converged":
            epochs = min(EPOCHS, limit(self.warm_up, patience_of(self.task)) - self.warm_up)
        if self.arm.unsplit:
            epochs += self.warm_up
        steps = epochs * -(-self.task.samples // self.recipe.batch)
        if isinstance(self.task, Text):
            steps = epochs * self.task.steps
        measures = 0.0
        if isinstance(self.task, Boolean) and not self.embedding:
            measures = 7e-4 + 8.8e-6 * self.task.literals * self.task.clauses
        return steps * self._step + measures

    @property
    def _step(self) -> float:
        """The cost of one training step; its constants were fitted to measured times."""
        task, hidden, alpha = self.task, self.neurons, self.arm.alpha
        if isinstance(task, Boolean):
            first = self.embedding or task.literals
            behind = 2.6e-9 * first * task.literals if self.embedding else 0.0
            return 0.74e-6 + (3.9e-9 + 0.19e-9 * alpha) * hidden * first + behind
        if isinstance(task, Text):  # its products, forth and back, at 5e10 a second
            wide = hidden * alpha if task.place == "ffn" else task.beside
            block = 4 * task.width**2 + 2 * task.width * (wide + task.context)
            return self.recipe.batch * task.context * 6 * task.layers * block / 5e10
        if isinstance(task, Images):
            return 0.9  # the backbone; its head hardly matters
        inputs = prod(task.entry.shape)
        weights = inputs * hidden + (self.depth - 2) * hidden**2 + hidden * task.outputs
        if self.arm.split == "dropconnect":
            return 2.5e-5 + 1.5e-9 * alpha * inputs * hidden
        if self.arm.split == "dynamic":
            return 5e-5 + 1e-9 * weights * (1 + alpha)
        if self.depth > 2:
            return 1e-4 + 2e-9 * weights * (1 + alpha)
        return 2e-5 + 2.0e-9 * weights + 0.7e-9 * hidden * alpha * task.outputs

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table: what it is, without what came of it."""
        load = self.task.clauses if isinstance(self.task, Boolean) else self.task.outputs
        return {
            **self.task.columns(),
            "neurons": self.neurons,
            "load": load / self.neurons,
            **({"embedding": self.embedding or 0} if isinstance(self.task, Boolean) else {}),
            **({"depth": self.depth} if isinstance(self.task, Features) else {}),
            "lr": self.recipe.lr,
            "warm_up": self.warm_up,
            "fine_tune": self.fine_tune,
            **self.arm.columns(self.task),
            "trial": self.number,
        }


@dataclass(frozen=True)
class Sampling(Keyed):
    """A trial of the theory: random sparse networks, drawn and counted, beside closed forms."""

    kind: ClassVar[str] = "sampling"

    literals: int = 32
    size: int = 4
    neurons: int = 8
    alpha: int = 2
    networks: int = 2_000
    eps: float = 0.05
    number: int = 0

    def network(self) -> Sampling:
        return self

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be computed side by side."""
        return (self.kind,)

    @property
    def cost(self) -> float:
        return 1.3e-8 * self.networks * self.alpha * self.neurons * self.literals

    @property
    def formula(self) -> RandomSparse:
        return RandomSparse(self.literals, self.size, self.neurons, self.alpha)

    def columns(self) -> dict[str, object]:
        return {
            "clauses": self.literals // self.size,
            "literals": self.literals,
            "neurons": self.neurons,
            "arm": f"sparse-{self.alpha}",
            "alpha": self.alpha,
            "networks": self.networks,
            "trial": self.number,
        }


Value = int | float | str | bool | None


@dataclass(frozen=True)
class FunctionTrial(Keyed):
    """One call of a user's function: its settings and its seed; ``lab.function`` makes them."""

    kind: ClassVar[str] = "function"
    cost: ClassVar[float] = 1.0  # nobody knows how long it takes

    function: str
    code: str  # a hash of the function and what it uses
    settings: tuple[tuple[str, Value], ...]
    number: int = 0

    def __post_init__(self) -> None:
        whole("number", self.number, least=0)
        object.__setattr__(self, "settings", tuple(sorted(map(tuple, self.settings))))
        for name, value in self.settings:
            endless = isinstance(value, float) and not isfinite(value)
            if endless or not isinstance(value, Value) or name in ("trial", "function"):
                raise FissileError(f"{name}={value!r} is no setting; give numbers or words")

    def network(self) -> FunctionTrial:
        return self

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be computed together."""
        return self.kind, self.function, self.code

    def changed(self, changes: Mapping[str, Any]) -> FunctionTrial:
        """Return the trial with other settings."""
        return replace(self, settings=tuple({**dict(self.settings), **changes}.items()))

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table: what it is, without what came of it."""
        own = dict(self.settings)
        arm = own.pop("arm", self.function)
        return {**(own or {"function": self.function}), "arm": arm, "trial": self.number}

    def described(self) -> dict[str, object]:
        """Return the settings for a reader."""
        return dict(self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the function's file along to a process that computes; no store ever holds it."""
        from fissile.lab.function import file_of, revived

        return revived, (file_of(self), self.function, self.code, self.settings, self.number)


#: What a study decides for itself.
_FIXED = {
    "number",
    "pictures",
    "diagnosed",
    "split",
    "validation",
    "projection",
    "method",
    "inputs",
    "allocation",
    "place",
}

Work = Trial | Sampling | Contender | FunctionTrial
KINDS: dict[str, type[Work]] = {kind.kind: kind for kind in get_args(Work)}
_PARTS: dict[str, Callable[..., Any]] = {
    "task": lambda **spec: task_from(spec),
    "recipe": Recipe,
    "arm": Arm,
}


def numbered(cell: Work, count: int) -> list[Work]:
    """Return the first trials of a cell: ``numbered(Trial(), 10)``; they share its parts.

    Keys come with them, as large studies ask for many.
    """
    replace(cell, number=count - 1)  # checks the largest number
    parts = {item.name: getattr(cell, item.name) for item in fields(cell)}
    works = list[Work]()
    for number, key in enumerate(keys_of(cell, count)):
        work = object.__new__(type(cell))
        for name, value in (parts | {"number": number, "key": key}).items():
            object.__setattr__(work, name, value)  # without the checks, and in little memory
        works.append(work)
    return works


def keys_of(cell: Work, count: int) -> Iterator[str]:
    """Return the keys of ``numbered(cell, count)``: the text behind a key differs in the number."""
    before, after = around_number(cell)
    return (hashed(f"{before}{number}{after}") for number in range(count))


def from_spec(kind: str, spec: dict[str, Any]) -> Work:
    """Build a trial from its stored form: ``from_spec(trial.kind, asdict(trial))``."""
    values = {
        name: _PARTS[name](**value) if name in _PARTS else value for name, value in spec.items()
    }
    return KINDS[kind](**values)


def changed(work: Work, changes: Mapping[str, object]) -> Work:
    """Return a trial with other settings, wherever they live: ``changed(t, {"lr": 3e-3})``."""
    if isinstance(work, FunctionTrial):
        return work.changed({n: _typed(n, dict(work.settings)[n], v) for n, v in changes.items()})
    parts: dict[str, Any] = {"": work} | {part: getattr(work, part, None) for part in _PARTS}
    for name, value in changes.items():
        where = next((part for part in parts if name in _settings(parts[part])), None)
        if where is None:
            known = ", ".join(sorted(settings(work)))
            raise FissileError(f"there is no setting {name!r} to change; there are {known}")
        # An option means nothing to an arm without it, whose trials stay shared.
        if where != "arm" or _has_option(parts["arm"], name):
            old = parts[where]
            parts[where] = replace(old, **{name: _typed(name, getattr(old, name), value)})
    own = parts.pop("")
    return replace(own, **{part: value for part, value in parts.items() if value is not None})  # type: ignore[no-any-return]


def _has_option(arm: Arm, name: str) -> bool:
    splits = {"clusters": "gram", "every": "dynamic", "fraction": "dynamic", "grow": "dynamic"}
    return arm.split == splits[name] if name in splits else not arm.unsplit


def settings(work: Work) -> set[str]:
    """Return the names of what may be changed in the trials of a study; its arms are its own."""
    if isinstance(work, FunctionTrial):
        return set(dict(work.settings)) - {"arm"}
    parts = (_settings(getattr(work, part, None)) for part in _PARTS)
    return _settings(work).union(*parts) - ({"alpha"} if isinstance(work, Trial) else set())


def _settings(part: Any) -> set[str]:
    """Return the names of what may be changed in a part of a trial."""
    if not is_dataclass(part):
        return set()
    return {item.name for item in fields(part)} - _PARTS.keys() - _FIXED


def _typed(name: str, old: object, new: object) -> object:
    """Return the new value if it is of the old one's kind."""
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        return float(new)
    wanted = int if name in _OPTIONAL else type(old)
    if new is None and name in _OPTIONAL:
        return new
    if isinstance(new, wanted) and isinstance(new, bool) == (wanted is bool):
        return new
    kind = {str: "a word", int: "a whole number", bool: "true or false"}.get(wanted, "a number")
    raise FissileError(f"{name}={new!r} is not {kind}")
