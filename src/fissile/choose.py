"""Which of the places found in a model shall be expanded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fissile.errors import FissileError
from fissile.surgery.facts import wrapped_in
from fissile.surgery.place import Discovery, Place, Refusal

__all__ = ["Where", "choose", "refuse_wrapped"]

#: A name, a glob such as ``"encoder.*.mlp"``, several of those, or a function of the place.
Where = str | Sequence[str] | Callable[[Place], bool]

_SHOWN = 3


def choose(found: Discovery, where: Where | None) -> list[Place]:
    """Return the places to expand, in the order data flows, none with a layer of another.

    >>> choose(discover(MLP([32, 8, 8, 8, 10])), None)  # hidden layers 1 and 3
    """
    if not found.places:
        raise FissileError(f"nothing to expand{_reasons(found.refusals)}")
    named = found.places if where is None else _named(found, where)
    chosen: list[Place] = []
    spent: set[str] = set()
    for place in named:
        if spent.isdisjoint(place.layers):
            chosen.append(place)
            spent.update(place.layers)
    return chosen


def _named(found: Discovery, where: Where) -> list[Place]:
    if callable(where):
        named = [place for place in found.places if where(place)]
        if not named:
            raise FissileError(f"where chose none of {_names(found.places)}")
        return named
    patterns = [where] if isinstance(where, str) else where
    if (
        not isinstance(patterns, Sequence)
        or not patterns
        or not all(isinstance(pattern, str) for pattern in patterns)
    ):
        raise FissileError(
            f"where={where!r} is neither a name, nor a list of names, nor a function of a place"
        )
    for pattern in patterns:
        if not any(_matches(place.firsts, pattern) for place in found.places):
            refused = [one for one in found.refusals if _matches([one.name], pattern)]
            raise FissileError(
                f"where={pattern!r} matches no place that can be expanded{_reasons(refused)}; "
                f"there are {_names(found.places)}"
            )
    return [
        place
        for place in found.places
        if any(_matches(place.firsts, pattern) for pattern in patterns)
    ]


def _matches(names: Iterable[str], pattern: str) -> bool:
    """Tell whether a pattern names one of the layers or a module above one."""
    for name in names:
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatchcase(one, pattern) for one in above):
            return True
    return False


def _names(places: Sequence[Place]) -> str:
    names = [repr(place.name) for place in places]
    more = f" and {len(names) - 2 * _SHOWN} more" if len(names) > 2 * _SHOWN else ""
    return ", ".join(names[: 2 * _SHOWN]) + more


def _reasons(refusals: Sequence[Refusal]) -> str:
    """Say why the first few layers were refused."""
    if not refusals:
        return ""
    shown = "; ".join(f"{one.name!r}: {one.reason}" for one in refusals[:_SHOWN])
    more = len(refusals) - _SHOWN
    return f" ({shown}{f'; and {more} more' if more > 0 else ''})"


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is spread over processes or compiled: its wrapper holds its tensors."""
    if not isinstance(model, nn.Module):
        raise FissileError(f"a model is an nn.Module, not a {type(model).__name__}")
    if why := wrapped_in(model):
        raise FissileError(f"{why}, then wrap the expanded model")
