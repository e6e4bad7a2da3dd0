"""What a search finds: places that can be expanded, and layers refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fissile._common.table import aligned

__all__ = ["Discovery", "Kind", "Place", "Refusal"]


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
