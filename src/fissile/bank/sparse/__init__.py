"""Sparse networks of one hidden layer, trained side by side: every way to spend a budget.

>>> from fissile.bank.sparse import Plan, Prune, train
"""

from fissile.bank.sparse.plan import Plan, Prune, Rewire, SplitAt
from fissile.bank.sparse.stack import SparseNet, SparseStack, module_of
from fissile.bank.sparse.train import train

__all__ = ["Plan", "Prune", "Rewire", "SparseNet", "SparseStack", "SplitAt", "module_of", "train"]
