"""A small GPT: splits in its feed-forward networks, and in a bottleneck before its characters."""

from __future__ import annotations

from typing import Any

from fissile.bank.loop import Recipe
from fissile.lab.claims import Beats, Claim, Often
from fissile.lab.studies.common import DENSE, names
from fissile.lab.study import Lines, Published, Scale, Study
from fissile.lab.task import Place
from fissile.lab.trial import Arm, Text, Trial

_ARMS = (
    DENSE,
    *(
        Arm(split, alpha, allocation=allocation)
        for alpha in (2, 4)
        for split in ("random", "dynamic")
        for allocation in ("magnitude", "layer")
    ),
)
_WIDTHS: dict[Place, tuple[int, ...]] = {"ffn": (16, 64, 256), "head": (4, 16, 64)}
_PLACES: dict[Place, str] = {"ffn": "feed-forward networks", "head": "bottleneck of the head"}
_MEASURES = {"nats": "test loss in nats", "accuracy": "next characters foretold in %"}
_SOURCE = "what the paper leaves to future work"


def _scale(trials: int, widths: int, epochs: int, **task: Any) -> Scale:
    recipe = Recipe(lr=1e-3, batch=32, l1=0.0, l2=0.0)
    cells = (
        Trial(Text(place=place, **task), n, recipe=recipe, warm_up=epochs, fine_tune=epochs)
        for place, each in _WIDTHS.items()
        for n in each[:widths]
    )
    return Scale(trials, tuple(cells))


_TINY = {"data": "generated-text", "layers": 1, "width": 16, "context": 8, "beside": 8, "steps": 5}


def _claims(place: Place) -> tuple[Claim, ...]:
    what, where = _PLACES[place], {"place": place}
    fixed = [arm.name for arm in _ARMS if arm.split == "random"]
    beats = (
        Claim(
            f"Split in the {what}, {arm} has a lower loss than the dense network at every width.",
            _SOURCE,
            Beats(arm, measure="nats", where=where, lower=True),
            own=True,
        )
        for arm in fixed
    )
    moving = (
        Claim(
            f"In the {what}, moving masks have a lower loss than fixed ones at most widths "
            f"(alpha {alpha}).",
            _SOURCE,
            Often(f"dynamic-{alpha}", f"random-{alpha}", "nats", where=where, lower=True),
            own=True,
        )
        for alpha in (2, 4)
    )
    return (*beats, *moving)


TRANSFORMER = Study(
    id="transformer",
    title="A small GPT",
    artefact="not in the paper",
    about="A GPT of four layers reads tiny Shakespeare, character by character. Half-way its "
    "feed-forward networks are split, or the bottleneck of its head, at as many non-zero weights.",
    arms=_ARMS,
    scales={
        "smoke": _scale(2, 1, 1, **_TINY),
        "quick": _scale(3, 2, 5, layers=2, width=64, context=64),
        "paper": _scale(5, 3, 20),
    },
    figure=tuple(
        tuple(
            Lines("neurons", measure, names(_ARMS), {"place": place}, title, log=True)
            for place, title in _PLACES.items()
        )
        for measure in _MEASURES
    ),
    published=tuple(
        Published(
            f"{title}: {unit}",
            measure,
            "neurons",
            dict.fromkeys(_WIDTHS[place], dict.fromkeys(names(_ARMS))),
            {"place": place},
            3 if measure == "nats" else 2,
        )
        for place, title in _PLACES.items()
        for measure, unit in _MEASURES.items()
    ),
    claims=(*_claims("ffn"), *_claims("head")),
    differs=(
        "The paper has no transformer. Ours: Adam at 1e-3, 32 texts of 128 characters a step, "
        "2,000 steps before the split and as many after it. Where the head is split, each "
        "feed-forward network has 64 neurons.",
        "Masks move every 100 steps: a tenth of the weights at first, and fewer along a cosine.",
        "On a GPU, products are computed in bfloat16.",
        "Non-zero weights are those of all linear layers.",
    ),
)
