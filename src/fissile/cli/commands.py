"""The commands in one application."""

from __future__ import annotations

from fissile.cli import data, embed, pack
from fissile.cli.lab import app
from fissile.cli.run import PLAN, plan

__all__ = ["app"]

app.command(epilog=PLAN)(plan)
app.add_typer(data.app, name="data")
app.command(help=embed.HELP, epilog=embed.EPILOG)(embed.embed)
app.command(epilog=pack.PACK)(pack.pack)
app.command(epilog=pack.UNPACK)(pack.unpack)
app.command(epilog=pack.BENCH)(pack.bench)
