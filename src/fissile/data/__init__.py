"""Tasks to train on: the Boolean one, and data sets from files."""

from __future__ import annotations

from fissile.data.catalogue import load, load_texts
from fissile.data.dnf import Formula, Negatives, Others, Samples, dnf, dnf_task
from fissile.data.features import read_features, write_features
from fissile.data.sets import Labelled
from fissile.data.text import Texts

__all__ = [
    "Formula", "Labelled", "Negatives", "Others", "Samples", "Texts", "dnf", "dnf_task", "load",
    "load_texts", "read_features", "write_features",
]  # fmt: skip
