"""Readings: what the paper leaves open, question by question, and what each option changes.

>>> text(reading("prose"))
'negatives=clause,others=arbitrary'

A reading answers some questions in another way than the studies do; whatever it does not name stays
as a study has it. Some options change trials, which then have other keys. Others change only which
stored measure claims and tables read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from fissile._common.errors import FissileError
from fissile.lab.task import Boolean, Features, Images
from fissile.lab.trial import Trial, Work, changed

if TYPE_CHECKING:
    from fissile.lab.study import Study

#: The option for each question that is answered otherwise.
Reading = Mapping[str, str]


@dataclass(frozen=True)
class Option:
    """One answer to a question, and where it comes from."""

    name: str
    source: str
    #: What it changes in trials; a function makes the value from the trial.
    settings: Mapping[str, object] = field(default_factory=dict)
    #: Which measure claims and tables read in place of another.
    measures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What the paper leaves open, and its defensible answers."""

    name: str
    asks: str
    options: tuple[Option, ...]
    of: Callable[[Work], bool] = lambda work: isinstance(work, Trial)  # trials that it is about
    studies: tuple[str, ...] = ()  # by id; by default all that have such trials

    def concerns(self, study: Study) -> bool:
        """Return whether the study leaves the question open."""
        if study.file:  # what its author leaves open, the paper does not
            return False
        return study.id in self.studies if self.studies else self.of(_example(study))

    def option(self, name: str) -> Option:
        """Return an option by its name."""
        found = next((one for one in self.options if one.name == name), None)
        if found is None:
            known = ", ".join(one.name for one in self.options)
            raise FissileError(f"{self.name} cannot be {name!r}; it is one of {known}")
        return found

    def answers(self, study: Study) -> dict[str, str]:
        """Return each option, and the first one that makes the same of a study.

        >>> QUESTIONS["embedding"].answers(STUDIES["embed-neurons"])
        {'literals': 'its own', 'clauses': 'clauses', '8': 'clauses'}
        """
        works = study.works(study.full, 1)
        known: dict[object, str] = {(tuple(works), ()): OWN}
        return {
            one.name: known.setdefault(
                (tuple(_changed(work, one) for work in works), tuple(one.measures.values())),
                one.name,
            )
            for one in self.options
        }


#: The answer of an option that leaves a study as it is.
OWN = "its own"


def _boolean(work: Work) -> bool:
    return isinstance(work, Trial) and isinstance(work.task, Boolean)


def _embedded(work: Work) -> bool:
    return isinstance(work, Trial) and work.embedding is not None


def _images(work: Work) -> bool:
    return isinstance(work, Trial) and isinstance(work.task, Images)


def _encoded(work: Work) -> bool:
    """Return whether a trial sees features that an encoder made."""
    task = getattr(work, "task", None)
    return isinstance(task, Features) and bool(task.entry.encoder)


_GRAM = (
    "embed-neurons", "embed-clauses", "fashionmnist", "cifar100", "imagenet100", "clinc150",
    "cnn-256", "cnn-512", "feature-demand",
)  # fmt: skip
_UNSTATED = (
    "capacity", "cosine", "circuits", "clustered", "embed-neurons", "embed-clauses", "fashionmnist",
    "cifar100", "imagenet100", "imagenet1k", "cnn-256", "cnn-512", "timing", "dynamic",
    "single-mask", "dropconnect",
)  # fmt: skip
_COSINES = ("absolute_cosine", "absolute_cosine_fold", "diagonal_cosine")
_RECOVERY = ("agreement", "adjusted_rand")


def _read(names: tuple[str, ...], others: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(names, others, strict=True))


