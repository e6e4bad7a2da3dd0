"""What the page can set: every number bounded, presets, and the Python lines of the same numbers.

>>> Settings(neurons=4).inputs
32
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fissile._common.errors import FissileError
from fissile.bank import Arm, Dense, Expand
from fissile.bank.loop import Recipe
from fissile.expansion.split import Blocks, Split, resolve_split
from fissile.lab.boolean import Clauses
from fissile.lab.readings import NAMED, QUESTIONS

#: Test samples of a trial.
TEST = 2_000
#: Training numbers (samples × inputs × trials) of one experiment, and seconds of training, at most.
NUMBERS, SECONDS = 40_000_000, 60.0
#: Inputs and classes of the data sets of pictures, and the side of a picture.
PICTURES = {"fashionmnist": (784, 10, 28), "digits": (64, 10, 8)}
_WHOLE = re.compile(r"[0-9]{1,12}")
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?([eE][-+]?[0-9]{1,3})?")


def _whole(default: int, least: int, most: int, label: str, group: str, about: str = "") -> Any:
    meta = {"kind": "whole", "least": least, "most": most}
    return field(default=default, metadata=meta | _said(label, group, about))


def _real(default: float, most: float, label: str, group: str, about: str = "") -> Any:
    meta = {"kind": "real", "least": 0.0, "most": most}
    return field(default=default, metadata=meta | _said(label, group, about))


def _word(
    choices: Mapping[str, str], label: str, group: str, about: str = "", **more: object
) -> Any:
    meta = {"kind": "word", "choices": dict(choices)} | more
    return field(default=next(iter(choices)), metadata=meta | _said(label, group, about))


def _said(label: str, group: str, about: str) -> dict[str, str]:
    return {"label": label, "group": group, "about": about}


def _options(question: str) -> dict[str, str]:
    """Return the options of what the paper leaves open, each with its source."""
    return {option.name: option.source for option in QUESTIONS[question].options}


SPLITS = {
    "clause": "clause split",
    "random": "random split",
    "gram": "Gram split",
    "n:m": "N:M split",
    "overlapping": "overlapping inputs",
}
_TASK, _NET, _TRAIN, _PAPER = "Task", "Network", "Training", "What the paper leaves open"


@dataclass(frozen=True)
class Settings:
    """One experiment of the page; anything out of bounds is refused.

    >>> Settings(neurons=4, splits=("clause",)).arms()["clause-2"]
    Expand(alpha=2, split=Blocks(size=4), budget='weights', moments='carry')
    """

    task: str = _word(
        {"boolean": "Boolean formula", "fashionmnist": "FashionMNIST", "digits": "Digits"},
        "Data", _TASK,
    )  # fmt: skip
    clauses: int = _whole(8, 2, 32, "Clauses", _TASK, "features that the network must tell apart")
    size: int = _whole(4, 3, 6, "Literals per clause", _TASK)
    samples: int = _whole(20_000, 500, 100_000, "Training samples", _TASK)
    neurons: int = _whole(8, 2, 32, "Neurons", _NET, "parents: neurons before the split")
    alpha: int = _whole(2, 2, 8, "Children per neuron, α", _NET)
    splits: tuple[str, ...] = field(
        default=("clause", "random"),
        metadata={"kind": "words", "choices": SPLITS, "most": 3}
        | _said("Splits", _NET, "at most three, beside the dense network"),
    )
    warm_up: int = _whole(25, 1, 400, "Epochs before the split", _TRAIN)
    fine_tune: int = _whole(25, 1, 400, "Epochs after it", _TRAIN)
    trials: int = _whole(10, 1, 20, "Trials", _TRAIN, "networks of each arm, each with a seed")
    seed: int = _whole(0, 0, 1_000_000, "First seed", _TRAIN)
    l1: float = _real(1e-7, 0.1, "L1 on W1", _TRAIN)
    l2: float = _real(1e-5, 0.1, "L2 on all weights", _TRAIN)
    orthogonal: float = _real(0.0, 0.1, "Orthogonality of W1", _TRAIN)
    negatives: str = _word(_options("negatives"), "A near miss lacks", _PAPER)
    others: str = _word(_options("others"), "Other false samples", _PAPER)
    moments: str = _word(_options("moments"), "Adam at the split", _PAPER)
    epoch: str = _word(_options("epoch"), "Epoch reported", _PAPER)
    look: int = _whole(1, 1, 20, "Trial drawn", _NET, "the one whose networks are shown")

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name), dict(one.metadata))
        object.__setattr__(self, "look", min(self.look, self.trials))
        if self.boolean and self.inputs > 128:
            raise FissileError(
                f"{self.clauses} clauses of {self.size} are {self.inputs} literals; the page "
                "shows at most 128: take fewer clauses"
            )
        if not self.boolean and "clause" in self.splits:
            raise FissileError("pictures have no clauses; take another split")
        if "n:m" in self.splits and self.inputs % (2 * self.alpha):
            raise FissileError(
                f"a 2:{2 * self.alpha} split needs a number of inputs that {2 * self.alpha} "
                f"divides, not {self.inputs}; take another α or split"
            )
        numbers = self.samples * self.inputs * (self.trials if self.boolean else 1)
        if numbers > NUMBERS or self.seconds > SECONDS:
            raise FissileError(
                f"{numbers / 1e6:.0f} million training numbers and about {self.seconds:.0f} s are "
                f"more than the page does ({NUMBERS / 1e6:.0f} million, {SECONDS:.0f} s); take "
                "fewer samples, trials or epochs"
            )

    @property
    def boolean(self) -> bool:
        """Return whether the task is a formula, which has clauses."""
        return self.task == "boolean"

    @property
    def inputs(self) -> int:
        """Count the inputs."""
        return self.clauses * self.size if self.boolean else PICTURES[self.task][0]

    @property
    def outputs(self) -> int:
        """Count the outputs."""
        return 1 if self.boolean else PICTURES[self.task][1]

    @property
    def numbers(self) -> int:
        """Count the training numbers that the experiment holds in memory."""
        return self.samples * self.inputs * (self.trials if self.boolean else 1)

    @property
    def seconds(self) -> float:
        """Estimate how long the training takes on two cores."""
        return (self.warm_up + (1 + len(self.splits)) * self.fine_tune) * self.epoch_seconds

    @property
    def epoch_seconds(self) -> float:
        """Estimate how long an epoch of all trials of one arm takes on two cores."""
        weights = self.neurons * (self.inputs + self.outputs)
        return self.trials * self.samples / 64 * (0.5 + weights / 320) * 1e-6

    def arms(self) -> dict[str, Arm]:
        """Return the arms for the bank, by name; the first is the dense one."""
        made: dict[str, Arm] = {"dense": Dense()}
        for name in self.splits:
            made[f"{name}-{self.alpha}"] = Expand(self.alpha, self._split(name), "weights",
                                                  self.moments)  # type: ignore[arg-type]  # fmt: skip
        return made

    def _split(self, name: str) -> Split:
        if name == "clause":
            return Blocks(self.size) if self.clauses >= self.alpha else Clauses(self.size)
        return resolve_split(f"2:{2 * self.alpha}" if name == "n:m" else name)

    def recipe(self) -> Recipe:
        """Return how the networks are trained."""
        return Recipe(l1=self.l1, l2=self.l2, orthogonal=self.orthogonal)

    @classmethod
    def read(cls, words: object) -> Settings:
        """Return settings from what a page sends: a mapping of names to text.

        >>> Settings.read({"neurons": "4", "splits": "random,gram"}).splits
        ('random', 'gram')
        """
        known = {one.name: one.metadata for one in fields(cls)}
        if not isinstance(words, Mapping) or not words.keys() <= known.keys():
            raise FissileError(f"settings are {', '.join(known)}")
        values: dict[str, Any] = {n: _read(n, text, known[n]) for n, text in words.items()}
        return cls(**values)

    def changed(self) -> dict[str, str]:
        """Return what differs from the default, as text that :meth:`read` reads.

        >>> Settings(neurons=4).changed()
        {'neurons': '4'}
        """
        return {
            one.name: ",".join(value) if isinstance(value, tuple) else str(value)
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }


def _check(name: str, value: Any, meta: dict[str, Any]) -> None:
    kind = meta["kind"]
    if kind in ("whole", "real"):
        right = int if kind == "whole" else float
        fits = type(value) is right and meta["least"] <= value <= meta["most"]
        if not fits:
            raise FissileError(f"{name}={value!r} is not from {meta['least']} to {meta['most']}")
        return
    words = value if kind == "words" else (value,)
    several = kind != "words" or (
        isinstance(value, tuple) and len({*value}) == len(value) and 1 <= len(value) <= meta["most"]
    )
    if not several or not all(word in meta["choices"] for word in words):
        raise FissileError(f"{name}={value!r} is not of {', '.join(meta['choices'])}")


def _read(name: str, text: object, meta: Mapping[str, Any]) -> object:
    if not isinstance(text, str) or len(text) > 200:
        raise FissileError(f"{name} is a short text")
    kind = meta["kind"]
    if kind == "words":
        return tuple(text.split(","))
    pattern = {"whole": _WHOLE, "real": _NUMBER}.get(kind)
    if pattern is None:
        return text
    if not pattern.fullmatch(text) or not math.isfinite(float(text)):
        raise FissileError(f"{name}={text!r} is no number")
    return int(text) if kind == "whole" else float(text)


def controls() -> list[dict[str, Any]]:
    """Return what the page needs to build its controls: names, bounds, choices, defaults.

    >>> controls()[1]["label"]
    'Clauses'
    """
    found = []
    for one in fields(Settings):
        default = one.default
        text = ",".join(default) if isinstance(default, tuple) else str(default)
        found.append({"name": one.name, "default": text, **one.metadata})
    return found


def readings() -> dict[str, dict[str, str]]:
    """Return the named readings of the paper as changes of settings.

    >>> readings()["tables"]
    {'negatives': 'literal', 'others': 'arbitrary', 'samples': '10000'}
    """
    own = {"negatives": "literal", "others": "matched"}
    return {name: own | dict(chosen) for name, chosen in NAMED.items()}


def python(settings: Settings) -> str:
    """Return lines that come to the same accuracies with ``fissile.bank`` alone.

    >>> print(python(Settings()).splitlines()[-1])
    print(accuracy.mean(0))
    """
    few = settings.clauses < settings.alpha
    names = {
        "clause": f"{'Clauses' if few else 'Blocks'}({settings.size})",
        "n:m": f'Structured(2, {2 * settings.alpha})',
        "random": "Random()",
        "gram": "Gram()",
        "overlapping": "Overlapping()",
    }  # fmt: skip
    used = sorted({re.sub(r"\(.*", "", names[one]) for one in settings.splits} - {"Clauses"})
    lines = ["from fissile.bank import Bank, Data, Dense, Expand, Spec"]
    lines += ["from fissile.bank.loop import Recipe"]
    if settings.boolean:
        lines += ["from fissile.data import dnf_task"]
    if used:
        lines += [f"from fissile.expansion.split import {', '.join(used)}"]
    if few and "clause" in settings.splits:
        lines += ["from fissile.lab.boolean import Clauses"]
    if settings.boolean:
        lines += [
            "",
            "",
            "def data(seed):",
            "    train, test = dnf_task(",
            f"        {settings.clauses}, {settings.size}, train={settings.samples}, test={TEST}, "
            "seed=seed,",
            f'        negatives="{settings.negatives}", others="{settings.others}",',
            "    )",
            "    return Data(train.x, train.y, test.x, test.y)",
            "",
            "",
        ]
    else:
        lines += ["from fissile.play.pictures import pictures", ""]
        lines += [f'everyone = pictures("{settings.task}", {settings.samples})']
    shape = f"[{settings.inputs}, {settings.neurons}, {settings.outputs}]"
    own = "data(seed)" if settings.boolean else "everyone"
    moments = "" if settings.moments == "carry" else f', moments="{settings.moments}"'
    lines += [
        f"recipe = Recipe(l1={settings.l1!r}, l2={settings.l2!r}, "
        f"orthogonal={settings.orthogonal!r})",
        f"seeds = range({settings.seed}, {settings.seed + settings.trials})",
        f"bank = Bank([Spec({shape}, {own}, seed=seed, recipe=recipe) for seed in seeds])",
        f"bank.train(until={settings.warm_up})",
        "arms = bank.branch({",
        '    "dense": Dense(),',
        *(
            f'    "{name}-{settings.alpha}": Expand({settings.alpha}, {names[name]}{moments}),'
            for name in settings.splits
        ),
        "})",
        f"arms.train(until={settings.warm_up + settings.fine_tune})",
        f"accuracy = arms.{settings.epoch}.view({settings.trials}, {1 + len(settings.splits)})",
        "print(accuracy.mean(0))",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Preset:
    """Settings worth seeing: a figure of the paper, or a place that surprises.

    >>> PRESETS[0].settings.neurons
    8
    """

    name: str
    title: str
    about: str
    settings: Settings


PRESETS = [
    Preset(
        "start", "Eight clauses, eight neurons",
        "The paper’s Boolean task. Each neuron becomes two children, each with half of its inputs; "
        "the number of weights stays. It wins where whole clauses are kept together.",
        Settings(),
    ),
    Preset(
        "few", "Four neurons, eight clauses (Figure 2a)",
        "Where neurons are fewest, features crowd most, and the split gains most.",
        Settings(neurons=4, alpha=4),
    ),
    Preset(
        "below", "Where a random split loses",
        "With 16 neurons and four children each, the random split tears clauses apart, and ends "
        "below the dense network.",
        Settings(neurons=16, alpha=4, samples=10_000),
    ),
    Preset(
        "many", "Beyond 16 clauses (Figure 2b)",
        "The paper’s gain levels off from about 16 clauses on. Here are 24 for eight neurons.",
        Settings(clauses=24, alpha=4, samples=10_000),
    ),
    Preset(
        "codes", "Codes appear (Figure 1)",
        "More samples and four times as many epochs. Look for the frames: four positive weights, a "
        "negative bias, a positive weight out: the neuron has found a clause.",
        Settings(warm_up=100, fine_tune=100, trials=5, samples=50_000),
    ),
    Preset(
        "overlap", "Is it the disjoint inputs?",
        "The control: children as sparse as before, but free to share inputs.",
        Settings(splits=("clause", "random", "overlapping"), alpha=4),
    ),
    Preset(
        "prose", "The paper’s prose, not its algorithm",
        "The text makes a near miss in another way than Algorithm A2 does. The same experiment "
        "under that reading.",
        Settings(negatives="clause", others="arbitrary"),
    ),
    Preset(
        "clothes", "Clothes (Figure 4)",
        "FashionMNIST: no clauses are known, so inputs are dealt at random or by the Gram matrix. "
        "Look at what each neuron sees.",
        Settings("fashionmnist", samples=10_000, neurons=6, alpha=4, splits=("random", "gram"),
                 trials=3, warm_up=10, fine_tune=10),
    ),
    Preset(
        "digits", "Digits",
        "Small pictures of handwritten digits: ten classes, 64 pixels.",
        Settings("digits", samples=1_300, neurons=6, alpha=4, splits=("random", "gram"),
                 warm_up=50, fine_tune=50),
    ),
]  # fmt: skip
