"""What belongs to single neurons: norms and slopes, widened when their neurons get children."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from fissile.layers.base import children_of

__all__ = ["NORMS", "Carry", "Rebuilt", "copied", "resize", "widened", "width_of"]

Carry = Callable[[Tensor], Tensor]

#: A new layer, and how tensors of each of its old parameters' shapes are carried to it.
Rebuilt = tuple[nn.Module, dict[str, Carry]]


#: Norms whose parameters belong to single neurons or channels, and are copied to the children.
NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm,
)  # fmt: skip


def copied(bias: Tensor | None, alpha: int = 1) -> Tensor | None:
    """Return a bias for the children of its neurons."""
    return None if bias is None else children_of(bias.detach(), alpha, -1)


def resize(module: nn.Module, width: int) -> None:
    """Note another width in a norm or a slope; its tensors are the caller's business."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = (width,)
    else:
        setattr(module, _width_name(module), width)


def widened(module: nn.Module, alpha: int) -> Rebuilt | None:
    """Copy what belongs to single neurons, parameters and running statistics, to the children.

    None stands for a module without any, which stays as it is.
    """
    width = width_of(module)
    if width is None:
        return None
    new = copy.deepcopy(module)
    how = {
        key: lambda tensor: children_of(tensor, alpha, -1)
        for key, _ in module.named_parameters(recurse=False)
    }
    for key, value in _per_neuron(module):
        wide = children_of(value.detach(), alpha, -1)
        setattr(new, key, nn.Parameter(wide) if key in how else wide)
    resize(new, width * alpha)
    return new, how


def width_of(module: nn.Module) -> int | None:
    """Return how many neurons a norm or a slope was made for; None for anything else."""
    if not isinstance(module, (*NORMS, nn.PReLU)):
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return int(module.normalized_shape[-1])
    width = int(getattr(module, _width_name(module)))
    # One slope for all neurons stays one.
    return None if isinstance(module, nn.PReLU) and width == 1 else width


def _width_name(module: nn.Module) -> str:
    if isinstance(module, nn.PReLU):
        return "num_parameters"
    return "num_channels" if isinstance(module, nn.GroupNorm) else "num_features"


def _per_neuron(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(key, value) for key, value in own if key != "num_batches_tracked"]
