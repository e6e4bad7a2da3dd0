"""Finding the places of any model whose neurons can be split."""

from fissile.discovery.place import Discovery, Kind, Place, Refusal
from fissile.discovery.search import discover

__all__ = ["Discovery", "Kind", "Place", "Refusal", "discover"]
