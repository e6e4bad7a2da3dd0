"""Does what is measured before a split foretell its gain? Do features of real data guide splits?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fissile._common.progress import number_of
from fissile.bank.loop import Recipe
from fissile.lab.claims import NOTHING, Alike, Beats, Claim, Often, Verdict, verdict
from fissile.lab.frame import pick
from fissile.lab.stats import Array
from fissile.lab.studies.common import DENSE, gram, names
from fissile.lab.study import Lines, Panel, Published, Regression, Scale, Study
from fissile.lab.trends import Explains
from fissile.lab.trial import Arm, Features, Trial

if TYPE_CHECKING:
    from pandas import DataFrame

_SETS = {
    "digits": "digits",
    "cifar100-efficientnet-lite2": "CIFAR-100",
    "cifar100-coarse-efficientnet-lite2": "CIFAR-100, 20 classes",
    "fashionmnist": "FashionMNIST",
    "clinc150-minilm": "CLINC150",
    "banking77-minilm": "Banking77",
}
_NAMES = tuple(_SETS)
_WIDTHS = (4, 8, 16, 32, 64, 128)
_RANDOM, _GRAM = Arm("random", 4), Arm("gram", 4)
_GUIDED = Arm("means", 4), Arm("atoms", 4)
_CELL = ("data", "neurons")
_OURS = "not in the paper"
_DIFFERS = (
    "Ours: 10 + 10 epochs at a rate of 3e-3. Features have a mean length of 10. Class means and "
    "dictionaries are those of at most 4,000 training samples.",
)


def _scale(trials: int, sets: Sequence[str], widths: Sequence[int], epochs: int) -> Scale:
    cells = (
        Trial(
            Features(data, scaling="length-10"), neurons, recipe=Recipe(lr=3e-3),
            warm_up=epochs, fine_tune=epochs, diagnosed=True,
        )
        for data in sets
        for neurons in widths
    )  # fmt: skip
    return Scale(trials, tuple(cells))


def _scales() -> dict[str, Scale]:
    return {
        "smoke": _scale(2, ("digits", "generated"), (4, 8), 1),
        "quick": _scale(3, _NAMES, (4, 16, 64), 5),
        "paper": _scale(5, _NAMES, _WIDTHS, 10),
    }


@dataclass(frozen=True)
class Foretells:
    """Measures before the split tell its gain on a data set that the line has not seen.

    >>> Foretells(("load", "before_means"), "random-4")

    One data set is left out at a time: a straight line through the cells of all others foretells
    its gains, in points. The claim holds if that explains half of the variance around the mean gain
    of the others.
    """

    measures: tuple[str, ...]
    arm: str
    least: float = 0.5
    along: tuple[str, ...] = _CELL

    def __call__(self, frame: DataFrame) -> Verdict:
        """Judge a table of results."""
        if not {"accuracy", *self.measures} <= set(frame.columns):
            return NOTHING
        found = [(str(at[0]), *self._cell(cell)) for at, cell in frame.groupby(list(self.along))]
        found = [one for one in found if np.isfinite([one[1], *one[2]]).all()]
        sets = np.array([one[0] for one in found])
        if len(set(sets)) < 3:
            return NOTHING
        gains, known = np.array([one[1] for one in found]), np.array([one[2] for one in found])
        said, mean = left_out(sets, known, gains)
        error = float(((said - gains) ** 2).mean())
        r2 = 1 - error / float(((mean - gains) ** 2).mean())
        right = float(((said > 1) == (gains > 1)).mean())
        numbers = (
            f"R² = {r2:.2f} over {number_of(len(gains), 'cell')} of "
            f"{number_of(len(set(sets)), 'data set')}; off by "
            f"{error**0.5:.1f} points; right in {right:.0%} of cells about a gain above one point"
        )
        return verdict(r2 < self.least, r2 >= self.least, numbers)

    def _cell(self, cell: DataFrame) -> tuple[float, list[float]]:
        """Return the mean gain of a cell in points, and what was measured before."""
        dense, split = (pick(cell, {}, [arm]).set_index("trial") for arm in ("dense", self.arm))
        gain = float((split["accuracy"] - dense["accuracy"]).mean())
        known = [float(dense[name].mean()) for name in self.measures]
        # Numbers per neuron spread over orders of magnitude.
        logs = ("load", "before_rank")
        return gain, [
            float(np.log(one)) if name in logs else one
            for name, one in zip(self.measures, known, strict=True)
        ]


def left_out(sets: Any, known: Array, gains: Array) -> tuple[Array, Array]:
    """Return what lines through all other data sets say of each cell, and the others' mean gain."""
    rows = np.column_stack([np.ones(len(known)), known])
    said, mean = np.empty(len(gains)), np.empty(len(gains))
    for name in set(sets):
        here = sets == name
        line = np.linalg.lstsq(rows[~here], gains[~here], rcond=None)[0]
        said[here], mean[here] = rows[here] @ line, gains[~here].mean()
    return said, mean


