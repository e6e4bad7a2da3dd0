"""What a trial's network has to learn, and when it has learned it.

The paper chose its number of warm-up epochs so that a network is then "at least within 95 %" of a
fully converged one. The arm ``converged`` measures that: a cell's dense network trains on until its
test accuracy no longer rises.

>>> plateau([0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9], warm_up=1)
Plateau(accuracy=0.9, epochs=7, rising=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Literal, NamedTuple, get_args

from fissile._common.errors import FissileError, whole
from fissile.data import Formula, Negatives, Others
from fissile.data.catalogue import ENTRIES, Entry, own
from fissile.data.sets import Scaling

#: Marks a field that trials did not always have: at its default, the key is what it was before.
LATER = {"later": True}
#: What made the features of the paper's CIFAR-100 and ImageNet.
PAPERS_ENCODER = "CLIP ViT-B/16"
#: The share of the training set that stands in for the test set while settings are searched.
HELD_OUT = 0.1


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
        one_of("negatives", self.negatives, get_args(Negatives))
        one_of("others", self.others, get_args(Others))

    @property
    def formula(self) -> Formula:
        return Formula(self.clauses, self.size)

    @property
    def literals(self) -> int:
        return self.clauses * self.size

    @property
    def samples(self) -> int:
        return self.train

    def columns(self) -> dict[str, object]:
        return {
            "clauses": self.clauses,
            "literals": self.literals,
            "train": self.train,
            "negatives": self.negatives,
            "others": self.others,
        }

    def described(self) -> dict[str, object]:
        return {
            "Training samples": self.train,
            "Test samples": self.test,
            "Near misses": self.negatives,
            "Other false samples": self.others,
        }


@dataclass(frozen=True)
class Features:
    """A data set of the catalogue, each sample a row of numbers.

    >>> Features("cifar100-clip", classes=40).entry.encoder
    'CLIP ViT-B/16'

    Args:
        data: its name in the catalogue.
        classes: keep so many classes, of nested subsets; 0 keeps all.
        validation: test on a part of the training set, and never see the test set.
        scaling: how features are scaled before a network sees them; the paper does not say.
            ``raw``: as their file has them; ``unit``: every sample divided by its length;
            ``length-10``: all multiplied by one number, so that training samples have a mean length
            of 10, which is about what CLIP's have; ``standard``: each feature to mean 0 and
            deviation 1 over the training set.
        fingerprint: of the arrays that were found; results on other arrays are other results.
        encoder: what made these arrays, as their file says; the catalogue's word if it does not.
        inputs: the numbers in a sample, for features of your own, whose ``classes`` are to be
            given too. Their file, ``data`` with an ending such as ``.npz``, lies beside the study
            or in the folder of ``--data``.
    """

    data: str = "fashionmnist"
    classes: int = 0
    validation: bool = False
    fingerprint: str = ""
    encoder: str = field(default="", metadata={"label": True}, compare=False)
    scaling: Scaling = field(default="raw", metadata=LATER)
    inputs: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        whole("inputs", self.inputs, least=0)
        whole("classes", self.classes, least=2 if self.inputs else 0)
        one_of("scaling", self.scaling, get_args(Scaling))
        if self.classes > self.entry.classes or self.classes == 1:
            raise FissileError(
                f"{self.data} has {self.entry.classes} classes; classes={self.classes} cannot be "
                "chosen from them"
            )

    @property
    def entry(self) -> Entry:
        return own(self.data, self.inputs, self.classes) if self.inputs else _known(self.data)

    @property
    def outputs(self) -> int:
        """How many classes there are to tell apart."""
        return self.classes or self.entry.classes

    @property
    def samples(self) -> int:
        """How many samples an epoch has, about, if only some classes are kept."""
        kept = 1 - HELD_OUT if self.validation else 1.0
        return max(1, round(kept * _samples(self.entry) * self.outputs / self.entry.classes))

    def columns(self) -> dict[str, object]:
        return {
            "data": self.data,
            "encoder": self.encoder or self.entry.encoder or "none",
            "classes": self.outputs,
            "validation": self.validation,
            "scaling": self.scaling,
        }

    def described(self) -> dict[str, object]:
        tested = "held-out training samples" if self.validation else "the test set"
        return {
            "Data": self.data,
            "Features": self.encoder or self.entry.encoder or "none",
            "Scaling of features": self.scaling,
            "Classes": self.outputs,
            "Tested on": tested,
        }


@dataclass(frozen=True)
class Images:
    """Images of the catalogue, seen through a convolutional backbone that learns with the head.

    >>> Images("cifar100", projection=512)

    With ``mirror``, half of the training images are mirrored, drawn anew for each epoch.
    """

    data: str = "cifar100"
    projection: int = 256
    fingerprint: str = ""
    mirror: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        whole("projection", self.projection, least=1)
        _ = self.entry

    @property
    def entry(self) -> Entry:
        return _known(self.data, axes=3)

    @property
    def outputs(self) -> int:
        """How many classes there are to tell apart."""
        return self.entry.classes

    @property
    def samples(self) -> int:
        return _samples(self.entry)

    def columns(self) -> dict[str, object]:
        return {"data": self.data, "projection": self.projection, "mirror": self.mirror}

    def described(self) -> dict[str, object]:
        return {
            "Data": self.data,
            "Projection": self.projection,
            "Mirrored images": "half of them" if self.mirror else "none",
        }


#: What of a GPT has the trial's neurons, and is split.
Place = Literal["ffn", "head"]


@dataclass(frozen=True)
class Text:
    """A text of the catalogue, whose next character a small GPT foretells.

    >>> Text("tinyshakespeare", place="head")

    Args:
        data: its name in the catalogue.
        place: what has the trial's neurons and is split: ``ffn``, all feed-forward networks, or
            ``head``, a bottleneck between the last state and the characters.
        layers: blocks of attention and a feed-forward network.
        width: of the states between them.
        heads: of attention.
        context: characters that are read at once.
        beside: neurons of each feed-forward network, where the head is split.
        steps: training steps that are called an epoch.
        fingerprint: of the arrays that were found.
    """

    data: str = "tinyshakespeare"
    place: Place = "ffn"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    beside: int = 64
    steps: int = 100
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "beside", "steps"):
            whole(name, getattr(self, name), least=1)
        one_of("place", self.place, get_args(Place))
        if self.width % self.heads:
            raise FissileError(f"width={self.width} cannot be shared by {self.heads} heads")
        if self.entry.shape != (1,):
            raise FissileError(f"{self.data} is no text of characters; give tinyshakespeare")

    @property
    def entry(self) -> Entry:
        return _known(self.data)

    @property
    def outputs(self) -> int:
        """How many characters there are to tell apart."""
        return self.entry.classes

    @property
    def samples(self) -> int:
        return _samples(self.entry)

    def columns(self) -> dict[str, object]:
        return {"data": self.data, "place": self.place}

    def described(self) -> dict[str, object]:
        return {"Data": self.data, "Split": self.place, "Layers": self.layers, "Width": self.width}


Task = Boolean | Features | Images | Text


def _samples(entry: Entry) -> int:
    """Return how many samples a set is trained on; of one that users make, a guess."""
    return entry.train or 1_280 * entry.classes


def _known(name: str, axes: int = 0) -> Entry:
    """Return a data set of the catalogue, if its samples are numbers along so many axes."""
    usable = [one for one in ENTRIES.values() if one.read or one.make]
    fit = [one.name for one in usable if axes in (0, len(one.shape))]
    if name not in fit:
        raise FissileError(f"data={name!r} cannot be used here; give one of {', '.join(fit)}")
    return ENTRIES[name]


def source(data: str) -> str:
    """Return the images or texts that a set's features were made of, or its own name.

    >>> source("cifar100-coarse-clip"), source("generated")
    ('cifar100-coarse', 'generated')
    """
    raw = [one.name for one in ENTRIES.values() if one.kind in ("images", "text")]
    return max((name for name in raw if f"{data}-".startswith(f"{name}-")), key=len, default=data)


def task_from(spec: dict[str, Any]) -> Task:
    """Build a task from its stored form."""
    if "clauses" in spec:
        return Boolean(**spec)
    if "place" in spec:
        return Text(**spec)
    return Images(**spec) if "projection" in spec else Features(**spec)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a word that is not one of those known."""
    if value not in choices:
        known = " or ".join(repr(one) for one in choices)
        raise FissileError(f"{name}={value!r} is not known; give {known}")


