"""Trials of a user's own function, for claims that have nothing to do with the networks here.

>>> def trial(settings, seed):
...     return {"loss": fitted(settings["width"], settings["arm"] == "sparse", seed)}
>>> Scale(5, trials_of(trial, arm=("dense", "sparse"), width=(4, 8)))

The function stands in a file that is given to the command line. It gets the settings of its cell
and the number of its trial as a seed, and returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch

from fissile._common.errors import FissileError, whole
from fissile.lab.key import Keyed
from fissile.lab.source import code_of, executed, pointing

Value = int | float | str | bool | None
Function = Callable[[dict[str, Any], int], Mapping[str, Any]]

_FUNCTIONS: dict[tuple[str, str], Function] = {}  # by name and code


@dataclass(frozen=True)
class FunctionTrial(Keyed):
    """One call of a user's function: its settings and its seed; :func:`trials_of` makes them."""

    kind: ClassVar[str] = "function"
    cost: ClassVar[float] = 1.0  # nobody knows how long it takes

    function: str
    code: str  # a hash of the function and what it uses
    settings: tuple[tuple[str, Value], ...]
    number: int = 0

    def __post_init__(self) -> None:
        whole("number", self.number, least=0)
        object.__setattr__(self, "settings", tuple(sorted(map(tuple, self.settings))))
        for name, value in self.settings:
            endless = isinstance(value, float) and not isfinite(value)
            if endless or not isinstance(value, Value) or name in ("trial", "function"):
                raise FissileError(f"{name}={value!r} is no setting; give numbers or words")

    def network(self) -> FunctionTrial:
        return self

    def batch_key(self) -> tuple[object, ...]:
        """Return what trials must share to be computed together."""
        return self.kind, self.function, self.code

    def changed(self, changes: Mapping[str, Any]) -> FunctionTrial:
        """Return the trial with other settings."""
        return replace(self, settings=tuple({**dict(self.settings), **changes}.items()))

    def columns(self) -> dict[str, object]:
        """Return the trial as a row of a table: what it is, without what came of it."""
        own = dict(self.settings)
        arm = own.pop("arm", self.function)
        return {**(own or {"function": self.function}), "arm": arm, "trial": self.number}

    def described(self) -> dict[str, object]:
        """Return the settings for a reader."""
        return dict(self.settings)

    def measures(self) -> dict[str, float]:
        """Call the function and return its numbers."""
        function = _FUNCTIONS.get((self.function, self.code))
        if function is None:
            raise FissileError(f"{self.function} is in a file that was not given; give its path")
        about = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        doing = f"{self.function} with {about or 'no settings'}, seed {self.number}: "
        with pointing(function.__code__.co_filename, doing=doing), torch.random.fork_rng([]):
            torch.manual_seed(self.number)
            found = function(dict(self.settings), self.number)
            if not isinstance(found, Mapping) or not found:
                raise FissileError(f"it returned {found!r}; return a dict of names and numbers")
            if taken := sorted(set(found) & set(self.columns())):
                raise FissileError(f"{taken[0]!r} is a setting; give the number another name")
            return {str(name): float(_plain(value)) for name, value in found.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the file's path along to a process that computes; no store ever holds it."""
        function = _FUNCTIONS.get((self.function, self.code))
        file = function and function.__code__.co_filename
        return _revived, (file, self.function, self.code, self.settings, self.number)


def trials_of(
    function: Function, **settings: Value | tuple[Value, ...]
) -> tuple[FunctionTrial, ...]:
    """Return a trial of a function for every combination of settings; ``arm`` names the arms.

    >>> len(trials_of(trial, arm=("dense", "sparse"), width=(4, 8), steps=100))
    4
    """
    name, file = function.__name__, Path(function.__code__.co_filename)
    if function.__qualname__ != name or not name.isidentifier() or not file.is_file():
        raise FissileError(f"{name} must be a function of its own in a file")
    code = code_of(file, name)
    _FUNCTIONS[name, code] = function
    values = [one if isinstance(one, tuple | list | range) else (one,) for one in settings.values()]
    cells = (tuple(zip(settings, each, strict=True)) for each in product(*values))
    return tuple(FunctionTrial(name, code, cell) for cell in cells)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _revived(file: str | None, name: str, code: str, *rest: Any) -> FunctionTrial:
    if file is not None and (name, code) not in _FUNCTIONS:
        trials_of(getattr(executed(file), name))
        if (name, code) not in _FUNCTIONS:
            raise FissileError(f"{file} has changed since this run began; run again")
    return FunctionTrial(name, code, *rest)
