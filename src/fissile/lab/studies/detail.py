"""A closer look at CIFAR-100: equal dense networks, when to split, cosine, and feature demand."""

from __future__ import annotations

from collections.abc import Sequence

from fissile.lab.claims import Beats, Claim
from fissile.lab.studies.common import DENSE, gram, names, published, sweep
from fissile.lab.studies.real import CLIP, FEATURES, SCALED, SCALING
from fissile.lab.study import Curves, Equivalence, Heat, Lines, Scale, Study
from fissile.lab.trends import Equivalent, Flatter, Trend
from fissile.lab.trial import Arm, Features, Trial

_WIDTHS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160)

EQUIVALENCE = Study(
    id="equivalence",
    title="The dense network that is as good",
    artefact="Figure 6a",
    about="Accuracy over weights: for each expanded network, the larger dense network of the same "
    "accuracy, by interpolation.",
    arms=(DENSE, Arm("random", 4)),
    scales={
        "smoke": sweep(2, [FEATURES], (4, 8, 12), 1),
        "quick": sweep(3, [FEATURES], (4, 6, 8, 12, 16), 5),
        "paper": sweep(10, [FEATURES], _WIDTHS),
    },
    figure=((Equivalence("random-4"),),),
    claims=(
        Claim(
            "The expanded network is as good as a dense one with at least 1.2 times its weights.",
            "Figure 6a",
            Equivalent("random-4", least=1.2),
        ),
        Claim(
            "Expanding 32 neurons is as good as 1.2 times the weights.",
            "section 5.3",
            Equivalent("random-4", least=1.2, at=32),
        ),
    ),
    differs=(SCALED,),
)


def _timed(trials: int, splits: Sequence[int], total: int) -> Scale:
    cells = (
        Trial(FEATURES, 8, warm_up=epoch, fine_tune=total - epoch, pictures=True)
        for epoch in splits
    )
    return Scale(trials, tuple(cells))


TIMING = Study(
    id="timing",
    title="When to split",
    artefact="Figure 6b",
    about="Eight neurons, fifty epochs in all; the split comes after so many of them.",
    arms=(DENSE, Arm("random", 4)),
    scales={
        "smoke": _timed(2, (0, 1), 2),
        "quick": _timed(3, (0, 1, 5, 10), 15),
        "paper": _timed(10, (0, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45), 50),
    },
    figure=(
        (
            Curves("random-4", "Test accuracy while training"),
            Lines("warm_up", "accuracy", ("dense", "random-4"), stars=("random-4",)),
        ),
    ),
    claims=(
        Claim(
            "The earlier the split, the better the final accuracy.",
            "section 5.3",
            Trend("accuracy", "random-4", "warm_up", rises=False),
        ),
        Claim(
            "Later splits still beat the dense network under the same total budget.",
            "section 5.3",
            Beats("random-4", along=("warm_up",)),
        ),
    ),
    differs=("The paper does not state alpha for this figure: it is 4.", SCALED),
)

_COSINE = (DENSE, Arm("random", 2), Arm("random", 4))

COSINE_WIDTH = Study(
    id="cosine-width",
    title="Cosine similarity over widths",
    artefact="Figure 6c",
    about="Mean cosine similarity of all pairs of neurons, before and after random splits.",
    arms=_COSINE,
    scales={
        "smoke": sweep(2, [FEATURES], (4, 8), 1),
        "quick": sweep(3, [FEATURES], (4, 16, 64), 5),
        "paper": sweep(10, [FEATURES], (4, 8, 16, 32, 64, 128)),
    },
    figure=(
        (
            Lines("neurons", "cosine", names(_COSINE), stars=names(_COSINE[1:])),
            Lines("neurons", "absolute_cosine", names(_COSINE), stars=names(_COSINE[1:])),
        ),
    ),
    claims=tuple(
        Claim(
            f"Random splits with alpha {alpha} have a lower mean {what} at every width.",
            "Figure 6c",
            Beats(f"random-{alpha}", measure=measure, lower=True),
        )
        for alpha in (2, 4)
        for measure, what in (
            ("cosine", "cosine similarity"),
            ("absolute_cosine", "absolute cosine similarity"),
        )
    ),
    differs=(
        SCALED,
        "The paper does not say whether signs count: both the mean cosine and the mean of its "
        "magnitude are shown.",
    ),
)

_DEMAND = gram(4)
_CLASSES, _NEURONS = (40, 60, 80, 100), (10, 15, 20, 25)


def _subsets(*classes: int) -> list[Features]:
    return [Features(CLIP, count, scaling=SCALING) for count in classes]


FEATURE_DEMAND = Study(
    id="feature-demand",
    title="More classes, more features",
    artefact="Figure 6d and its table",
    about="Nested subsets of the classes, and growing widths: does the gain follow the demand?",
    arms=_DEMAND,
    scales={
        "smoke": sweep(2, _subsets(10, 20), (4, 8), 1),
        "quick": sweep(3, _subsets(40, 100), (10, 25), 5),
        "paper": sweep(10, _subsets(*_CLASSES), _NEURONS),
    },
    figure=(
        (
            Heat("classes", "neurons", "improvement", "gram-4", title="Gram split"),
            Heat("classes", "neurons", "improvement", "random-4", title="Random split"),
        ),
    ),
    published=published("feature-demand"),
    claims=(
        *(
            Claim(
                f"With {width} neurons, more classes yield more improvement.",
                "section 5.3",
                Trend("improvement", "random-4", "classes", where={"neurons": width}),
            )
            for width in _NEURONS
        ),
        Claim(
            "Where classes grow with the width, the gain falls more slowly than where they do not.",
            "Figure 6d",
            Flatter(
                "improvement", "random-4", "neurons", where={"load": 4.0}, than={"classes": 40}
            ),
        ),
    ),
    differs=(
        SCALED,
        "Which classes are in which subset, the paper does not say: ours are drawn by a seed.",
    ),
)
