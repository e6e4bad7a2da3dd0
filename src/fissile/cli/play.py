"""The command ``fissile play``: the page that trains whole experiments as its sliders move."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from fissile._common.errors import needs

EPILOG = "Examples: fissile play · fissile play --port 9000 --no-browser"


def play(
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="By default 8642, or a free port if that is taken."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Who may connect: by default this machine alone.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Open a page in the browser: move a slider, and ten trials are trained anew.

    Everything runs on this machine. The address holds a token: who has it can use the page.
    """
    for module in ("starlette", "uvicorn", "wsproto"):
        needs(module, "play")
    from fissile.play.server import LOOPBACK, serve

    if host not in LOOPBACK:
        typer.echo(
            f"warning: --host {host} lets other machines connect, unencrypted; whoever reads the "
            "token can keep this machine busy",
            err=True,
        )

    def ready(address: str) -> None:
        typer.echo(f"The page is at {address}\nCtrl-C ends it.")
        if browser:
            webbrowser.open(address)

    try:
        serve(host, port, ready)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
