"""Codes and circuits: what the first layer looks like, and which edges carry which clause."""

from __future__ import annotations

from itertools import product

from fissile.lab.claims import Beats, Claim, Often
from fissile.lab.studies.common import TINY, boolean, both, cross, grid, names, published
from fissile.lab.studies.superposition import WIDTHS
from fissile.lab.study import Lines, Matrices, Study
from fissile.lab.trends import Trend

_TWO = both(2)

_ONE = [(8, 8)]  # clauses and neurons
_SMOKE = grid(2, _ONE, task=TINY, epochs=2, pictures=True)

CODES = Study(
    id="codes",
    title="Codes appear when neurons split",
    artefact="Figures 1 and A2, section 4.1",
    about="Eight clauses of four literals, eight neurons, each split in two. The first layer and "
    "its Gram matrix show which clauses have a code: four positive weights, a negative bias and a "
    "positive weight to the output.",
    arms=_TWO,
    scales={
        "smoke": _SMOKE,
        "quick": grid(5, _ONE, epochs=100, pictures=True),
        "paper": grid(10, _ONE, epochs=1000, pictures=True),
    },
    figure=((Matrices(names(_TWO)),),),
    published=published("codes"),
    claims=(
        Claim(
            "Splitting by clause improves on the dense network.", "section 4.1", Beats("clause-2")
        ),
        Claim(
            "Splitting at random improves on the dense network.", "section 4.1", Beats("random-2")
        ),
        Claim(
            "Random splits stay below clause splits.", "section 4.1", Beats("clause-2", "random-2")
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

_ARMS = both(4)
_SCORES = {"agreement": "pairwise agreement", "adjusted_rand": "adjusted Rand index"}
#: The two sweeps: along which axis, with what held fixed, and how claims and titles call it.
_SWEEPS = (
    ("clauses", {"neurons": 8}, "at every number of clauses", "8 neurons"),
    ("neurons", {"clauses": 8}, "at every width", "8 clauses"),
)


def _recovered(prefix: str, *, own: bool) -> list[Claim]:
    """Return what the paper says of the clusters, for one way to cluster the Gram matrix."""
    how, source = (" by absolute cosines" if own else ""), "section on circuits"
    claims = [
        Claim(
            f"Clause splits have a higher {text}{how} than the dense network, {place}.",
            source,
            Beats("clause-4", measure=prefix + measure, along=(along,), where=where),
            own=own,
        )
        for (measure, text), (along, where, place, _) in product(_SCORES.items(), _SWEEPS)
    ]
    more = f"Dense networks recover the clauses{how} better as their neurons increase."
    rises = Trend(f"{prefix}adjusted_rand", "dense", "neurons", where={"clauses": 8})
    return [*claims, Claim(more, source, rises, own=own)]


CIRCUITS = Study(
    id="circuits",
    title="Clause splits untangle circuits",
    artefact="the appendix's sweep of pairwise agreement, adjusted Rand index and collisions",
    about="How many edges serve more than one clause, and how well k-means over the Gram matrix "
    "recovers the clauses: over its rows as they are, and over absolute cosines.",
    arms=_ARMS,
    scales=boolean(cross, WIDTHS, trials=10),
    figure=tuple(
        tuple(Lines(along, name, names(_ARMS), where, title) for name in panels)
        for panels in (
            ("agreement", "cosine_agreement", "collisions"),
            ("adjusted_rand", "cosine_adjusted_rand"),
        )
        for along, where, _, title in _SWEEPS
    ),
    claims=(
        *_recovered("", own=False),
        *(
            Claim(
                f"Clause splits generally have a lower collision rate, varying {along}.",
                "section on circuits",
                Often("clause-4", measure="collisions", along=(along,), where=where, lower=True),
            )
            for along, where, *_ in _SWEEPS
        ),
        *_recovered("cosine_", own=True),
    ),
    differs=(
        "The paper does not state alpha here; it is 4, as in the tables of capacity and cosine.",
        "The paper clusters the Gram matrix by k-means and says no more. Its claims are held to "
        "the rows as they are; claims marked as ours are the same sentences for rows of absolute "
        "cosines, where the size of a weight does not matter.",
        "An edge counts for a clause if its neuron fires on most of the clause's samples that "
        "switch its literal on; if one sample were enough, nearly every edge would collide.",
    ),
)

CLUSTERED = Study(
    id="clustered",
    title="The Gram matrix in blocks",
    artefact="the appendix's figure of Gram matrices, clustered Gram matrices and first layers",
    about="Eight clauses of four literals and eight neurons: the Gram matrix, the same with its "
    "literals in the order of their k-means clusters, and the first layer.",
    arms=_TWO,
    scales={
        "smoke": _SMOKE,
        "quick": grid(5, _ONE, pictures=True),
        "paper": grid(10, _ONE, pictures=True),
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
