"""Trials of a user's own function, for claims that have nothing to do with the networks here.

>>> def trial(settings, seed):
...     return {"loss": fitted(settings["width"], settings["arm"] == "sparse", seed)}
>>> Scale(5, trials_of(trial, arm=("dense", "sparse"), width=(4, 8)))

The function stands in a file that is given to the command line. It gets the settings of its cell
and the number of its trial as a seed, and returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fissile._common.errors import FissileError
from fissile.lab.source import code_of, executed, pointing
from fissile.lab.trial import FunctionTrial, Value

Function = Callable[[dict[str, Any], int], Mapping[str, Any]]

_FUNCTIONS: dict[tuple[str, str], Function] = {}  # by name and code


def call(work: FunctionTrial) -> dict[str, float]:
    """Call a trial's function and return its numbers."""
    function = _FUNCTIONS.get((work.function, work.code))
    if function is None:
        raise FissileError(f"{work.function} is in a file that was not given; give its path")
    about = ", ".join(f"{name}={value!r}" for name, value in work.settings)
    doing = f"{work.function} with {about or 'no settings'}, seed {work.number}: "
    with pointing(function.__code__.co_filename, doing=doing), torch.random.fork_rng([]):
        torch.manual_seed(work.number)
        found = function(dict(work.settings), work.number)
        if not isinstance(found, Mapping) or not found:
            raise FissileError(f"it returned {found!r}; return a dict of names and numbers")
        if taken := sorted(set(found) & set(work.columns())):
            raise FissileError(f"{taken[0]!r} is a setting; give the number another name")
        numbers = {str(name): float(_plain(value)) for name, value in found.items()}
        if wrong := [name for name, value in numbers.items() if not isfinite(value)]:
            raise FissileError(f"{wrong[0]!r} is {numbers[wrong[0]]}; return finite numbers")
        return numbers


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


def file_of(work: FunctionTrial) -> str | None:
    """Return the file of a trial's function, if it was given to this process."""
    function = _FUNCTIONS.get((work.function, work.code))
    return function and function.__code__.co_filename


def revived(file: str | None, name: str, code: str, *rest: Any) -> FunctionTrial:
    """Return a trial in another process, which reads the function's file first."""
    if file is not None and (name, code) not in _FUNCTIONS:
        trials_of(getattr(executed(file), name))
        if (name, code) not in _FUNCTIONS:
            raise FissileError(f"{file} has changed since this run began; run again")
    return FunctionTrial(name, code, *rest)
