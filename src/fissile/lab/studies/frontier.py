"""The frontier: the most accuracy that a budget of non-zeros buys, and what the recipe needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fissile.lab.budget_methods import ABLATED, CONTENDERS, OURS
from fissile.lab.claims import Claim, Leads, Often
from fissile.lab.study import Lines, Scale, Study
from fissile.lab.trial import Contender, Features

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


def _scale(
    data: str, batch: int, trials: int, budgets: Sequence[int], methods: Sequence[str],
    epochs: int = 50, classes: int = 0,
) -> Scale:  # fmt: skip
    task = Features(data, classes)
    outputs, of_neuron = task.outputs, prod(task.entry.shape) + 1 + task.outputs
    widths = [max(1, round((budget - outputs) / of_neuron)) for budget in budgets]
    cells = (Contender(task, n, method, epochs, batch) for n in widths for method in methods)
    return Scale(trials, tuple(cells))


def _smoke(data: str, batch: int, methods: Sequence[str]) -> Scale:
    """Return one epoch of the smallest budget, on few classes: all six settings are tried."""
    classes = min(20, Features(data).outputs // 4)
    return _scale(data, batch, 2, _BUDGETS[:1], methods, 1, classes)


def _study(short: str, data: str, title: str, batch: int) -> Study:
    every = tuple(CONTENDERS)
    others = tuple(name for name in every if name != OURS)
    return Study(
        id=f"frontier-{short}",
        title=f"The frontier: {title}",
        artefact="not in the paper",
        about="Accuracy against non-zero parameters, biases counted, for every way to spend them: "
        "equal epochs, six settings each, chosen on held-out training samples. The axis begins a "
        "little below the recipe; what comes from below was lower.",
        scales={
            "smoke": _smoke(data, batch, ("dense", "fpe-4", "l1", OURS)),
            "quick": _scale(data, batch, 3, _BUDGETS[1:3], ("dense", "fpe-4", "gradual", OURS), 3),
            "paper": _scale(data, batch, 10, _BUDGETS, every),
        },
        figure=((Lines("budget", "accuracy", every, log=True, above=OURS),),),
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


def _panel(arms: tuple[str, ...], what: str) -> Lines:
    title = f"{what}, one thing changed at a time"
    return Lines("budget", "accuracy", arms, title=title, log=True, above=OURS)


def _ablation(short: str, data: str, title: str, batch: int) -> Study:
    methods = (OURS, "fpe-4", "fpe-16", *ABLATED)
    return Study(
        id=f"ablation-{short}",
        title=f"What the recipe needs: {title}",
        artefact="not in the paper",
        about="The recipe of the frontier with one thing changed at a time, and the paper's split "
        "with other allocations, splits and times.",
        scales={
            "smoke": _smoke(data, batch, (OURS, "recipe-linear", "fpe-4-saliency")),
            "quick": _scale(data, batch, 2, _FEW[:2], (OURS, "recipe-magnitude", "fpe-4"), 3),
            "paper": _scale(data, batch, 5, _FEW, methods),
        },
        figure=(
            (
                _panel((OURS, *(name for name in ABLATED if name.startswith(OURS))), "the recipe"),
                _panel((OURS, *(n for n in methods if n.startswith("fpe"))), "the paper's split"),
            ),
        ),
        differs=("The paper prunes by magnitude, once.",),
    )


FRONTIERS: tuple[Study, ...] = tuple(_study(*about) for about in _SETS)
ABLATIONS: tuple[Study, ...] = tuple(_ablation(*about) for about in _SETS)
#: What names them all on the command line.
FRONTIER = {
    "frontier": tuple(study.id for study in FRONTIERS),
    "ablation": tuple(study.id for study in ABLATIONS),
}
