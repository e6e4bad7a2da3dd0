"""The frontier: the most accuracy that a budget of non-zeros buys, and what the recipe needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fissile.lab.claims import Claim, Leads, Often
from fissile.lab.methods import ABLATED, CONTENDERS, OURS
from fissile.lab.study import Lines, Scale, Study
from fissile.lab.trial import Contender, Features

__all__ = ["ABLATIONS", "FRONTIER", "FRONTIERS"]

#: About the budgets of the study; each is that of the dense network whose size comes nearest.
_BUDGETS = (1_000, 2_500, 6_300, 16_000, 40_000, 100_000)
_FEW = (1_000, 6_300, 40_000)
#: Data set, its place in the studies' names, its title, and the samples of a step.
_SETS = (
    ("cifar100", "cifar100-efficientnet-lite2", "CIFAR-100, frozen features", 256),
    ("coarse", "cifar100-coarse-efficientnet-lite2", "CIFAR-100, frozen features, 20 classes", 256),
    ("fashionmnist", "fashionmnist", "FashionMNIST", 256),
    ("clinc150", "clinc150-minilm", "CLINC150, sentence embeddings", 64),
    ("banking77", "banking77-minilm", "Banking77, sentence embeddings", 64),
)


def _widths(task: Features, budgets: Sequence[int]) -> list[int]:
    inputs, outputs = prod(task.entry.shape), task.outputs
    return [max(1, round((one - outputs) / (inputs + 1 + outputs))) for one in budgets]


def _scale(
    data: str, batch: int, trials: int, budgets: Sequence[int], methods: Sequence[str],
    epochs: int = 50,
) -> Scale:  # fmt: skip
    task = Features(data)
    cells = (
        Contender(task, width, method, epochs, batch)
        for width in _widths(task, budgets)
        for method in methods
    )
    return Scale(trials, tuple(cells))


def _study(short: str, data: str, title: str, batch: int) -> Study:
    every = tuple(CONTENDERS)
    others = tuple(name for name in every if name != OURS)
    return Study(
        id=f"frontier-{short}",
        title=f"The frontier: {title}",
        artefact="not in the paper",
        about="Accuracy against non-zero parameters, biases counted, for every way to spend them: "
        "equal epochs, six settings each, chosen on held-out training samples.",
        scales={
            "smoke": _scale(data, batch, 2, _BUDGETS[:1], ("dense", "fpe-4", "l1", OURS), 1),
            "quick": _scale(data, batch, 3, _BUDGETS[1:3], ("dense", "fpe-4", "gradual", OURS), 5),
            "paper": _scale(data, batch, 10, _BUDGETS, every),
        },
        figure=((Lines("budget", "accuracy", every, log=True),),),
        claims=(
            Claim(
                "At every budget the recipe is level with the best of all others or better, and "
                "better in at least half.",
                "the goal",
                Leads(OURS, others),
                own=True,
            ),
            *(
                Claim(
                    f"The recipe is better than {name} in more than half of the budgets.",
                    "the goal",
                    Often(OURS, name),
                    own=True,
                )
                for name in ("fpe-4", "gradual", "l1")
            ),
        ),
        differs=("The paper compares with the dense network of the same budget alone.",),
    )


def _ablation(short: str, data: str, title: str, batch: int) -> Study:
    methods = (OURS, "fpe-4", "fpe-16", *ABLATED)
    return Study(
        id=f"ablation-{short}",
        title=f"What the recipe needs: {title}",
        artefact="not in the paper",
        about="The recipe of the frontier with one thing changed at a time, and the paper's split "
        "with other allocations, splits and times.",
        scales={
            "smoke": _scale(data, batch, 2, _FEW[:1], (OURS, "recipe-linear", "fpe-4-saliency"), 1),
            "quick": _scale(data, batch, 2, _FEW[:2], (OURS, "recipe-magnitude", "fpe-4"), 3),
            "paper": _scale(data, batch, 5, _FEW, methods),
        },
        figure=((Lines("budget", "accuracy", methods, log=True),),),
        differs=("The paper prunes by magnitude, once.",),
    )


FRONTIERS: tuple[Study, ...] = tuple(_study(*one) for one in _SETS)
ABLATIONS: tuple[Study, ...] = tuple(_ablation(*one) for one in _SETS)
#: What names them all on the command line.
FRONTIER = {
    "frontier": tuple(study.id for study in FRONTIERS),
    "ablation": tuple(study.id for study in ABLATIONS),
}