#: In this order they are applied: the clusters of an arm depend on its alpha.
QUESTIONS: dict[str, Question] = {one.name: one for one in (
    Question("samples", "How many samples is the Boolean task trained on?", (
        Option("10000", "custom; nearest to the tables", {"train": 10_000}),
        Option("50000", "“at least within 95 %” of converged asks for it", {"train": 50_000}),
        Option("100000", "custom; nearest to the curves of Figure 2", {"train": 100_000}),
    ), _boolean),
    Question("negatives", "What makes a near miss?", (
        Option("literal", "algorithm A2: “remove one random index from the clause-block”",
               {"negatives": "literal"}),
        Option("clause", "“flip one literal per clause”: switched off", {"negatives": "clause"}),
        Option("flip", "“flip one literal per clause”: turned over", {"negatives": "flip"}),
    ), _boolean),
    Question("others", "How many literals are on in the other false samples?", (
        Option("matched", "algorithm A2: “uniformly of size s”", {"others": "matched"}),
        Option("arbitrary", "“sample arbitrary assignments”", {"others": "arbitrary"}),
    ), _boolean),
    Question("moments", "What becomes of Adam's moments at the split?", (
        Option("carry", "“continue training all models”", {"moments": "carry"}),
        Option("fresh", "custom: a new optimizer for a new model", {"moments": "fresh"}),
    )),
    Question("epoch", "Of which epoch is the accuracy reported?", (
        Option("last", "“fine-tuned for an additional 25 epochs”"),
        Option("best", "algorithm A3: “if acc > bestAcc”", measures={"accuracy": "best"}),
    )),
    Question("embedding", "How wide is the embedding?", (
        Option("literals", "custom: as wide as the input",
               {"embedding": lambda trial: trial.task.literals}),
        Option("clauses", "custom: a dimension for each feature",
               {"embedding": lambda trial: trial.task.clauses}),
        Option("8", "custom: as wide as a layer of eight neurons", {"embedding": 8}),
    ), _embedded),
    Question("alpha", "What is alpha, where it is not stated?", (
        Option("2", "the case study: “with α = 2”", {"alpha": 2}),
        Option("4", "Figure 6: “FPE model with α = 4”", {"alpha": 4}),
    ), studies=_UNSTATED),
    Question("clusters", "How many clusters of the Gram matrix are dealt to each child?", (
        Option("4", "custom", {"clusters": None}),
        Option("1", "custom: the fewest", {"clusters": lambda trial: trial.arm.alpha}),
    ), studies=_GRAM),
    Question("rows", "Over which rows of the Gram matrix does k-means run?", (
        Option("raw", "“cluster the hidden-layer Gram matrix using k-means”"),
        Option("unit", "custom: rows of unit length",
               measures=_read(_RECOVERY, ("unit_agreement", "unit_adjusted_rand"))),
        Option("cosine", "custom: absolute cosines",
               measures=_read(_RECOVERY, ("cosine_agreement", "cosine_adjusted_rand"))),
    ), studies=("circuits", "clustered")),
    Question("edges", "When is an edge used by a clause?", (
        Option("most", "custom: its neuron fires on most samples that switch it on"),
        Option("any", "“trace the hidden-layer edges that contribute”, for each sample",
               measures={"collisions": "any_collisions"}),
    ), studies=("circuits",)),
    Question("cosine", "Which mean cosine similarity of the neurons is meant?", (
        Option("magnitude", "custom: magnitudes, since a signed mean is close to zero"),
        Option("signed", "“averaging the cosine similarity between all pairs of distinct” neurons",
               measures=_read(_COSINES, ("cosine", "cosine_fold", "cosine"))),
        Option("itself", "custom: magnitudes, each neuron with itself too; nearest to the table",
               measures=_read(_COSINES[:2], ("diagonal_cosine", "diagonal_cosine_fold"))),
    ), studies=("interference", "cosine")),
    Question("scaling", "How are frozen features scaled?", (
        Option("raw", "“features extracted using a frozen CLIP”", {"scaling": "raw"}),
        Option("unit", "custom with CLIP: each sample has length 1", {"scaling": "unit"}),
        Option("length-10", "about the length of CLIP's own", {"scaling": "length-10"}),
        Option("standard", "custom: mean 0, deviation 1", {"scaling": "standard"}),
    ), _encoded),
    Question("penalties", "Are weights of the CNN penalised?", (
        Option("on", "“identical hyperparameters”", {"l1": 1e-7, "l2": 1e-5}),
        Option("off", "they are listed for “the Boolean DNF data”", {"l1": 0.0, "l2": 0.0}),
    ), _images),
    Question("mirror", "Are images mirrored?", (
        Option("half", "custom on CIFAR", {"mirror": True}),
        Option("none", "“raw images from CIFAR-100”", {"mirror": False}),
    ), _images),
)}  # fmt: skip

#: Readings with a name of their own.
NAMED: dict[str, Reading] = {
    "default": {},
    "prose": {"negatives": "clause", "others": "arbitrary"},
    "tables": {"samples": "10000", "others": "arbitrary"},
}


