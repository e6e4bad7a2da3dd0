"""A convolutional backbone and its classifier, learned together on the images of CIFAR-100."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fissile.lab.claims import Beats, Claim, Trend
from fissile.lab.studies.common import Row, gram, names, rows
from fissile.lab.studies.real import sweep_figure
from fissile.lab.study import Published, Scale, Study
from fissile.lab.trial import Images, Trial

__all__ = ["CNN_256", "CNN_512"]

_ARMS = gram(4)
_WIDTHS = (4, 8, 16, 32, 64, 128)


def _scale(trials: int, projection: int, widths: Sequence[int], epochs: int) -> Scale:
    task = Images("cifar100", projection)
    cells = (Trial(task, width, warm_up=epochs, fine_tune=epochs) for width in widths)
    return Scale(trials, tuple(cells))


def _study(projection: int, panel: str, table: Mapping[int, Row]) -> Study:
    source = f"Figure 5{panel} and its table"
    return Study(
        id=f"cnn-{projection}",
        title=f"CIFAR-100 images, a projection of {projection}",
        artefact=source,
        about="Three VGG-style blocks of 64, 128 and 256 channels, a projection, and a classifier "
        "with one hidden layer, which alone is expanded; everything is trained throughout.",
        arms=_ARMS,
        scales={
            "smoke": _scale(1, projection, (4,), 1),
            "quick": _scale(2, projection, (4, 16), 5),
            "paper": _scale(10, projection, _WIDTHS, 25),
        },
        figure=sweep_figure(_ARMS),
        published=(
            Published(
                f"CNN with a projection of {projection}: test accuracy in %",
                "accuracy",
                "neurons",
                rows(_ARMS, table),
            ),
        ),
        claims=(
            *(
                Claim(
                    f"The {arm} split improves accuracy at every width.",
                    source,
                    Beats(arm),
                )
                for arm in names(_ARMS[1:])
            ),
            Claim(
                "The relative improvement is largest at the smallest widths.",
                "section 5.2",
                Trend("improvement", "gram-4", "neurons", rises=False),
            ),
        ),
        differs=(
            "The paper states neither alpha (here 4) nor how images are scaled: each channel is "
            "brought to mean 0 and deviation 1 over the training set, without augmentation.",
            "On a GPU, convolutions are computed in bfloat16.",
            "Accuracy per parameter counts the weights of the classifier alone.",
        ),
    )


CNN_256 = _study(
    256,
    "c",
    {
        4: ((1.0, 0.0), (30.9, 3.6), (27.0, 3.8)),
        8: ((14.1, 6.3), (48.4, 0.7), (47.9, 0.9)),
        16: ((48.0, 1.2), (50.8, 0.4), (50.9, 0.4)),
        32: ((56.7, 0.2), (56.9, 0.2), (56.9, 0.2)),
        64: ((58.9, 0.1), (59.2, 0.1), (59.4, 0.2)),
        128: ((59.7, 0.1), (60.0, 0.1), (60.0, 0.1)),
    },
)

CNN_512 = _study(
    512,
    "d",
    {
        4: ((1.0, 0.0), (21.7, 2.6), (3.7, 1.3)),
        8: ((1.0, 0.0), (42.3, 1.9), (14.9, 4.4)),
        16: ((13.8, 4.3), (50.4, 0.6), (50.0, 0.5)),
        32: ((50.9, 1.0), (52.5, 0.5), (52.6, 0.5)),
        64: ((57.9, 0.2), (58.0, 0.2), (58.1, 0.2)),
        128: ((59.7, 0.1), (59.8, 0.1), (59.9, 0.1)),
    },
)
