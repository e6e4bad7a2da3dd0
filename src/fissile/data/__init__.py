"""Tasks to train on."""

from __future__ import annotations

from fissile.data.dnf import Formula, Negatives, Others, Samples, dnf, dnf_task

__all__ = ["Formula", "Negatives", "Others", "Samples", "dnf", "dnf_task"]
