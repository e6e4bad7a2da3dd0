"""What a training step is made of in every trainer: the loss, Adam, and a CUDA graph of the whole.

Every network of a stack has its own rate. :func:`foreach_adam`, for the bank, divides the root of
the mean square by the root of its bias, as ``torch.optim.Adam`` does; :func:`masked_adam`, for
sparse networks, divides before the root. They round differently, and seeded results must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from fissile._common.shapes import Bool, Float, Int

#: Adam's constants, those of PyTorch and of the paper.
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
#: The logarithms of 0.9 and 0.999; that of the float 0.999 would be off in the last digits.
LOG_BETA1, LOG_BETA2 = math.log(BETA1), math.log1p(-0.001)

T = TypeVar("T")


# --- the loss


def network_losses(
    logits: Float[Tensor, "networks batch outputs"], y: Int[Tensor, "networks batch"]
) -> Float[Tensor, " networks"]:
    """Return every network's mean cross-entropy: binary for one logit, over classes for several."""
    if logits.shape[-1] == 1:
        logits, target = logits.squeeze(-1), y.to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    else:
        losses = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return losses.view(y.shape).mean(-1)


def logit_gradient(
    logits: Float[Tensor, "networks outputs batch"],
    targets: Float[Tensor, "seeds outputs batch"],
    smooth: Float[Tensor, " networks"],
) -> Float[Tensor, "networks outputs batch"]:
    """Return the gradient of the mean cross-entropy with respect to the logits.

    ``smooth`` is the share of each label that is spread evenly over the classes. The networks of a
    seed lie side by side and share its targets. One output is a logit of yes against no.
    """
    if logits.is_cuda and logits.shape[1] > 1:  # one launch: small networks wait for launches
        return _triton_logit_gradient(logits, targets, smooth)
    wanted = targets.repeat_interleave(len(logits) // len(targets), 0)
    spread, outputs = smooth.view(-1, 1, 1), logits.shape[1]
    wanted = wanted * (1 - spread) + spread / max(2, outputs)
    chances = logits.sigmoid() if outputs == 1 else logits.softmax(1)
    return (chances - wanted) / logits.shape[-1]


def _triton_logit_gradient(logits: Tensor, targets: Tensor, smooth: Tensor) -> Tensor:
    from fissile.bank.gpu.kernels import logit_gradient_kernel

    networks, outputs, batch = logits.shape
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    wide = 1 << (outputs - 1).bit_length()
    block = max(4, min(64, 4096 // wide))
    logit_gradient_kernel[(networks, -(-batch // block))](
        logits.contiguous(), targets.contiguous(), smooth, gradient, networks // len(targets),
        outputs, batch, wide, block,
    )  # fmt: skip
    return gradient


def guess(logits: Tensor, dim: int = -1) -> Int[Tensor, ...]:
    """Return the class of every sample; the outputs are along ``dim``."""
    return (logits.squeeze(dim) > 0).long() if logits.shape[dim] == 1 else logits.argmax(dim)


# --- Adam


def per_network(values: Float[Tensor, " networks"], like: Sequence[Tensor]) -> list[Tensor]:
    """Return a value of every network in the shape of each tensor, ready to multiply."""
    values = values.to(like[0].dtype)
    return [values.view(-1, *[1] * (tensor.ndim - 1)) for tensor in like]


@torch.no_grad()
def foreach_adam(
    parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]],
    lr: Float[Tensor, " networks"],
) -> None:  # fmt: skip
    """Make one step in place with every network's own rate, in few operations over all tensors."""
    torch._foreach_add_([state["step"] for state in states], 1)
    means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
    torch._foreach_lerp_(means, gradients, 1 - BETA1)
    torch._foreach_mul_(squares, BETA2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - BETA2)
    step = states[0]["step"].to(torch.float64)
    root = torch._foreach_sqrt(squares)
    torch._foreach_div_(root, per_network((1 - BETA2**step).sqrt(), parameters))
    torch._foreach_add_(root, EPS)
    change = torch._foreach_mul(means, per_network(-lr / (1 - BETA1**step), parameters))
    torch._foreach_addcdiv_(parameters, change, root)


class AdamMoments(NamedTuple):
    """Adam's running means of a gradient and of its square."""

    mean: Tensor
    square: Tensor


class Rates(NamedTuple):
    """What a step of sparse networks needs to know of every network, and of the step."""

    lr: Float[Tensor, " networks"]
    decay: Float[Tensor, " networks"]
    l1: Float[Tensor, " networks"]
    unbias: Float[Tensor, " 2"]  # a row of bias_corrections
    step: Float[Tensor, " 1"] | None = None  # the number of this step, from 1


def bias_corrections(steps: int) -> Float[Tensor, "steps 2"]:
    """Return what Adam's two means must be divided by at every step, as they began at zero."""
    number = torch.arange(1, steps + 1, dtype=torch.float64).unsqueeze(-1)
    return (1 - torch.tensor((BETA1, BETA2), dtype=torch.float64) ** number).float()


@torch.no_grad()
def masked_adam(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[AdamMoments],
    masks: Sequence[Bool[Tensor, "networks ..."] | None], rates: Rates, *, l1: bool = False,
) -> None:  # fmt: skip
    """Make one step in place; a weight outside its mask stays zero, and so do its moments.

    ``l1`` shrinks what is left towards zero in Adam's own metric, a proximal step.
    """
    one = weights[0]
    if not one.is_cuda and rates.step is not None and not l1 and one.dtype == torch.float32:
        _fused_adam(weights, gradients, moments, masks, rates)
        return
    step = _triton_adam if one.is_cuda else _torch_adam
    for weight, gradient, moment, mask in zip(weights, gradients, moments, masks, strict=True):
        step(weight, gradient, moment, mask, rates, l1)


def _torch_adam(
    weight: Tensor, gradient: Tensor, moments: AdamMoments, mask: Tensor | None, rates: Rates,
    l1: bool,
) -> None:  # fmt: skip
    lr, decay, penalty = (per_network(value, [weight])[0] for value in rates[:3])
    if mask is not None:
        gradient = torch.where(mask, gradient, 0)
    moments.mean.lerp_(gradient, 1 - BETA1)
    moments.square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    root = (moments.square / rates.unbias[1]).sqrt_().add_(EPS)
    weight.mul_(1 - lr * decay)
    weight.sub_(moments.mean / root * (lr / rates.unbias[0]))
    if l1:
        weight.copy_(weight.sign() * (weight.abs() - lr * penalty / root).clamp(min=0))
    if mask is not None:
        weight.masked_fill_(~mask, 0)


def _fused_adam(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[AdamMoments],
    masks: Sequence[Tensor | None], rates: Rates,
) -> None:  # fmt: skip
    """Make the step with PyTorch's fused kernel, network by network: five times as fast."""
    assert rates.step is not None
    pairs = zip(gradients, masks, strict=True)
    gradients = [one if mask is None else _within(one, mask) for one, mask in pairs]
    tensors = weights, gradients, [one.mean for one in moments], [one.square for one in moments]
    for network, (lr, decay) in enumerate(
        zip(rates.lr.tolist(), rates.decay.tolist(), strict=True)
    ):
        weight, gradient, mean, square = ([one[network] for one in each] for each in tensors)
        torch._fused_adamw_(
            weight, gradient, mean, square, [], [rates.step] * len(weight),
            lr=lr, beta1=BETA1, beta2=BETA2, weight_decay=decay, eps=EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip


def _within(gradient: Tensor, mask: Tensor) -> Tensor:
    """Return a gradient that is zero outside the mask: a fourth of the time of ``torch.where``."""
    return (gradient.view(torch.int32) & -mask.int()).view(torch.float32)


def _triton_adam(
    weight: Tensor, gradient: Tensor, moments: AdamMoments, mask: Tensor | None, rates: Rates,
    l1: bool,
) -> None:  # fmt: skip
    """Make the step in one kernel, which reads and writes everything once."""
    from fissile.bank.gpu.kernels import masked_adam_kernel

    total, block = weight.numel(), 1024
    masks = weight if mask is None else mask.view(torch.uint8)
    masked_adam_kernel[(-(-total // block),)](
        weight, gradient.contiguous(), *moments, masks, *rates[:4], total // len(weight), total,
        mask is not None, l1, block,
    )  # fmt: skip


# --- CUDA graphs


class Replay(Generic[T]):
    """A step that a GPU repeats: run as it is a few times, then recorded and launched as a whole.

    A step of small networks is some fifty small launches: waiting for them is most of its time.
    The first steps run on a side stream, as recording needs; they also compile the kernels.
    """

    def __init__(self, step: Callable[[], T], *, eager: int) -> None:
        self._step, self._eager = step, eager
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> T:
        """Make a step; what it returns after recording is the same tensor every time."""
        if self._eager > 0:
            self._eager -= 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = self._step()
            torch.cuda.current_stream().wait_stream(side)
            return result
        if self._graph is None:
            self._graph, self._result = captured(self._step)
        self._graph.replay()
        return self._result


def captured(
    step: Callable[[], T], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record a step as a CUDA graph without running it; return the graph and the step's result.

    With ``stream``, the step is recorded there while other streams go on. Otherwise everything
    stops, and unused memory is freed first.
    """
    graph = torch.cuda.CUDAGraph()
    if stream is None:
        with torch.cuda.graph(graph):
            return graph, step()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        result = step()
        graph.capture_end()
    return graph, result