def _panels(make: Any) -> tuple[tuple[Panel, ...], ...]:
    """Return a panel for each data set, three in a row."""
    panels = [make({"data": name}, _SETS[name]) for name in _NAMES]
    return tuple(tuple(panels[start : start + 3]) for start in range(0, len(panels), 3))


def _improvement(arms: tuple[str, ...], stars: tuple[str, ...] = ()) -> Any:
    return lambda where, title: Lines(
        "neurons", "improvement", arms, where, title, stars, baseline=0.0, log=True
    )


def _foretold(text: str, *measures: str) -> Claim:
    text = f"{text} the gain of the random split on a data set that was left out (R² of 0.5)."
    return Claim(text, "set before the first run", Foretells(measures, "random-4"), own=True)


FORETELL = Study(
    id="foretell",
    title="Does a look before the split foretell its gain?",
    artefact=_OURS,
    about="Small classifiers of six data sets are diagnosed, then split. A straight line through "
    "all other data sets is asked for the gain on each.",
    arms=(DENSE, _RANDOM),
    scales=_scales(),
    figure=_panels(_improvement(("random-4",), ("random-4",))),
    claims=(
        _foretold("Features per neuron and the capacity of class means foretell",
                  "load", "before_means"),
        _foretold("Features per neuron alone foretell", "load"),
        _foretold("The capacity of class means alone foretells", "before_means"),
        _foretold("The capacity of a dictionary's atoms alone foretells", "before_atoms"),
        _foretold("The effective rank of class means per neuron alone foretells", "before_rank"),
        _foretold("The accuracy at the split, which diagnose does not measure, foretells", "warm"),
        Claim(
            "With 4 neurons the random split gains on every data set.", "set before the run",
            Beats("random-4", along=("data",), where={"neurons": 4}), own=True,
        ),
        Claim(
            "With 128 neurons it is within a point of dense on every data set.",
            "set before the run",
            Alike("random-4", "dense", along=("data",), where={"neurons": 128}), own=True,
        ),
    ),
    differs=_DIFFERS,
)  # fmt: skip


def _both(kind: str, what: str) -> tuple[Claim, ...]:
    capacity = f"{kind}_capacity"
    return (
        *(
            Claim(
                f"After the {arm} split {what} have more capacity in more than half of the cells.",
                "section 4.2, there of formulas", Often(arm, measure=capacity, along=_CELL),
                own=True,
            )
            for arm in ("random-4", "gram-4")
        ),
        Claim(
            f"Over all data sets and widths, the capacity of {what} and accuracy improve together.",
            "section 4.2, there of formulas",
            Explains("improvement", f"{capacity}_fold", ("random-4", "gram-4"), along=_CELL),
            own=True,
        ),
    )  # fmt: skip


def _regressions(kind: str, of: str) -> tuple[tuple[Panel, ...], ...]:
    fold, arms = f"{kind}_capacity_fold", ("random-4", "gram-4")
    return _panels(
        lambda where, title: Regression(
            fold, "improvement", arms, "neurons", where, f"{title}: {of}"
        ),
    )


INTERFERENCE_REAL = Study(
    id="interference-real",
    title="Less interference on real features",
    artefact=_OURS,
    about="The total capacity of class means and of a dictionary's atoms as a multiple of the "
    "dense network's, and the gains that go with it.",
    arms=gram(4),
    scales=_scales(),
    figure=(*_regressions("means", "class means"), *_regressions("atoms", "atoms")),
    claims=(*_both("means", "class means"), *_both("atoms", "atoms of a dictionary")),
    differs=(*_DIFFERS, "The paper measures the clauses of formulas."),
)

_SPLITS = (DENSE, _RANDOM, _GRAM, *_GUIDED)


def _guided(arm: str, what: str) -> tuple[Claim, ...]:
    text = f"Splits that keep the inputs of {what} together are"
    source = "the paper's hope for stronger feature discovery"
    return (
        *(
            Claim(
                f"{text} better than {name} splits in more than half of the cells.", source,
                Often(arm, over, along=_CELL), own=True,
            )
            for over, name in (("random-4", "random"), ("gram-4", "Gram"))
        ),
        Claim(
            f"{text} level with random ones (within a point).", source,
            Alike(arm, "random-4", along=_CELL), own=True,
        ),
    )  # fmt: skip


GUIDED = Study(
    id="guided",
    title="Splits that features guide",
    artefact=_OURS,
    about="Inputs that are strongest in the same feature stay together: in the same class mean, or "
    "in the same atom of a dictionary. All splits have as many non-zero weights.",
    arms=_SPLITS,
    scales=_scales(),
    figure=_panels(_improvement(names(_SPLITS[1:]))),
    published=tuple(
        Published(
            f"{_SETS[name]}: test accuracy in %", "accuracy", "neurons",
            dict.fromkeys(_WIDTHS, dict.fromkeys(names(_SPLITS))), {"data": name},
        )
        for name in _NAMES
    ),
    claims=(*_guided("means-4", "class means"), *_guided("atoms-4", "a dictionary's atoms")),
    differs=(*_DIFFERS, "The paper splits by clauses that are known, at random and by Gram."),
)  # fmt: skip
