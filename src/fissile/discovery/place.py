"""What a search finds: places that can be expanded, and layers refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fissile._common.table import aligned

__all__ = ["Candidate", "Discovery", "Kind", "Place", "Refusal"]


#: A plain pair; gate and up side by side; the same as one matrix; filters.
Kind = Literal["mlp", "gated", "fused", "conv"]


@dataclass(frozen=True)
class Candidate:
    """A possible place by the names of its modules; with a ``doubt`` it must be tried out first."""

    kind: Kind
    firsts: tuple[str, ...]
    between: tuple[str, ...]
    second: str
    doubt: str | None = None


@dataclass(frozen=True)
class Place:
    """A place where neurons can be split: the layers that make them and the one that reads them.

    >>> place = discover(MLP([32, 8, 1])).places[0]
    >>> place.name, place.between, place.second, place.neurons
    ('layers.0', ('layers.1',), 'layers.2', 8)

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
    """A layer with neurons that will not be split, and why.

    >>> discover(MLP([32, 8, 1])).refusals[0].reason
    'its output is what the model returns'
    """

    name: str
    kind: str
    shape: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """The places and refusals of a model, in the order in which data flows through it.

    >>> len(discover(MLP([32, 8, 1])))
    1
    """

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
        rows = [("place", "kind", "inputs → neurons → outputs", "non-zeros")]
        for place in self.places:
            sizes = f"{place.inputs} → {place.neurons} → {place.outputs}"
            rows.append((place.name, place.kind, sizes, f"{place.nonzeros:,}"))
        refused = [("refused", "kind", "shape", "why")]
        refused += [(layer.name, layer.kind, layer.shape, layer.reason) for layer in self.refusals]
        lines = aligned(rows, right=[3]) if self.places else ["no place can be split"]
        return "\n".join([*lines, "", *aligned(refused)] if self.refusals else lines)
