"""A sequence of packed layers in as few calls as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as everywhere

from fissile.packed import dispatch
from fissile.packed.dispatch import Activation
from fissile.packed.layers import (
    InferenceOnly,
    PackedLinear,
    PackedMaskedLinear,
    PackedPartitionedLinear,
)


class _Ready(NamedTuple):
    """Tensors, their addresses and sizes when last looked at, and the call prepared for them."""

    held: tuple[Tensor | None, ...]
    looks: list[Callable[[], int]]
    seen: list[int]
    few: tuple[Callable[[Tensor, int], Tensor], int] | None


class Block:
    """A partitioned layer, an activation and the masked layer that reads it."""

    def __init__(
        self, first: PackedPartitionedLinear, activation: Activation, second: PackedMaskedLinear
    ) -> None:
        self.first, self.activation, self.second = first, activation, second
        self._ready = _Ready((None,), [], [-1], None)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply all of it to a batch of any shape."""
        ready = self._prepare()
        if ready.few is not None and self._is_plain(x, ready):
            call, most = ready.few
            rows = x.numel() // self.first.in_features
            if 1 <= rows <= most:
                return call(x, rows)
        return self.second.activated(self.first.activated(x, self.activation), "none")

    def _prepare(self) -> _Ready:
        """Return what is ready for the tensors there are now."""
        mine, its, last = self.first, self.second, self._ready
        own, others, bits = mine._parameters, its._parameters, its._buffers
        held = (
            own["weight"], own["bias"], mine._buffers["planes"],
            others["weight"], others["bias"], bits["live"], bits["start"],
        )  # fmt: skip
        if all(map(is_, held, last.held)) and last.seen == [look() for look in last.looks]:
            return last
        kernels, few = dispatch.kernels_for(mine.weight.device), None
        alike = its.weight.device == mine.weight.device and dispatch.few_children(mine.alpha)
        if alike and hasattr(kernels, "block_for_few"):
            few = kernels.block_for_few(  # type: ignore[union-attr]
                mine.weight, mine.planes, mine.bias, mine.alpha, self.activation,
                its.weight, its.live, its.start, its.bias, its.group,
            )  # fmt: skip
        looks = [look for t in held if t is not None for look in (t.data_ptr, t.numel)]
        # At once: another thread sees all of it or nothing.
        self._ready = _Ready(held, looks, [look() for look in looks], few)
        return self._ready

    def _is_plain(self, x: Tensor, ready: _Ready) -> bool:
        """Return whether a batch needs no cast, no copy and no gradients."""
        return (
            not dispatch.is_odd(x)
            and x.dtype is torch.float32
            and x.is_cpu
            and x.ndim > 0
            and x.shape[-1] == self.first.in_features
            and x.is_contiguous()
            and not torch.is_autocast_enabled("cpu")
            and forward_ad._current_level < 0
            and not (
                torch.is_grad_enabled()
                and any(t is not None and t.requires_grad for t in (x, *ready.held))
            )
        )


class PackedSequential(InferenceOnly, nn.Sequential):
    """An ``nn.Sequential`` whose activations are applied where the layer before them writes.

    On a CPU, a partitioned layer, an activation and a masked layer are one call. The modules, their
    names and their results are those of the sequence it stands for.
    """

    _plan: tuple[list[tuple[nn.Module, bool]], list[Callable[[Any], Any]]] | None = None

    def forward(self, input: Any) -> Any:
        """Pass the input through all modules."""
        modules = tuple(self._modules.values())
        # A compiler fuses by itself; hooks, and a forward of one's own, want to see what passes.
        watched = everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks
        if watched or dispatch.is_traced() or any(map(_is_watched, modules)):
            return super().forward(input)  # type: ignore[no-untyped-call]
        # Dropout may be switched on by itself, to draw several answers.
        now = [(module, module.training) for module in modules]
        if self._plan is None or self._plan[0] != now:
            self._plan = now, _calls(modules)
        for call in self._plan[1]:
            input = call(input)
        return input

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan behind: a copy makes its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_plan"}


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def _calls(modules: Sequence[nn.Module]) -> list[Callable[[Any], Any]]:
    """Return what to call one after another: modules, or several that go in one call."""
    rest = [module for module in modules if not _does_nothing(module)]
    calls: list[Callable[[Any], Any]] = []
    while rest:
        module, activation = rest.pop(0), None
        if not isinstance(module, PackedLinear):
            calls.append(module)
            continue
        if rest and (activation := _name_of(rest[0])) is not None:
            del rest[0]
        second = rest[0] if rest else None
        if (
            isinstance(module, PackedPartitionedLinear)
            and isinstance(second, PackedMaskedLinear)
            and module.out_features == second.in_features
        ):
            del rest[0]
            calls.append(Block(module, activation or "none", second))
        else:
            calls.append(partial(module.activated, activation=activation or "none"))
    return calls


def _does_nothing(module: nn.Module) -> bool:
    """Return whether a module does nothing in evaluation, and need not be called."""
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
