"""Features learned together with the classifier: an embedding in front of the first layer."""

from __future__ import annotations

from dataclasses import replace

from fissile.lab.claims import Beats, Claim
from fissile.lab.studies.common import READING, boolean, gains, gram, names, table
from fissile.lab.study import Study
from fissile.lab.trends import Trend

#: Alpha 2 fits the table of neurons better than 4; the paper does not state it.
_ARMS = gram(2)
_SPLIT = names(_ARMS[1:])
_AXIS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)
#: The table of neurons is clearly nearer with fewer samples than the other studies have: it misses
#: by 3.7 points with 10,000 and by 8.1 with 50,000 (docs/fidelity.md).
_FEWER = replace(READING, train=10_000)

_OPEN = (
    "The paper states neither alpha nor the width of the embedding: alpha is 2, and the embedding "
    "is as wide as the input.",
)


def _better(along: str) -> tuple[Claim, ...]:
    return tuple(
        Claim(
            f"The {arm} split beats the dense network at every number of {along}.",
            "Figure 5 and its table",
            Beats(arm, along=(along,)),
        )
        for arm in _SPLIT
    )


EMBED_NEURONS = Study(
    id="embed-neurons",
    title="Learned features, varying neurons",
    artefact="Figure 5a and its table",
    about="A reading of its own: 10,000 samples, which the paper's table clearly needs. Eight "
    "clauses; a trainable linear embedding in front, learned with the classifier before and after "
    "the split.",
    arms=_ARMS,
    scales=boolean(
        lambda axis: [(8, neurons) for neurons in axis],
        _AXIS,
        trials=10,
        task=_FEWER,
        embedded=True,
    ),
    figure=gains(_ARMS, "neurons"),
    published=table(
        "embedding layer, varying neurons: test accuracy in %",
        _ARMS,
        {
            4: ((70.3, 2.1), (78.2, 2.9), (76.3, 2.9)),
            6: ((75.2, 1.8), (81.1, 2.9), (80.5, 2.8)),
            8: ((80.2, 1.1), (85.7, 2.8), (85.7, 2.8)),
            10: ((80.8, 2.7), (86.2, 3.4), (86.4, 3.5)),
            12: ((84.1, 0.7), (89.3, 0.9), (89.8, 0.9)),
            14: ((86.0, 0.9), (91.3, 0.7), (91.4, 0.6)),
            16: ((87.1, 0.6), (91.9, 0.6), (92.2, 0.5)),
            20: ((88.9, 0.6), (92.8, 0.5), (92.9, 0.6)),
            24: ((90.7, 0.6), (93.9, 0.4), (93.6, 0.5)),
            28: ((90.0, 0.4), (93.7, 0.3), (93.6, 0.3)),
            32: ((91.6, 0.3), (94.6, 0.3), (94.4, 0.3)),
        },
    ),
    claims=(
        *_better("neurons"),
        Claim(
            "The relative improvement is largest where neurons are few.",
            "section 5.2",
            Trend("improvement", "gram-2", "neurons", rises=False),
        ),
    ),
    differs=_OPEN,
)

EMBED_CLAUSES = Study(
    id="embed-clauses",
    title="Learned features, varying clauses",
    artefact="Figure 5b and its table",
    about="Eight neurons; a trainable linear embedding in front, learned with the classifier "
    "before and after the split.",
    arms=_ARMS,
    scales=boolean(
        lambda axis: [(clauses, 8) for clauses in axis], _AXIS, trials=10, embedded=True
    ),
    figure=gains(_ARMS, "clauses"),
    published=table(
        "embedding layer, varying clauses: test accuracy in %",
        _ARMS,
        {
            4: ((86.8, 1.5), (92.7, 0.8), (92.9, 0.6)),
            6: ((81.1, 1.4), (87.8, 2.2), (87.7, 2.2)),
            8: ((80.6, 1.0), (86.2, 2.0), (86.2, 1.9)),
            10: ((79.1, 0.6), (83.4, 2.0), (83.4, 1.9)),
            12: ((80.6, 0.8), (86.0, 1.2), (86.2, 1.3)),
            14: ((78.6, 0.8), (84.4, 1.7), (84.6, 1.8)),
            16: ((79.2, 0.4), (86.4, 0.6), (86.4, 0.7)),
            20: ((79.1, 0.7), (84.5, 0.9), (84.6, 0.9)),
            24: ((77.9, 0.7), (83.7, 1.6), (83.9, 1.6)),
            28: ((77.4, 0.4), (82.5, 1.3), (82.6, 1.3)),
            32: ((76.6, 0.5), (83.7, 0.8), (84.0, 0.8)),
        },
        along="clauses",
    ),
    claims=_better("clauses"),
    differs=(
        *_OPEN,
        "The paper's accuracies hardly fall from 8 to 32 clauses; in this reading ours do. They "
        "are as flat as the paper's if one literal of every clause is flipped to make a near miss "
        "and the embedding is as wide as there are clauses: see docs/fidelity.md.",
    ),
)
