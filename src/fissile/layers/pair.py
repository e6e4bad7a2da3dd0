"""Which layers were split together, as the layer that reads the children remembers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

__all__ = ["Pair"]


@dataclass(frozen=True)
class Pair:
    """The layers that make the children, what widened between, and the layer that reads them.

    >>> Pair(("mlp.up",), (), "mlp.down").alone()
    Pair(firsts=('up',), between=(), second='down')
    """

    firsts: tuple[str, ...]
    between: tuple[str, ...]
    second: str

    def alone(self) -> Pair:
        """Name the modules from the one that holds them all, so that it may move elsewhere."""
        parts = [name.split(".")[:-1] for name in (*self.firsts, *self.between, self.second)]
        common = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
        start = sum(len(level[0]) + 1 for level in common)
        return self.mapped(lambda name: name[start:])

    def beside(self, name: str) -> Pair | None:
        """Name the modules in a model where the second layer has this name; None if it cannot."""
        if not f".{name}".endswith(f".{self.second}"):
            return None
        prefix = name.removesuffix(self.second)
        return self.mapped(lambda one: prefix + one)

    def mapped(self, rename: Callable[[str], str]) -> Pair:
        """Name every module otherwise."""
        firsts, between = (tuple(map(rename, names)) for names in (self.firsts, self.between))
        return Pair(firsts, between, rename(self.second))
