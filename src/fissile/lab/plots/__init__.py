"""Figures fit for a paper, drawn from what a study declares and from the table of its trials."""

from fissile.lab.plots.data import in_words, numbers
from fissile.lab.plots.figure import draw, save

__all__ = ["draw", "in_words", "numbers", "save"]
