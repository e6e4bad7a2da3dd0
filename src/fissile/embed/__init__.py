"""Features from a frozen encoder: images or texts in, a features file out."""

from __future__ import annotations

from fissile.embed.encoders import Encoder, encoder
from fissile.embed.run import embed
from fissile.embed.sources import Source, source

__all__ = ["Encoder", "Source", "embed", "encoder", "source"]
