"""Finding the places of any model whose neurons can be split."""

from fissile.discovery.module_checks import Kind
from fissile.discovery.search import Discovery, Place, Refusal, discover

__all__ = ["Discovery", "Kind", "Place", "Refusal", "discover"]
