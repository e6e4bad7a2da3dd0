"""Tables of invented trials and pictures of invented networks, for tests of figures."""

from __future__ import annotations

from functools import cache
from math import nan

import numpy as np
import pandas
from matplotlib.figure import Figure

from fissile.lab.frame import after, table
from fissile.lab.plots import draw
from fissile.lab.studies import STUDIES
from fissile.lab.study import Study
from fissile.lab.trial import Contender, Sampling, Work

MEASURES = (
    "accuracy", "best", "capacity", "cosine", "absolute_cosine", "diagonal_cosine", "collisions",
    "agreement", "adjusted_rand", "cosine_agreement", "cosine_adjusted_rand", "coded", "nats",
    "means_capacity", "atoms_capacity",
)  # fmt: skip
THEORY = ("coverage", "collision_ratio", "width")


def invented(work: Work, random: np.random.Generator) -> dict[str, float]:
    """Return numbers such as a trial might come to, without any training."""
    if isinstance(work, Sampling):
        found = {name: random.uniform(0.1, 0.9) for name in THEORY}
        for name in THEORY:
            found |= {f"{name}_{end}": random.uniform(0.1, 0.9) for end in ("simulated", "approx")}
            found[f"{name}_bound"] = random.uniform(-4, 0.5)
        return found
    if isinstance(work, Contender):
        found = {"accuracy": 0.6 + 0.02 * np.log(work.budget) + random.normal(0, 0.02)}
        return found | {"nonzeros": float(work.budget)}
    better = 0.04 * work.arm.alpha
    found = {name: 0.5 + better + random.normal(0, 0.02) for name in MEASURES}
    return found | {"nonzeros": 40.0 * work.neurons}


def frame_of(study: Study, scale: str = "") -> pandas.DataFrame:
    """Return a table of invented trials; where lines are fitted through its cells, of more.

    Of the frontier it is the paper's scale, which alone has every method; of studies on several
    data sets it is one that has them all.
    """
    usual = {"interference": "quick", "frontier": "paper", "ablation": "paper"}
    usual |= dict.fromkeys(("foretell", "interference-real", "guided"), "quick")
    short = study.id if study.id in usual else study.id.partition("-")[0]
    return _frame(study.id, scale or usual.get(short, "smoke"))


@cache
def _frame(name: str, scale: str) -> pandas.DataFrame:
    works = STUDIES[name].works(scale, 3)
    random = np.random.default_rng(0)
    return table(works, {work.key: invented(work, random) for work in works})


def pictures_of(study: Study) -> dict[str, np.ndarray]:
    """Return a first layer for each arm: its children share out the inputs of their parent."""
    random = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    if study.id == "timing":
        grown = [50 + 20 * np.log1p(np.arange(15)) + random.normal(size=(3, 15)) for _ in "four"]
        names = ("dense", *(after("random-4", epoch) for epoch in (0, 1, 5)))
        return dict(zip(names, grown, strict=True))
    for arm in study.arms:
        weight = random.normal(size=(8 * arm.alpha, 32))
        for child in range(arm.alpha):
            weight[child :: arm.alpha][:, np.arange(32) % arm.alpha != child] = nan
        found[arm.name] = weight
    return found


class Figures(dict[str, Figure]):
    """Every study's figure, drawn once when it is asked for."""

    def __missing__(self, name: str) -> Figure:
        study = STUDIES[name]
        figure = draw(study, frame_of(study), pictures_of(study))
        assert figure is not None
        self[name] = figure
        return figure
