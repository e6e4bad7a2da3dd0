"""A sequence of packed layers in as few passes as there need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as everywhere

from fissile.packed.block import Block
from fissile.packed.dispatch import is_traced
from fissile.packed.layers import PackedLinear, PackedMaskedLinear, PackedPartitionedLinear
from fissile.packed.plain import Activation

__all__ = ["PackedSequential"]


class _Step(NamedTuple):
    """Modules that are one call: a layer with its activation, or such a layer and the next."""

    module: nn.Module
    activation: Activation = "none"
    second: PackedMaskedLinear | None = None


class PackedSequential(nn.Sequential):
    """An ``nn.Sequential`` whose activations are applied where the layer before them writes.

    On a CPU, a partitioned layer, an activation and a masked layer are one call. The modules, their
    names and their results are those of the sequence it stands for.
    """

    _plan: tuple[list[tuple[nn.Module, bool]], list[Callable[[Any], Any]]] | None = None

    def forward(self, input: Any) -> Any:
        """Pass the input through all modules."""
        modules = tuple(self._modules.values())
        # A compiler fuses by itself; hooks, and a forward of one's own, want to see what passes.
        if is_traced() or _all_watched() or any(map(_is_watched, modules)):
            return super().forward(input)  # type: ignore[no-untyped-call]
        # Dropout may be switched on by itself, to draw several answers.
        now = [(module, module.training) for module in modules]
        if self._plan is None or self._plan[0] != now:
            self._plan = now, [_call_of(step) for step in _steps(modules)]
        for call in self._plan[1]:
            input = call(input)
        return input

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan behind: a copy makes its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_plan"}


def _all_watched() -> bool:
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def _steps(modules: Sequence[nn.Module]) -> list[_Step]:
    steps: list[_Step] = []
    for module in modules:
        last = steps[-1] if steps else _Step(nn.Identity())
        follows = isinstance(last.module, PackedLinear) and last.second is None
        known = _name_of(module)
        if _does_nothing(module):
            continue
        if known is not None and follows and last.activation == "none":
            steps[-1] = last._replace(activation=known)
        elif isinstance(module, PackedMaskedLinear) and follows and _fit(last.module, module):
            steps[-1] = last._replace(second=module)
        else:
            steps.append(_Step(module))
    return steps


def _fit(first: nn.Module, second: PackedMaskedLinear) -> bool:
    if not isinstance(first, PackedPartitionedLinear):
        return False
    return first.out_features == second.in_features


def _call_of(step: _Step) -> Callable[[Any], Any]:
    """Return what a step calls."""
    if step.second is not None:
        assert isinstance(step.module, PackedPartitionedLinear)
        return Block(step.module, step.activation, step.second)
    if isinstance(step.module, PackedLinear):
        return partial(step.module.activated, activation=step.activation)
    return step.module


def _does_nothing(module: nn.Module) -> bool:
    """Tell what a packed model, which is never in training, need not call."""
    dropout = type(module) in (nn.Dropout, nn.AlphaDropout) and not module.training
    return dropout or type(module) is nn.Identity


def _name_of(module: nn.Module) -> Activation | None:
    """Return the name under which the kernels know an activation."""
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return None
