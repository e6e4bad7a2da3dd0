"""One step of Adam on weights that may not all exist, for many networks with rates of their own.

Three times: in plain PyTorch; with its fused kernel, network by network, five times as fast on a
processor; and as one Triton kernel, which reads and writes everything once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fissile._common.shapes import Bool, Float

__all__ = ["Moments", "Rates", "adam", "unbiased"]

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


class Moments(NamedTuple):
    """Adam's running means of a gradient and of its square."""

    mean: Tensor
    square: Tensor


class Rates(NamedTuple):
    """What a step needs of every network, and how far Adam's means are from being unbiased."""

    lr: Float[Tensor, " networks"]
    decay: Float[Tensor, " networks"]
    l1: Float[Tensor, " networks"]
    unbias: Float[Tensor, " 2"]
    step: Float[Tensor, " 1"] | None = None  # how many were made, this one among them


def unbiased(steps: int) -> Float[Tensor, "steps 2"]:
    """Return, for every step, what Adam's two means must be divided by, since they began at zero.

    >>> unbiased(1)
    tensor([[0.1000, 0.0010]])
    """
    number = torch.arange(1, steps + 1, dtype=torch.float64).unsqueeze(-1)
    return (1 - torch.tensor((_BETA1, _BETA2), dtype=torch.float64) ** number).float()


@torch.no_grad()
def adam(
    weight: Float[Tensor, "networks ..."],
    gradient: Float[Tensor, "networks ..."],
    moments: Moments,
    mask: Bool[Tensor, "networks ..."] | None,
    rates: Rates,
    *,
    l1: bool = False,
) -> None:
    """Make one step in place; a weight outside the mask stays zero, and so do its moments.

    ``l1`` shrinks what is left towards zero in Adam's own metric, a proximal step.
    """
    if weight.is_cuda:
        _on_gpu(weight, gradient, moments, mask, rates, l1)
    elif rates.step is not None and not l1 and weight.dtype == torch.float32:
        _fused(weight, gradient, moments, mask, rates, rates.step)
    else:
        _plain(weight, gradient, moments, mask, rates, l1)


def _plain(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    mask: Tensor | None,
    rates: Rates,
    l1: bool,
) -> None:
    lr, decay, penalty = (one.view(-1, *[1] * (weight.ndim - 1)) for one in rates[:3])
    if mask is not None:
        gradient = torch.where(mask, gradient, 0)
    moments.mean.lerp_(gradient, 1 - _BETA1)
    moments.square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
    root = (moments.square / rates.unbias[1]).sqrt_().add_(_EPS)
    weight.mul_(1 - lr * decay)
    weight.sub_(moments.mean / root * (lr / rates.unbias[0]))
    if l1:
        weight.copy_(weight.sign() * (weight.abs() - lr * penalty / root).clamp(min=0))
    if mask is not None:
        weight.masked_fill_(~mask, 0)


def _fused(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    mask: Tensor | None,
    rates: Rates,
    step: Tensor,
) -> None:
    """Let PyTorch's kernel make the step; where gradient and moments are zero it moves nothing."""
    if mask is not None:
        gradient = torch.where(mask, gradient, 0)
    for network, (lr, decay) in enumerate(
        zip(rates.lr.tolist(), rates.decay.tolist(), strict=True)
    ):
        torch._fused_adamw_(
            [weight[network]], [gradient[network]], [moments.mean[network]],
            [moments.square[network]], [], [step],
            lr=lr, beta1=_BETA1, beta2=_BETA2, weight_decay=decay, eps=_EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        weight, gradient, mean, square, mask, lr, decay, penalty, unbias, per, total,
        MASKED: tl.constexpr, L1: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < total
        network = at // per
        rate = tl.load(lr + network, here, 0.0)
        w = tl.load(weight + at, here, 0.0)
        g = tl.load(gradient + at, here, 0.0)
        if MASKED:
            on = tl.load(mask + at, here, 0) != 0
            g = tl.where(on, g, 0.0)
        m = tl.load(mean + at, here, 0.0)
        v = tl.load(square + at, here, 0.0)
        m = m + 0.1 * (g - m)
        v = 0.999 * v + 0.001 * g * g
        root = tl.sqrt_rn(v / tl.load(unbias + 1)) + 1e-8
        w = w * (1 - rate * tl.load(decay + network, here, 0.0))
        w = w - m / root * (rate / tl.load(unbias))
        if L1:
            left = tl.abs(w) - rate * tl.load(penalty + network, here, 0.0) / root
            w = tl.where(left > 0, tl.where(w > 0, left, -left), 0.0)
        if MASKED:
            w = tl.where(on, w, 0.0)
        tl.store(weight + at, w, here)
        tl.store(mean + at, m, here)
        tl.store(square + at, v, here)

    return kernel


def _on_gpu(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    mask: Tensor | None,
    rates: Rates,
    l1: bool,
) -> None:
    total = weight.numel()
    block = 1024
    launch: Callable[..., None] = _kernel()[(-(-total // block),)]
    launch(
        weight, gradient.contiguous(), *moments, weight if mask is None else mask.view(torch.uint8),
        *rates[:4], total // len(weight), total, mask is not None, l1, block,
    )  # fmt: skip
