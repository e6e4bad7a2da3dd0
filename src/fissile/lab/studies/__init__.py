"""The studies: every figure and table of the paper, one declaration each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fissile._common.errors import FissileError
from fissile.lab.claims import Claim, WarmedUp
from fissile.lab.studies.circuits import CIRCUITS, CLUSTERED, CODES
from fissile.lab.studies.detail import COSINE_WIDTH, EQUIVALENCE, FEATURE_DEMAND, TIMING
from fissile.lab.studies.embedding import EMBED_CLAUSES, EMBED_NEURONS
from fissile.lab.studies.frontier import ABLATIONS, FRONTIER, FRONTIERS
from fissile.lab.studies.real import CIFAR100, CLINC150, CNN_256, CNN_512, FASHIONMNIST, IMAGENET100
from fissile.lab.studies.sparsity import (
    DEEP,
    DROPCONNECT,
    DYNAMIC,
    DYNAMIC_SEARCH,
    IMAGENET1K,
    SINGLE_MASK,
    STRUCTURED,
)
from fissile.lab.studies.superposition import CAPACITY, COSINE, INTERFERENCE, SUPERPOSITION
from fissile.lab.studies.theory import THEORY
from fissile.lab.study import Study
from fissile.lab.task import WITHIN

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
        CODES,
        SUPERPOSITION,
        INTERFERENCE,
        CAPACITY,
        COSINE,
        CIRCUITS,
        CLUSTERED,
        EMBED_NEURONS,
        EMBED_CLAUSES,
        THEORY,
        FASHIONMNIST,
        CIFAR100,
        IMAGENET100,
        IMAGENET1K,
        CLINC150,
        CNN_256,
        CNN_512,
        EQUIVALENCE,
        TIMING,
        COSINE_WIDTH,
        FEATURE_DEMAND,
        DEEP,
        STRUCTURED,
        DYNAMIC_SEARCH,
        DYNAMIC,
        SINGLE_MASK,
        DROPCONNECT,
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
            raise FissileError(
                f"there is no study {name!r}; there are {', '.join(STUDIES)}, several at once: "
                f"{', '.join(FRONTIER)}, or all of them: all"
            )
        found |= STUDIES if name == "all" else {name: STUDIES[name]}
    return list(found.values())
