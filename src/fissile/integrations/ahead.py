"""What can be said of an expansion before the run in the middle of which it will happen."""

from __future__ import annotations

from torch import nn

from fissile.choose import Where, choose
from fissile.errors import FissileError
from fissile.pattern import check_alpha
from fissile.surgery.discover import discover

__all__ = ["check_places"]


def check_places(model: nn.Module, alpha: int, where: Where | None) -> None:
    """Refuse now what :func:`fissile.expand` would refuse hours later.

    >>> check_places(MLP([32, 8, 1]), 64, None)
    Traceback (most recent call last):
    fissile.errors.FissileError: layer 'layers.0': alpha=64 is larger than the fan-in of 32...
    """
    for place in choose(discover(model), where):
        try:
            check_alpha(alpha, place.inputs)
        except FissileError as error:
            raise FissileError(f"layer {place.name!r}: {error}") from None
