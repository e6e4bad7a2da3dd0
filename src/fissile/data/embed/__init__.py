"""Features from a frozen encoder: images or texts in, a features file out."""

from __future__ import annotations

from fissile.data.embed.encoders import Encoder, encoder
from fissile.data.embed.run import embed
from fissile.data.embed.sources import Source, source

__all__ = ["Encoder", "Source", "embed", "encoder", "source"]
