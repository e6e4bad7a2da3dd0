"""Superposition: what splitting gains where features crowd, and what it does to interference."""

from __future__ import annotations

from itertools import product

from fissile.lab.claims import Beats, Claim, Often, Together
from fissile.lab.studies.common import boolean, both, cross, names, published
from fissile.lab.study import Heat, Lines, Regression, Study
from fissile.lab.trends import Explains, Levels, Trend

#: Both axes of the heat-map: hidden neurons, and clauses.
WIDTHS = (4, 8, 12, 16, 20, 24, 28, 32)
_ARMS = both(2, 4)
_SPLIT = names(_ARMS[1:])
_STARRED = ("clause-4", "random-4")
_EIGHT_CLAUSES, _EIGHT_NEURONS = {"clauses": 8}, {"neurons": 8}

SUPERPOSITION = Study(
    id="superposition",
    title="Splitting helps most where features crowd",
    artefact="Figure 2 and its longer version in the appendix",
    about="Accuracy of dense and split networks over the number of neurons, the number of clauses, "
    "and both together, with expansion factors 2 and 4.",
    arms=_ARMS,
    scales=boolean(lambda axis: product(axis, axis), WIDTHS),
    figure=(
        (
            Lines("neurons", "improvement", _SPLIT, _EIGHT_CLAUSES, "(a) 8 clauses", _STARRED, 0.0),
            Lines("clauses", "improvement", _SPLIT, _EIGHT_NEURONS, "(b) 8 neurons", _STARRED, 0.0),
        ),
        (
            Lines("neurons", "per_parameter", names(_ARMS), _EIGHT_CLAUSES),
            Lines("clauses", "per_parameter", names(_ARMS), _EIGHT_NEURONS),
        ),
        (
            Heat("clauses", "neurons", "improvement", "clause-4", "(c) clause split"),
            Heat("clauses", "neurons", "improvement", "random-4", "random split"),
        ),
    ),
    claims=(
        Claim(
            "With 8 clauses, clause splits (alpha 4) beat the dense network at every width.",
            "Figure 2a",
            Beats("clause-4", where=_EIGHT_CLAUSES),
        ),
        Claim(
            "With 8 clauses, the gain of clause splits falls as width grows.",
            "Figure 2a",
            Trend("improvement", "clause-4", "neurons", rises=False, where=_EIGHT_CLAUSES),
        ),
        Claim(
            "Clause splits outperform random splits, at every width and number of clauses.",
            "section 4.2",
            Together(
                (
                    Beats("clause-4", "random-4", where=_EIGHT_CLAUSES),
                    Beats("clause-4", "random-4", along=("clauses",), where=_EIGHT_NEURONS),
                )
            ),
        ),
        Claim(
            "With 8 clauses, random splits often outperform the dense network.",
            "section 4.2",
            Often("random-4", where=_EIGHT_CLAUSES),
        ),
        Claim(
            "Random splits improve on the dense network across many cells of the heat-map.",
            "Figure 2c",
            Often("random-4", along=("clauses", "neurons")),
        ),
        Claim(
            "With 8 neurons, the gain of clause splits rises with the number of clauses at first.",
            "Figure 2b",
            Trend("improvement", "clause-4", "clauses", where=_EIGHT_NEURONS, until=16),
        ),
        Claim(
            "With 8 neurons, the benefit begins to plateau beyond about 16 clauses.",
            "Figure 2b",
            Levels("improvement", "clause-4", "clauses", beyond=16, where=_EIGHT_NEURONS),
        ),
        *(
            Claim(
                f"The gain of clause splits reaches a plateau for {neurons} neurons.",
                "Figure 2c",
                Levels("improvement", "clause-4", "clauses", beyond=16, where={"neurons": neurons}),
            )
            for neurons in (12, 16)
        ),
        Claim(
            "Gains of clause splits persist where clauses and neurons grow together.",
            "Figure 2c",
            Beats("clause-4", where={"load": 1.0}),
        ),
        Claim(
            "Over all cells, gains of clause splits grow with the number of clauses.",
            "Figure 2c",
            Trend("improvement", "clause-4", "clauses"),
        ),
        Claim(
            "Over all cells, gains of clause splits fall with the number of neurons.",
            "Figure 2c",
            Trend("improvement", "clause-4", "neurons", rises=False),
        ),
    ),
    differs=("The heat-maps are of alpha 4; the paper does not say which its heat-maps show.",),
)

_COSINE = "absolute_cosine"


