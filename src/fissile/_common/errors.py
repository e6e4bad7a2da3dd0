"""The errors fissile raises on purpose: each says what was wrong and what to do."""

from __future__ import annotations

import importlib.util
import operator
from pathlib import Path
from typing import SupportsIndex

import torch


class FissileError(ValueError):
    """An argument cannot be right; the message says what is wrong and what to do.

    >>> try:
    ...     whole("alpha", 0, least=1)
    ... except FissileError as error:
    ...     print(error)
    alpha=0 is not a whole number of at least 1; give one
    """


class FileError(FissileError):
    """A file is torn, foreign or hostile, or could not be written.

    >>> issubclass(FileError, FissileError)
    True
    """


def whole(name: str, value: SupportsIndex, *, least: int) -> int:
    """Return a whole number of at least ``least`` as an int, or say what is wrong with it.

    >>> whole("alpha", 2, least=1)
    2
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise FissileError(f"{name}={value!r} is not a whole number of at least {least}; give one")
    return number


def needs(module: str, extra: str) -> None:
    """Raise an error that says how to install an extra, where its package is missing.

    >>> needs("torch", "lab")

    In a clone, pip installs from there: no index may have the package.
    """
    if importlib.util.find_spec(module) is None:
        clone = Path(__file__).resolve().parents[3]
        where = f"-e '{clone}" if (clone / "pyproject.toml").exists() else "'fissile"
        raise FissileError(f"this needs {module}: pip install {where}[{extra}]'")


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that networks can be trained on, or raise an error that says why not.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise FissileError(f"cannot train on {str(device)!r} here: {reason}") from None
