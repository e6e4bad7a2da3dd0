"""The studies: every figure and table of the paper, one declaration each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches

from fissile._common.errors import FissileError
from fissile.lab.claims import Claim
from fissile.lab.studies import circuits, detail, embedding, real, sparsity, superposition, theory
from fissile.lab.studies.frontier import ABLATIONS, FRONTIER, FRONTIERS
from fissile.lab.study import Study
from fissile.lab.task import WITHIN
from fissile.lab.trends import WarmedUp

__all__ = ["CRITERION", "SEVERAL", "STUDIES", "find"]

#: What the paper says of its own warm-up, held to every study that trains networks.
CRITERION = Claim(
    "The dense network is within 95 % of converged when it is split (one network of each cell).",
    "appendix, training and parameters",
    WarmedUp(WITHIN),
    own=True,
)


def _with_criterion(study: Study) -> Study:
    return replace(study, claims=(*study.claims, CRITERION)) if study.converged("paper") else study


#: In the order of the paper.
STUDIES: dict[str, Study] = {
    study.id: _with_criterion(study)
    for study in (
        circuits.CODES,
        superposition.SUPERPOSITION,
        superposition.INTERFERENCE,
        superposition.CAPACITY,
        superposition.COSINE,
        circuits.CIRCUITS,
        circuits.CLUSTERED,
        embedding.EMBED_NEURONS,
        embedding.EMBED_CLAUSES,
        theory.THEORY,
        real.FASHIONMNIST,
        real.CIFAR100,
        real.IMAGENET100,
        sparsity.IMAGENET1K,
        real.CLINC150,
        real.CNN_256,
        real.CNN_512,
        detail.EQUIVALENCE,
        detail.TIMING,
        detail.COSINE_WIDTH,
        detail.FEATURE_DEMAND,
        sparsity.DEEP,
        sparsity.STRUCTURED,
        sparsity.DYNAMIC_SEARCH,
        sparsity.DYNAMIC,
        sparsity.SINGLE_MASK,
        sparsity.DROPCONNECT,
        *FRONTIERS,
        *ABLATIONS,
    )
}


#: What stands for more than one study on the command line.
SEVERAL = (*FRONTIER, "all")


def find(ids: Iterable[str]) -> list[Study]:
    """Return the studies with these ids; ``all`` stands for every one.

    ``frontier`` and ``ablation`` stand for five each, one on every data set.

    >>> [study.id for study in find(["capacity", "cosine"])]
    ['capacity', 'cosine']
    """
    found: dict[str, Study] = {}
    for name in (one for asked in ids for one in FRONTIER.get(asked, (asked,))):
        if name != "all" and name not in STUDIES:
            if near := get_close_matches(name, (*STUDIES, *SEVERAL), cutoff=0.7):
                raise FissileError(f"there is no study {name!r}; did you mean {' or '.join(near)}?")
            raise FissileError(
                f"there is no study {name!r}; there are {', '.join(STUDIES)}, several at once: "
                f"{', '.join(FRONTIER)}, or all of them: all"
            )
        found |= STUDIES if name == "all" else {name: STUDIES[name]}
    return list(found.values())
