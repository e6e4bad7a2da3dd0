"""How long a trial takes on two cores: formulas fitted to measured runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fissile.lab.task import Boolean, Features

if TYPE_CHECKING:
    from fissile.lab.trial import Trial

__all__ = ["measures", "step"]


def step(trial: Trial) -> float:
    """Return the seconds of one training step of one network among many."""
    task = trial.task
    if isinstance(task, Boolean):
        first = trial.embedding or task.literals
        weights, behind = trial.neurons * first, first * task.literals
        seconds = 0.74e-6 + (3.9e-9 + 0.19e-9 * trial.arm.alpha) * weights
        return seconds + (2.6e-9 * behind if trial.embedding else 0.0)
    if isinstance(task, Features):
        return _classifier(trial, task)
    return 0.9  # the backbone, whatever sits on it


def _classifier(trial: Trial, task: Features) -> float:
    inputs = 1
    for size in task.entry.shape:
        inputs *= size
    hidden, alpha = trial.neurons, trial.arm.alpha
    weights = inputs * hidden + (trial.depth - 2) * hidden**2 + hidden * task.outputs
    if trial.arm.split == "dropconnect":
        return 1.4e-7 * alpha * inputs * hidden
    if trial.depth > 2 or trial.arm.split == "dynamic":
        return 1e-4 + 2e-9 * weights * (1 + alpha)
    return 2e-5 + 2.0e-9 * weights + 0.7e-9 * hidden * alpha * task.outputs


def measures(trial: Trial) -> float:
    """Return the seconds that measuring one network takes."""
    if not isinstance(trial.task, Boolean) or trial.embedding:
        return 0.0
    return 7e-4 + 8.8e-6 * trial.task.literals * trial.task.clauses
