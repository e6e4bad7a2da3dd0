"""Starts the command ``fissile``: outside the package, whose import alone takes a second or two.

Ctrl-C during imports ends the process at once. Later the first one is a KeyboardInterrupt, so that
a run says what it has stored, and a second one ends the process at once: a store needs no goodbye.
"""

import os
import signal
import sys


def _end(*_: object) -> None:
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # progress bars hide the cursor
    os.write(2, f"{shown}Stopped.\n".encode())
    os._exit(130)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _end)
    from fissile.cli.__main__ import main as run

    try:
        run(ready=lambda: signal.signal(signal.SIGINT, _interrupt))
    finally:
        signal.signal(signal.SIGINT, _end)
