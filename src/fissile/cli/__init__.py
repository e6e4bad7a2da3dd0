"""The command ``fissile``: the lab and its studies, the data they need."""

from __future__ import annotations

from fissile.cli import data, embed
from fissile.cli.lab import app

__all__ = ["app"]

app.add_typer(data.app, name="data")
app.command(help=embed.HELP, epilog=embed.EPILOG)(embed.embed)
