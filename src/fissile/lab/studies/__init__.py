"""The studies: every figure and table of the paper, one declaration each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from fissile._common.errors import FissileError
from fissile.lab.claims import Claim
from fissile.lab.source import Misnamed, executed, pointing
from fissile.lab.studies import (
    circuits,
    detail,
    embedding,
    foretell,
    real,
    sparsity,
    superposition,
    theory,
    transformer,
)
from fissile.lab.studies.frontier import ABLATIONS, FRONTIER, FRONTIERS
from fissile.lab.study import Study, check
from fissile.lab.task import WITHIN
from fissile.lab.trends import WarmedUp

__all__ = ["CRITERION", "GIVEN", "SEVERAL", "STUDIES", "find"]

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
        foretell.FORETELL,
        foretell.INTERFERENCE_REAL,
        foretell.GUIDED,
        transformer.TRANSFORMER,
    )
}


#: What stands for more than one study on the command line.
SEVERAL = (*FRONTIER, "all")
#: The studies whose files were named to this process.
GIVEN: dict[str, Study] = {}


def is_file(word: str) -> bool:
    """Return whether a word of the command line names a file with a study."""
    return word.endswith(".py")


def _in_file(path: str) -> Study:
    """Run a file, and return its study once all its names are right; data may lie beside it."""
    study, file = getattr(executed(path), "STUDY", None), Path(path).resolve()
    word = study.id if isinstance(study, Study) else "STUDY"
    with pointing(file, word):
        if not isinstance(study, Study):
            raise FissileError("it has no STUDY = Study(...); see: fissile new-study")
        if study.id in (*STUDIES, *SEVERAL):
            raise Misnamed(study.id, f"{study.id} is a study of fissile; give yours another id")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", study.id):
            raise FissileError(f"id={study.id!r}: use small letters, digits and single hyphens")
        study = replace(study, file=str(file))
        check(study)
    places = os.environ.get("FISSILE_DATA", "").split(os.pathsep)
    if str(file.parent) not in places:
        os.environ["FISSILE_DATA"] = os.pathsep.join(filter(None, (*places, str(file.parent))))
    GIVEN[study.id] = study
    return study


def find(ids: Iterable[str]) -> list[Study]:
    """Return the studies with these ids; ``all`` stands for every one.

    ``frontier`` and ``ablation`` stand for five each, one on every data set. A word that ends in
    ``.py`` is a file with a study, which is run as Python.

    >>> [study.id for study in find(["capacity", "cosine"])]
    ['capacity', 'cosine']
    """
    found: dict[str, Study] = {}
    for name in (one for asked in ids for one in FRONTIER.get(asked, (asked,))):
        if is_file(name):
            study = _in_file(name)
            if (other := found.get(study.id, study)).file != study.file:
                raise FissileError(f"{other.file} and {study.file} both have the id {study.id}")
            found[study.id] = study
            continue
        if name != "all" and name not in STUDIES:
            if near := get_close_matches(name, (*STUDIES, *SEVERAL), cutoff=0.7):
                raise FissileError(f"there is no study {name!r}; did you mean {' or '.join(near)}?")
            raise FissileError(
                f"there is no study {name!r}; there are {', '.join(STUDIES)}, several at once: "
                f"{', '.join(FRONTIER)}, or all of them: all"
            )
        found |= STUDIES if name == "all" else {name: STUDIES[name]}
    return list(found.values())