#: The share of a converged network's accuracy that the paper asks of the warm-up.
WITHIN = 0.95
#: Epochs are looked at in rounds of so many, or of the warm-up's number if that is smaller.
_ROUND = 25
#: A round without success brings no more than this to the best mean accuracy of a round so far.
_RISE = 0.001
#: Epochs that such a network trains for, about: what its cost is estimated by.
EPOCHS = 250


class Patience(NamedTuple):
    """How long a network trains on before it counts as converged, in rounds beyond the warm-up."""

    flat: int = 4  # rounds without success, in a row
    most: int = 40  # rounds after which it is stopped, even if it still rises


USUAL = Patience()


def patience_of(task: Task) -> Patience:
    """Return the patience with networks of a task: little behind a backbone, where time is dear.

    >>> patience_of(Images("cifar100"))
    Patience(flat=1, most=6)
    """
    return Patience(flat=1, most=6) if isinstance(task, Images) else USUAL


class Plateau(NamedTuple):
    """Where a network's accuracy stopped rising."""

    accuracy: float  # the mean of its best round
    epochs: int  # that it was trained for
    rising: bool  # it was stopped before it had converged


def length(warm_up: int) -> int:
    """Return the number of epochs in a round."""
    return max(1, min(_ROUND, warm_up))


def limit(warm_up: int, patience: Patience = USUAL) -> int:
    """Return the number of epochs after which a network is stopped."""
    return warm_up + patience.most * length(warm_up)


def plateau(curve: Sequence[float], warm_up: int, patience: Patience = USUAL) -> Plateau | None:
    """Return where a curve of test accuracies stopped rising, or None if it must go on.

    The curve begins with the first epoch of the warm-up; rounds are counted from its end.
    """
    size, best, waited = length(warm_up), float("-inf"), 0
    for end in range(warm_up + size, len(curve) + 1, size):
        mean = sum(curve[end - size : end]) / size
        waited = 0 if mean > best + _RISE else waited + 1
        best = max(best, mean)
        if waited == patience.flat:
            return Plateau(best, end, rising=False)
        if end >= limit(warm_up, patience):
            return Plateau(best, end, rising=True)
    return None


def stopped(curve: Sequence[float], warm_up: int) -> Plateau:
    """Return what a network that diverged had reached: the mean of its best round.

    If it never finished a round after the warm-up, its last epochs are that round.
    """
    size, known = length(warm_up), [value for value in curve if isfinite(value)]
    ends = range(min(warm_up + size, len(known)), len(known) + 1, size)
    rounds = [known[max(0, end - size) : end] for end in ends if end]
    best = max((sum(one) / len(one) for one in rounds), default=nan)
    return Plateau(best, len(known), rising=False)