def reading(words: str) -> Reading:
    """Return the reading with a name, or of the options that are named.

    >>> reading("samples=10000,cosine=signed")
    {'samples': '10000', 'cosine': 'signed'}
    """
    if words in NAMED:
        return NAMED[words]
    found = dict[str, str]()
    for word in words.split(","):
        name, equals, option = (part.strip() for part in word.partition("="))
        if not equals or name not in QUESTIONS:
            raise FissileError(
                f"there is no reading {words!r}; give {', '.join(NAMED)}, or QUESTION=OPTION,... "
                f"with the questions {', '.join(QUESTIONS)}"
            )
        found[name] = QUESTIONS[name].option(option).name
    return found


def text(chosen: Reading) -> str:
    """Return a reading as one word; equal readings are equal words."""
    return ",".join(f"{name}={chosen[name]}" for name in QUESTIONS if name in chosen) or "default"


def within(study: Study, chosen: Reading) -> Reading:
    """Return the part of a reading that is another answer than the study's own."""
    found = {
        name: QUESTIONS[name].answers(study)[option]
        for name, option in chosen.items()
        if QUESTIONS[name].concerns(study)
    }
    return {name: option for name, option in found.items() if option != OWN}


def told(studies: Sequence[Study], words: str) -> dict[str, str]:
    """Return what a reading is in each study, by its id; each question must be open in one.

    >>> told([STUDIES["capacity"], STUDIES["cosine"]], "cosine=signed")
    {'capacity': 'default', 'cosine': 'cosine=signed'}
    """
    chosen = reading(words)
    for name in chosen:
        if not any(QUESTIONS[name].concerns(study) for study in studies):
            ids = ", ".join(study.id for study in studies)
            known = [q.name for q in QUESTIONS.values() if any(q.concerns(s) for s in studies)]
            raise FissileError(
                f"the question {name!r} does not concern {ids}; open there: "
                f"{', '.join(known) or 'nothing'}"
            )
    return {study.id: text(within(study, chosen)) for study in studies}


def around(study: Study, *, full: bool = False) -> list[Reading]:
    """Return the default reading of a study, those that differ from it in one or two answers.

    >>> [text(one) for one in around(STUDIES["codes"])][:3]
    ['default', 'samples=10000', 'samples=100000']

    With ``full``, return all of them.
    """
    others = {
        one.name: [name for name, same in one.answers(study).items() if name == same]
        for one in QUESTIONS.values()
        if one.concerns(study)
    }
    return [
        dict(zip(names, chosen, strict=True))
        for count in range(len(others) + 1 if full else 3)
        for names in combinations(others, count)
        for chosen in product(*(others[name] for name in names))
    ]


def applied(work: Work, words: str) -> Work:
    """Return a trial under a reading."""
    chosen = reading(words)
    for question in QUESTIONS.values():
        if question.name in chosen:
            work = _changed(work, question.option(chosen[question.name]))
    return work


def under(study: Study, words: str) -> Study:
    """Return a study whose claims, tables and figures read what a reading makes them read.

    >>> under(STUDIES["cosine"], "cosine=signed").published[0].measure
    'cosine'
    """
    names = dict[str, str]()
    for name, option in reading(words).items():
        names |= QUESTIONS[name].option(option).measures
    accuracy = names.pop("accuracy", study.accuracy)
    example = _example(study)
    if isinstance(example, Trial):
        for arm in study.arms:
            new = applied(replace(example, arm=arm), words)
            assert isinstance(new, Trial)
            names[arm.name] = new.arm.name
    parts = {name: _renamed(getattr(study, name), names) for name in _READ}
    return replace(study, accuracy=accuracy, **parts)


#: The parts of a study that name measures and arms.
_READ = ("figure", "published", "claims")


def _renamed(part: Any, names: Mapping[str, str]) -> Any:
    """Return a part of a study with other names of measures and arms."""
    if isinstance(part, str):
        return names.get(part, part)
    if isinstance(part, tuple):
        return tuple(_renamed(one, names) for one in part)
    if isinstance(part, Mapping):
        return {_renamed(key, names): _renamed(value, names) for key, value in part.items()}
    if is_dataclass(part) and not isinstance(part, type):
        values = {one.name: _renamed(getattr(part, one.name), names) for one in fields(part)}
        return replace(part, **values)
    return part


def _changed(work: Work, option: Option) -> Work:
    settings = {
        name: value(work) if callable(value) else value for name, value in option.settings.items()
    }
    return changed(work, settings) if settings else work


def _example(study: Study) -> Work:
    return study.scales[study.full].settings[0]
