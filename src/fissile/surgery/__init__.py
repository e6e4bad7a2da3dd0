"""Finding the places of any model whose neurons can be split."""

from fissile.surgery.discover import discover
from fissile.surgery.place import Discovery, Kind, Place, Refusal

__all__ = ["Discovery", "Kind", "Place", "Refusal", "discover"]
