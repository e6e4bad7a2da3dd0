"""Finding the places of any model whose neurons can be split."""

from fissile.discovery.discover import discover
from fissile.discovery.place import Discovery, Kind, Place, Refusal

__all__ = ["Discovery", "Kind", "Place", "Refusal", "discover"]
