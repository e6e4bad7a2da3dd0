"""The case study: what the first layer looks like before and after the split."""

from __future__ import annotations

from dataclasses import replace

from fissile.lab.claims import Beats, Claim
from fissile.lab.studies.common import FEW, FULL, TINY, Effort, both, names
from fissile.lab.study import Matrices, Published, Scale, Study

__all__ = ["CODES"]

_ARMS = both(2)


def _scale(trials: int, effort: Effort) -> Scale:
    return Scale(trials, (effort.trial(pictures=True),))


CODES = Study(
    id="codes",
    title="Codes appear when neurons split",
    artefact="Figures 1 and A2, section 4.1",
    about="Eight clauses of four literals, eight neurons, each split in two. The first layer and "
    "its Gram matrix show which clauses have a code: four positive weights, a negative bias and a "
    "positive weight to the output.",
    arms=_ARMS,
    scales={
        "smoke": _scale(2, TINY),
        "quick": _scale(5, FEW),
        "paper": _scale(10, replace(FULL, epochs=1000)),
    },
    figure=((Matrices(names(_ARMS)),),),
    published=(
        Published(
            "section 4.1, test accuracy in %",
            "accuracy",
            "neurons",
            {8: {"dense": 78.7, "clause-2": 99.4, "random-2": 88.7}},
        ),
    ),
    claims=(
        Claim(
            "Splitting by clause improves on the dense network.",
            "section 4.1",
            Beats("clause-2"),
        ),
        Claim(
            "Splitting at random improves on the dense network.",
            "section 4.1",
            Beats("random-2"),
        ),
        Claim(
            "Random splits stay below clause splits.",
            "section 4.1",
            Beats("clause-2", "random-2"),
        ),
        Claim(
            "More clauses have a code after a clause split than in the dense network.",
            "Figure 1",
            Beats("clause-2", measure="coded"),
        ),
        Claim(
            "Codes are more broken after a random split than after a clause split.",
            "Figure A2",
            Beats("clause-2", "random-2", measure="coded"),
        ),
    ),
    differs=(
        "The paper shows one network and gives one accuracy for each; here ten trials are averaged "
        "and trial 0 is drawn.",
    ),
)
