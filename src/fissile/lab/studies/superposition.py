"""How much splitting helps, as features crowd into fewer neurons."""

from __future__ import annotations

from collections.abc import Sequence

from fissile.lab.claims import Beats, Claim, Levels, Often, Together, Trend
from fissile.lab.studies.common import FULL, TINY, Effort, both, names
from fissile.lab.study import Heat, Lines, Scale, Study

__all__ = ["SUPERPOSITION", "WIDTHS"]

#: Both axes of the heat-map: hidden neurons, and clauses.
WIDTHS = (4, 8, 12, 16, 20, 24, 28, 32)
_ARMS = both(2, 4)
_SPLIT = names(_ARMS[1:])
_STARRED = ("clause-4", "random-4")
_EIGHT_CLAUSES, _EIGHT_NEURONS = {"clauses": 8}, {"neurons": 8}


def _scale(trials: int, effort: Effort, axis: Sequence[int]) -> Scale:
    cells = [effort.trial(clauses=clauses, neurons=h) for clauses in axis for h in axis]
    return Scale(trials, tuple(cells))


SUPERPOSITION = Study(
    id="superposition",
    title="Splitting helps most where features crowd",
    artefact="Figure 2 and its longer version in the appendix",
    about="Accuracy of dense and split networks over the number of neurons, the number of clauses, "
    "and both together, with expansion factors 2 and 4.",
    arms=_ARMS,
    scales={
        "smoke": _scale(2, TINY, (4, 8)),
        "quick": _scale(3, FULL, (4, 8, 16, 32)),
        "paper": _scale(5, FULL, WIDTHS),
    },
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
            Trend(
                "improvement",
                "clause-4",
                "clauses",
                where=_EIGHT_NEURONS,
                until=16,
            ),
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
