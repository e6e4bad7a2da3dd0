"""Places that can be expanded, layers refused with a reason, and the choice by ``where=``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from fissile._common.errors import FissileError
from fissile._common.table import aligned
from fissile.discovery.module_checks import wrapped_in

__all__ = ["Discovery", "Kind", "Place", "Refusal", "Where", "choose", "refuse_wrapped"]


#: A plain pair; gate and up side by side; the same as one matrix; filters.
Kind = Literal["mlp", "gated", "fused", "conv"]


@dataclass(frozen=True)
class Place:
    """A place where neurons can be split: the layers that make them and the one that reads them.

    ``firsts`` has one name, or gate and up of a gated pair. In a ``"fused"`` pair one layer makes
    both halves, so it has ``2 * neurons`` rows. ``between`` are the modules the neurons pass
    through on their way to ``second``; those with something for every neuron widen with them.
    """

    kind: Kind
    firsts: tuple[str, ...]
    between: tuple[str, ...]
    second: str
    inputs: int
    neurons: int
    outputs: int
    nonzeros: int

    @property
    def name(self) -> str:
        """The name of the layer whose neurons split first."""
        return self.firsts[0]

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers with weights that count: the firsts and the second."""
        return (*self.firsts, self.second)


@dataclass(frozen=True)
class Refusal:
    """A layer with neurons that will not be split, and why."""

    name: str
    kind: str
    shape: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """All that was found, in the order in which data flows through the model."""

    places: tuple[Place, ...]
    refusals: tuple[Refusal, ...]

    def __len__(self) -> int:
        """Count the places."""
        return len(self.places)

    def __iter__(self) -> Iterator[Place]:
        """Go through the places."""
        return iter(self.places)

    def __str__(self) -> str:
        """Show a table: what can be split, then what cannot and why."""
        found = [("place", "kind", "inputs → neurons → outputs", "non-zeros")]
        found += [
            (
                one.name,
                one.kind,
                f"{one.inputs} → {one.neurons} → {one.outputs}",
                f"{one.nonzeros:,}",
            )
            for one in self.places
        ]
        refused = [("refused", "kind", "shape", "why")]
        refused += [(one.name, one.kind, one.shape, one.reason) for one in self.refusals]
        lines = aligned(found, right=[3]) if self.places else ["no place can be split"]
        return "\n".join([*lines, "", *aligned(refused)] if self.refusals else lines)


#: A name, a glob such as ``"encoder.*.mlp"``, several of those, or a function of the place.
Where = str | Sequence[str] | Callable[[Place], bool]

_SHOWN = 3


def choose(found: Discovery, where: Where | None) -> list[Place]:
    """Return the places to expand, in the order data flows, none with a layer of another.

    >>> choose(discover(MLP([32, 8, 8, 8, 10])), None)  # hidden layers 1 and 3
    """
    if not found.places:
        raise FissileError(f"nothing to expand{_reasons(found.refusals)}")
    named = found.places if where is None else _named(found, where)
    chosen: list[Place] = []
    spent: set[str] = set()
    for place in named:
        if spent.isdisjoint(place.layers):
            chosen.append(place)
            spent.update(place.layers)
    return chosen


def _named(found: Discovery, where: Where) -> list[Place]:
    if callable(where):
        named = [place for place in found.places if where(place)]
        if not named:
            raise FissileError(f"where chose none of {_names(found.places)}")
        return named
    patterns = [where] if isinstance(where, str) else where
    if (
        not isinstance(patterns, Sequence)
        or not patterns
        or not all(isinstance(pattern, str) for pattern in patterns)
    ):
        raise FissileError(
            f"where={where!r} is neither a name, nor a list of names, nor a function of a place"
        )
    for pattern in patterns:
        if not any(_matches(place.firsts, pattern) for place in found.places):
            refused = [one for one in found.refusals if _matches([one.name], pattern)]
            raise FissileError(
                f"where={pattern!r} matches no place that can be expanded{_reasons(refused)}; "
                f"there are {_names(found.places)}"
            )
    return [
        place
        for place in found.places
        if any(_matches(place.firsts, pattern) for pattern in patterns)
    ]


def _matches(names: Iterable[str], pattern: str) -> bool:
    """Tell whether a pattern names one of the layers or a module above one."""
    for name in names:
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatchcase(one, pattern) for one in above):
            return True
    return False


def _names(places: Sequence[Place]) -> str:
    names = [repr(place.name) for place in places]
    more = f" and {len(names) - 2 * _SHOWN} more" if len(names) > 2 * _SHOWN else ""
    return ", ".join(names[: 2 * _SHOWN]) + more


def _reasons(refusals: Sequence[Refusal]) -> str:
    """Say why the first few layers were refused."""
    if not refusals:
        return ""
    shown = "; ".join(f"{one.name!r}: {one.reason}" for one in refusals[:_SHOWN])
    more = len(refusals) - _SHOWN
    return f" ({shown}{f'; and {more} more' if more > 0 else ''})"


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is spread over processes or compiled: its wrapper holds its tensors."""
    if not isinstance(model, nn.Module):
        raise FissileError(f"a model is an nn.Module, not a {type(model).__name__}")
    if why := wrapped_in(model):
        raise FissileError(f"{why}, then wrap the expanded model")
