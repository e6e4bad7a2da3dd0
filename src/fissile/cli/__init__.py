"""The command ``fissile``: the lab and its studies, the data they need."""

from __future__ import annotations

from fissile.cli.lab import app

__all__ = ["app"]