def _folds(measure: str) -> tuple[Lines, Lines, Regression]:
    fold = f"{measure}_fold"
    return (
        Lines("neurons", fold, _SPLIT, _EIGHT_CLAUSES, "(a) 8 clauses", _STARRED, 1.0),
        Lines("clauses", fold, _SPLIT, _EIGHT_NEURONS, "(b) 8 neurons", _STARRED, 1.0),
        Regression(fold, "improvement", _SPLIT, "neurons", _EIGHT_CLAUSES, "(c) varying neurons"),
    )


def _both_sweeps(arm: str, measure: str, lower: bool = False) -> tuple[Beats, Beats]:
    return (
        Beats(arm, measure=measure, where=_EIGHT_CLAUSES, lower=lower),
        Beats(arm, measure=measure, along=("clauses",), where=_EIGHT_NEURONS, lower=lower),
    )


INTERFERENCE = Study(
    id="interference",
    title="Less interference goes with more accuracy",
    artefact="Figure 3",
    about="Feature capacity and cosine similarity of neurons as multiples of the dense network's, "
    "and how well each explains the gain in accuracy.",
    arms=_ARMS,
    scales=boolean(cross, WIDTHS),
    figure=(_folds("capacity"), _folds(_COSINE)),
    claims=(
        *(
            Claim(
                f"The {arm} split has more feature capacity than the dense network everywhere.",
                "Figure 3a and b, top",
                Together(_both_sweeps(arm, "capacity")),
            )
            for arm in _SPLIT
        ),
        Claim(
            "The gain in capacity is most pronounced where neurons are few.",
            "section 4.2",
            Trend("capacity_fold", "clause-4", "neurons", rises=False, where=_EIGHT_CLAUSES),
        ),
        Claim(
            "Neurons of all splits are closer to orthogonal than the dense network's, in all "
            "settings but one.",
            "Figure 3a and b, bottom",
            Together(
                tuple(beats for arm in _SPLIT for beats in _both_sweeps(arm, _COSINE, lower=True)),
                spare=1,
            ),
        ),
        Claim(
            "Varying width, capacity and accuracy improve together.",
            "Figure 3c, top",
            Explains("improvement", "capacity_fold", _SPLIT, where=_EIGHT_CLAUSES),
        ),
        Claim(
            "Varying width, cosine similarity falls as accuracy improves.",
            "Figure 3c, bottom",
            Explains("improvement", f"{_COSINE}_fold", _SPLIT, where=_EIGHT_CLAUSES, rises=False),
        ),
    ),
    differs=(
        "Cosine similarity is the mean magnitude over pairs of distinct neurons; the paper does "
        "not speak of magnitudes, but a signed mean is close to zero in our networks.",
    ),
)

_LITERALS = (12, 24, 32, 40, 60, 80, 100, 128)
_FOUR = both(4)
_SCALES = boolean(
    lambda literals: [(count // 4, 8) for count in literals],
    _LITERALS,
    few=(12, 32, 60, 128),
    tiny=(12, 32),
)

CAPACITY = Study(
    id="capacity",
    title="Splitting raises feature capacity",
    artefact="the appendix's table of total feature capacity",
    about="The capacities of all clauses summed, for eight neurons and 12 to 128 literals.",
    arms=_FOUR,
    scales=_SCALES,
    figure=((Lines("literals", "capacity", names(_FOUR), stars=_STARRED),),),
    published=published("capacity"),
    claims=tuple(
        Claim(
            f"The {arm} split has more feature capacity at every number of literals.",
            "table of total feature capacity",
            Beats(arm, measure="capacity", along=("literals",)),
        )
        for arm in _STARRED
    ),
    differs=(
        "The table does not state alpha; a capacity of 16.87 needs more than 16 neurons, so alpha "
        "is 4. With 12 literals there are three clauses, and one child of four gets none.",
    ),
)

COSINE = Study(
    id="cosine",
    title="Splitting turns neurons apart",
    artefact="the appendix's table of neuron cosine similarity",
    about="Mean cosine similarity of the neurons' input weights, for eight neurons and 12 to 128 "
    "literals.",
    arms=_FOUR,
    scales=_SCALES,
    figure=(
        (
            Lines("literals", "diagonal_cosine", names(_FOUR)),
            Lines("literals", _COSINE, names(_FOUR), stars=_STARRED),
        ),
    ),
    published=published("cosine"),
    claims=tuple(
        Claim(
            f"The {arm} split has a lower cosine similarity at every number of literals.",
            "table of neuron cosine similarity",
            Beats(arm, measure=_COSINE, along=("literals",), lower=True),
        )
        for arm in _STARRED
    ),
    differs=(
        "The paper averages over pairs of distinct neurons. Its numbers are met when magnitudes "
        "are averaged and every neuron is compared with itself too, so the table does that. More "
        "neurons lower such a mean by themselves; the claims are therefore checked on the "
        "magnitudes over distinct pairs.",
    ),
)
