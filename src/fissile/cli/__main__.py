"""The command ``fissile``, also as ``python -m fissile.cli``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fissile._common.errors import FissileError, printable


def main(ready: Callable[[], object] = lambda: None) -> None:
    """Run the command line; an error of ours is one line and exit code 1, Ctrl-C is 130.

    ``ready`` is called once everything is imported.
    """
    try:
        from fissile.cli import app  # which says what is missing

        ready()
        app(prog_name="fissile")
    except FissileError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
