"""The command ``fissile``: the lab and its studies, the data they need, models for inference."""

from __future__ import annotations

from typing import Any

from fissile._common.errors import needs


def __getattr__(name: str) -> Any:
    """Import the command when it is asked for: without its extra, that is one clear error."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check()
    from fissile.cli.lab import app

    return app


def check() -> None:
    """Raise one clear error where a package of the extra ``lab`` is missing."""
    for module in ("typer", "rich", "pandas", "scipy", "matplotlib", "numba"):
        needs(module, "lab")
