"""The studies: every figure and table of the paper, one declaration each."""

from __future__ import annotations

from collections.abc import Iterable

from fissile.errors import FissileError
from fissile.lab.studies.circuits import CIRCUITS, CLUSTERED
from fissile.lab.studies.codes import CODES
from fissile.lab.studies.embedding import EMBED_CLAUSES, EMBED_NEURONS
from fissile.lab.studies.interference import CAPACITY, COSINE, INTERFERENCE
from fissile.lab.studies.superposition import SUPERPOSITION
from fissile.lab.studies.theory import THEORY
from fissile.lab.study import Study

__all__ = ["STUDIES", "find"]

#: In the order of the paper.
STUDIES: dict[str, Study] = {
    study.id: study
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
    )
}


def find(ids: Iterable[str]) -> list[Study]:
    """Return the studies with these ids; ``all`` stands for every one.

    >>> [study.id for study in find(["capacity", "cosine"])]
    ['capacity', 'cosine']
    """
    found: dict[str, Study] = {}
    for name in ids:
        if name != "all" and name not in STUDIES:
            raise FissileError(
                f"there is no study {name!r}; there are {', '.join(STUDIES)}, or all of them: all"
            )
        found |= STUDIES if name == "all" else {name: STUDIES[name]}
    return list(found.values())
