"""The paper's combinatorics: closed forms beside networks that were drawn and counted."""

from __future__ import annotations

from collections.abc import Sequence

from fissile.lab.claims import Claim
from fissile.lab.study import Scale, Series, Study
from fissile.lab.trends import Near
from fissile.lab.trial import Sampling

_WIDTHS = (8, 16, 32, 64, 128)


def _scale(trials: int, networks: int, literals: Sequence[int], widths: Sequence[int]) -> Scale:
    cells = [
        Sampling(count, neurons=width, alpha=alpha, networks=networks)
        for alpha in (2, 4)
        for count in literals
        for width in widths
    ]
    return Scale(trials, tuple(cells))


THEORY = Study(
    id="theory",
    title="Coverage stays, collisions go",
    artefact="section 3 and the appendix on theory",
    about="Sparse neurons with random inputs: the probability that every clause is covered by some "
    "neuron, the collisions that remain, and the width that coverage needs.",
    scales={
        "smoke": _scale(1, 200, (32,), (8, 64)),
        "quick": _scale(2, 500, (32, 128), (8, 64)),
        "paper": _scale(3, 1_000, (32, 64, 128), _WIDTHS),
    },
    figure=(
        (
            Series(
                "neurons",
                ("coverage", "coverage_simulated", "coverage_bound", "coverage_approx"),
                {"alpha": 2, "literals": 32},
                "(a) coverage, 32 literals, alpha 2",
            ),
            Series(
                "literals",
                ("collision_ratio", "collision_ratio_simulated", "collision_ratio_approx"),
                {"alpha": 2, "neurons": 64},
                "(b) collisions against dense, alpha 2",
                log=True,
            ),
            Series(
                "literals",
                ("width", "width_bound", "width_approx"),
                {"alpha": 2, "neurons": 64},
                "(c) neurons for 95 % coverage, alpha 2",
            ),
        ),
    ),
    claims=(
        Claim(
            "The exact probability of covering every clause is what sampled networks show.",
            "appendix on theory",
            Near("coverage_simulated", "coverage", error="coverage_error"),
        ),
        Claim(
            "The exact number of collisions is what sampled networks show.",
            "appendix on theory",
            Near("collision_ratio_simulated", "collision_ratio", error="collision_ratio_error"),
        ),
        *(
            Claim(
                f"Collisions fall by about alpha^-(2k-1) (within a factor of 2), alpha {alpha}, "
                "128 literals.",
                "section 3",
                Near(
                    "collision_ratio",
                    "collision_ratio_approx",
                    factor=2,
                    where={"alpha": alpha, "literals": 128},
                ),
            )
            for alpha in (2, 4)
        ),
        Claim(
            "Coverage needs a width of about alpha^(k-1) ln(C / eps) (within 1.5 times), alpha 2.",
            "appendix on theory",
            Near("width_approx", "width", factor=1.5, where={"alpha": 2}),
        ),
    ),
    differs=("The closed forms here are exact; the paper's are their limits for many literals.",),
)
