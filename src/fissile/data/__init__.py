"""Tasks to train on."""

from __future__ import annotations

from fissile.data.dnf import Formula, Negatives, Samples, dnf, dnf_task

__all__ = ["Formula", "Negatives", "Samples", "dnf", "dnf_task"]
