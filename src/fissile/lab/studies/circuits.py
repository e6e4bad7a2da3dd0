"""Which edges carry which clause, and whether clusters of the Gram matrix find the clauses."""

from __future__ import annotations

from fissile.lab.claims import Beats, Claim, Often, Trend
from fissile.lab.studies.common import FULL, TINY, Effort, both, cross, names
from fissile.lab.studies.superposition import WIDTHS
from fissile.lab.study import Lines, Matrices, Scale, Study

__all__ = ["CIRCUITS", "CLUSTERED"]

_ARMS = both(4)
_MEASURES = ("agreement", "adjusted_rand", "collisions")


CIRCUITS = Study(
    id="circuits",
    title="Clause splits untangle circuits",
    artefact="the appendix's sweep of pairwise agreement, adjusted Rand index and collisions",
    about="How many edges serve more than one clause, and how well k-means over the Gram matrix "
    "recovers the clauses.",
    arms=_ARMS,
    scales={
        "smoke": cross(2, TINY, (4, 8)),
        "quick": cross(3, FULL, (4, 8, 16, 32)),
        "paper": cross(10, FULL, WIDTHS),
    },
    figure=(
        tuple(
            Lines("clauses", name, names(_ARMS), {"neurons": 8}, "8 neurons") for name in _MEASURES
        ),
        tuple(
            Lines("neurons", name, names(_ARMS), {"clauses": 8}, "8 clauses") for name in _MEASURES
        ),
    ),
    claims=(
        *(
            Claim(
                f"Clause splits have a higher {text} than the dense network, {place}.",
                "section on circuits",
                Beats("clause-4", measure=measure, along=(along,), where=where),
            )
            for measure, text in (
                ("agreement", "pairwise agreement"),
                ("adjusted_rand", "adjusted Rand index"),
            )
            for along, where, place in (
                ("clauses", {"neurons": 8}, "at every number of clauses"),
                ("neurons", {"clauses": 8}, "at every width"),
            )
        ),
        *(
            Claim(
                f"Clause splits generally have a lower collision rate, {place}.",
                "section on circuits",
                Often("clause-4", measure="collisions", along=(along,), where=where, lower=True),
            )
            for along, where, place in (
                ("clauses", {"neurons": 8}, "varying clauses"),
                ("neurons", {"clauses": 8}, "varying neurons"),
            )
        ),
        Claim(
            "Dense networks recover the clauses better as their neurons increase.",
            "section on circuits",
            Trend("adjusted_rand", "dense", "neurons", where={"clauses": 8}),
        ),
    ),
    differs=(
        "The paper does not state alpha here; it is 4, as in the tables of capacity and cosine.",
        "An edge counts for a clause if its neuron fires on most of the clause's samples that "
        "switch its literal on; if one sample were enough, nearly every edge would collide.",
    ),
)

_TWO = both(2)


def _pictures(trials: int, effort: Effort) -> Scale:
    return Scale(trials, (effort.trial(pictures=True),))


CLUSTERED = Study(
    id="clustered",
    title="The Gram matrix in blocks",
    artefact="the appendix's figure of Gram matrices, clustered Gram matrices and first layers",
    about="Eight clauses of four literals and eight neurons: the Gram matrix, the same with its "
    "literals in the order of their k-means clusters, and the first layer.",
    arms=_TWO,
    scales={
        "smoke": _pictures(2, TINY),
        "quick": _pictures(5, FULL),
        "paper": _pictures(10, FULL),
    },
    figure=((Matrices(names(_TWO), ("gram", "clustered", "w1")),),),
    claims=(
        Claim(
            "Clusters of the Gram matrix match the clauses better after a clause split.",
            "figure of clustered Gram matrices",
            Beats("clause-2", measure="adjusted_rand"),
        ),
    ),
    differs=("The paper does not state alpha here; it is 2, as in the case study.",),
)
