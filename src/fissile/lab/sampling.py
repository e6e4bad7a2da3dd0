"""Trials of the theory: random sparse networks, drawn and counted."""

from __future__ import annotations

from fissile.lab.trial import Sampling
from fissile.measure.theory import required_width

__all__ = ["sampled"]


def sampled(work: Sampling) -> dict[str, float]:
    """Return the closed forms, and what sampled networks come to."""
    net = work.formula
    seen = net.simulate(work.networks, seed=work.number)
    measures = {
        "coverage": net.coverage,
        "coverage_bound": net.coverage_bound,
        "coverage_approx": net.coverage_approx,
        "coverage_simulated": seen.coverage,
        "coverage_error": seen.coverage_error,
        "collision_ratio": net.collision_ratio,
        "collision_ratio_approx": net.collision_ratio_approx,
        "collision_ratio_simulated": seen.collisions / net.collisions_dense,
        "collision_ratio_error": seen.collisions_error / net.collisions_dense,
    }
    width = required_width(work.eps, work.literals, work.size, work.alpha)
    return measures | {
        "width": width.exact,
        "width_bound": width.bound,
        "width_approx": width.approx,
    }
