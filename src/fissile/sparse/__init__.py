"""Sparse networks of one hidden layer, trained side by side: every way to spend a budget.

>>> from fissile.sparse import Plan, Prune, train
"""

from fissile.sparse.plan import Plan, Prune, Rewire, SplitAt
from fissile.sparse.stack import Stack
from fissile.sparse.train import train

__all__ = ["Plan", "Prune", "Rewire", "SplitAt", "Stack", "train"]
