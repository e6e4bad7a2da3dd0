"""Copies of a model to look at: with tensors that have no values, or numbers of 64 bits.

Whoever runs a copy's code does so under `random_numbers_apart`, so that the user's own random
numbers stay where they were.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, float64, nn
from torch.nn.parameter import is_lazy

from fissile.discovery.module_checks import widens

_WIDTHS = (
    "in_features", "out_features", "in_channels", "out_channels", "nx", "nf",
    "num_features", "num_channels",
)  # fmt: skip
_ALONE = threading.RLock()  # two threads would give each other's random numbers back


def meta_copy(model: nn.Module) -> tuple[nn.Module, set[str]]:
    """Copy a model with tensors that have a shape but no values, so that nothing can be harmed.

    Layers and norms are new objects under their names: code that calls them in another way, as
    from a helper that holds them, calls something that is not in the model, as it would after
    expansion. Beside the copy is a set: the names of layers of which code has asked for a width.
    """
    hollow = copied_with(model, _empty)
    asked: set[str] = set()
    fresh: dict[int, nn.Module] = {}
    for path, module in list(hollow.named_modules(remove_duplicate=False)):
        above, _, name = path.rpartition(".")
        if path and widens(module):
            if id(module) not in fresh:
                fresh[id(module)] = _watched(module, path, asked)
            hollow.get_submodule(above)._modules[name] = fresh[id(module)]
    return hollow, asked


def _watched(module: nn.Module, path: str, asked: set[str]) -> nn.Module:
    """Return another object with all a layer has, whose widths note that they were asked for."""
    kind = type(module)
    widths = {key: value for key in _WIDTHS if isinstance(value := vars(module).get(key), int)}

    def recording(width: int) -> property:
        def read(_: nn.Module) -> int:
            asked.add(path)
            return width

        return property(read)

    body: dict[str, Any] = {key: recording(width) for key, width in widths.items()}
    body["__module__"] = kind.__module__
    new: nn.Module = nn.Module.__new__(type(kind.__name__, (kind,), body))
    vars(new).update({key: value for key, value in vars(module).items() if key not in widths})
    return new


def copied_with(model: nn.Module, make: Callable[[Tensor], Tensor | None]) -> nn.Module:
    """Copy a model, with other tensors where its modules hold some; None leaves one to deepcopy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = (module._parameters, module._buffers, vars(module))
        for tensor in (value for values in held for value in values.values()):
            if isinstance(tensor, Tensor) and (new := make(tensor)) is not None:
                memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def _empty(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        return tensor
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def as_it_is(tensor: Tensor) -> Tensor | None:
    """Copy a plain tensor."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return _like(tensor, tensor.detach().clone()) if plain else None


def in_double(tensor: Tensor) -> Tensor | None:
    """Copy a plain tensor, real numbers as float64."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
    return _like(tensor, tensor.detach().to(float64, copy=True)) if plain else as_it_is(tensor)


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


@contextlib.contextmanager
def random_numbers_apart() -> Iterator[None]:
    """Let foreign code draw random numbers that start anew; give the user's own back after it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _ALONE, torch.random.fork_rng(devices=devices):
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        reseed()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def reseed(seed: int = 0) -> None:
    """Start all random numbers anew, so that code which skips layers by chance is predictable."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # torch.manual_seed would also seed devices not yet in use
        torch.cuda.manual_seed_all(seed)
