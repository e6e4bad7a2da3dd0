"""Packed layers on the device they are on: the kernel that is there, or plain PyTorch."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import functional

from fissile._common.errors import FissileError
from fissile._common.shapes import Float, Int
from fissile.packed.bits import MANTISSA, owner_bits
from fissile.packed.format import masked_dense, partitioned_dense

#: What may follow a packed layer in the same kernel.
Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
#: The kernels tell up to 2**3 children apart; more go through plain PyTorch.
MOST_BITS = 3


def partitioned_linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "parents inputs"],
    planes: Int[Tensor, "bits parents bytes"] | None, bias: Float[Tensor, " children"] | None,
    alpha: int, activation: Activation,
) -> Float[Tensor, "*batch children"]:  # fmt: skip
    """Apply a packed partitioned layer and an activation to a batch of any shape."""
    flat, shape, dtype = ready(x, weight, bias, weight.shape[1], alpha * weight.shape[0])
    if flat.numel() == 0:
        return flat.new_empty(shape, dtype=dtype)
    how = _partitioned_op if is_odd(flat) or flat.is_meta else _partitioned
    return _shaped(how(flat, weight, planes, bias, alpha, activation), shape, dtype)


def masked_linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, " stored"],
    live: Int[Tensor, "outputs bytes"], start: Int[Tensor, "outputs blocks"],
    bias: Float[Tensor, " outputs"] | None, group: int, inputs: int, activation: Activation,
) -> Float[Tensor, "*batch outputs"]:  # fmt: skip
    """Apply a packed masked layer and an activation to a batch of any shape.

    ``weight`` has the stored groups, row after row, ``live`` a bit for every group, and ``start``
    the number of groups stored before every 256th of a row.
    """
    flat, shape, dtype = ready(x, weight, bias, inputs, len(live))
    if flat.numel() == 0:
        return flat.new_empty(shape, dtype=dtype)
    how = _masked_op if is_odd(flat) or flat.is_meta else _masked
    return _shaped(how(flat, weight, live, start, bias, group, activation), shape, dtype)


def ready(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int, outputs: int
) -> tuple[Tensor, tuple[int, ...], torch.dtype]:
    """Return the batch as a matrix the kernels take, and the shape and dtype of the result."""
    refuse_gradients(x, weight, bias)
    if x.shape[-1:] != (inputs,):
        raise FissileError(f"the layer takes {inputs} inputs, the batch has {tuple(x.shape)}")
    if x.device != weight.device:
        raise FissileError(f"the batch is on {x.device}, the packed layer on {weight.device}")
    dtype = weight.dtype
    if _autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(weight.dtype)
    elif x.dtype is not dtype:
        raise FissileError(f"the batch is {x.dtype}, the packed layer {dtype}; cast one of them")
    if x.ndim == 2 and x.is_contiguous():
        return x, (x.shape[0], outputs), dtype
    shape = (*x.shape[:-1], outputs)
    return x.reshape(math.prod(shape[:-1]), inputs).contiguous(), shape, dtype


def _shaped(y: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a result in its shape and dtype; an empty cast takes longer than the check."""
    y = y if y.dtype is dtype else y.to(dtype)
    return y if len(shape) == 2 else y.view(shape)


def is_traced() -> bool:
    """Return whether PyTorch is tracing this call, to compile or to export it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_odd(x: Tensor) -> bool:
    """Return whether x is traced, wrapped or otherwise lacks plain storage.

    A kernel would read at its address; PyTorch's operators know what to do with it.
    """
    return (
        is_traced()
        or type(x) not in (Tensor, nn.Parameter)
        or is_functorch_wrapped_tensor(x)
        or x.is_neg()
        or x._is_zerotensor()
    )


def refuse_gradients(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise an error if gradients are asked for, which packed layers do not have."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise FissileError("a packed layer has no forward-mode gradients; fissile.unpack it")
    if not torch.is_grad_enabled():
        return
    if x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
        raise FissileError(
            "a packed layer has no gradients: call it under torch.no_grad(), or fissile.unpack it"
        )


def _autocasts(x: Tensor) -> bool:
    """Return whether autocast would cast x for a plain layer; it leaves out float64."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype in MANTISSA


def few_children(alpha: int) -> bool:
    """Return whether the kernels take alpha children: 2 to 8."""
    return 0 < owner_bits(alpha) <= MOST_BITS


@functools.cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the kernels for a device; None where plain PyTorch is all there is."""
    if device.type == "cpu":
        from fissile.packed import cpu

        return cpu if cpu.can_run() else None
    from fissile.packed import gpu

    if not gpu.can_run(device):
        return None
    from fissile.packed.gpu import launch

    return launch


def _partitioned(
    x: Tensor, weight: Tensor, planes: Tensor | None, bias: Tensor | None, alpha: int,
    activation: str,
) -> Tensor:  # fmt: skip
    x = x.contiguous()  # an operator may be given anything
    kernels = kernels_for(x.device) if few_children(alpha) else None
    bits, plane = owner_bits(alpha), planes is not None
    if kernels is not None and kernels.takes(len(x), weight.dtype, bits, planes=plane):
        y: Tensor = kernels.partitioned_linear(x, weight, planes, bias, alpha, activation)
        return y
    if kernels is None or x.is_cpu:
        wide = partitioned_dense(weight, planes, alpha)
    else:
        wide = kernels.partitioned_written(weight, planes, alpha)
    return activated(functional.linear(x, wide, bias), activation)


def _masked(
    x: Tensor, weight: Tensor, live: Tensor, start: Tensor, bias: Tensor | None, group: int,
    activation: str,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    kernels = kernels_for(x.device)
    if kernels is not None and kernels.takes(len(x), weight.dtype, None, group=group):
        y: Tensor = kernels.masked_linear(x, weight, live, start, bias, group, activation)
        return y
    if kernels is None or x.is_cpu:
        wide = masked_dense(weight, live, group, x.shape[-1])
    else:
        wide = kernels.masked_written(weight, live, start, x.shape[-1], group)
    return activated(functional.linear(x, wide, bias), activation)


def activated(y: Tensor, activation: str) -> Tensor:
    """Apply an activation by its name."""
    if activation == "none":
        return y
    if activation == "relu":
        return y.relu()
    if activation == "silu":
        return functional.silu(y)
    return functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


# For torch.compile the kernels are opaque operators, whatever is behind them.
_partitioned_op = torch.library.custom_op(
    "fissile::partitioned_linear", _partitioned, mutates_args=()
)
_masked_op = torch.library.custom_op("fissile::masked_linear", _masked, mutates_args=())


@_partitioned_op.register_fake
def _(x: Tensor, weight: Tensor, planes: object, bias: object, alpha: int, act: str) -> Tensor:
    return x.new_empty(len(x), alpha * len(weight))


@_masked_op.register_fake
def _(x: Tensor, weight: Tensor, live: Tensor, *_: object) -> Tensor:
    return x.new_empty(len(x), len(live))
