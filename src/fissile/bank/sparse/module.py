"""A network out of a stack, as an ordinary module: only what is alive stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError
from fissile._common.shapes import Float
from fissile.bank.sparse.stack import Stack
from fissile.layers import MaskedLinear

__all__ = ["SparseNet", "module_of"]


class SparseNet(nn.Module):
    """Sparse layers side by side: through hidden neurons, directly, or both.

    >>> net = SparseNet(None, None, MaskedLinear(torch.ones(1, 2), torch.tensor([[True, False]])))
    >>> net(torch.tensor([[1.0, 2.0]]))
    tensor([[1.]], grad_fn=...)

    Args:
        hidden: from the inputs to the hidden neurons; with a bias they are ReLUs, without one they
            are linear.
        second: from there to the outputs, with their bias.
        direct: from the inputs to the outputs; the bias is here where nothing is hidden.
    """

    hidden: MaskedLinear | None
    second: MaskedLinear | None
    direct: MaskedLinear | None

    def __init__(
        self,
        hidden: MaskedLinear | None,
        second: MaskedLinear | None,
        direct: MaskedLinear | None,
    ) -> None:
        super().__init__()
        self.hidden, self.second, self.direct = hidden, second, direct
        _check(hidden, second, direct)

    @classmethod
    def empty(cls, shapes: Mapping[str, Sequence[int]]) -> SparseNet:
        """Make a network of ReLUs without weights, to be filled, from its weights' shapes.

        >>> SparseNet.empty({"hidden.weight": (16, 64), "second.weight": (10, 16)})
        """
        alone = "hidden.weight" not in shapes
        return cls(
            _empty("hidden", shapes), _empty("second", shapes), _empty("direct", shapes, bias=alone)
        )

    @property
    def inputs(self) -> int:
        """How many features go in."""
        layer = self.hidden or self.direct
        assert layer is not None
        return layer.in_features

    @property
    def outputs(self) -> int:
        """How many logits come out."""
        layer = self.second or self.direct
        assert layer is not None
        return layer.out_features

    @property
    def neurons(self) -> int:
        """How many hidden neurons there are."""
        return 0 if self.hidden is None else self.hidden.out_features

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Return the logits."""
        if self.hidden is None or self.second is None:
            assert self.direct is not None
            logits: Tensor = self.direct(x)
            return logits
        said = self.hidden(x)
        logits = self.second(said if self.hidden.bias is None else said.relu())
        return logits if self.direct is None else logits + self.direct(x)


@torch.no_grad()
def module_of(stack: Stack, index: int, scale: float = 1.0) -> SparseNet:
    """Take one network out of a stack, on the CPU, without its dead neurons.

    >>> [(stack, places)] = train([plan], seeds, x / 255, y, outputs=10)
    >>> module_of(stack, 0, scale=255)(x)  # as it was trained on x / 255

    Networks of a seed lie side by side: ``index`` is the seed's place times the number of plans,
    plus the plan's. Inputs that were divided by ``scale`` are now taken as they are.
    """
    weights = {name: one[index].cpu() for name, one in stack.weights.items()}
    masks = {name: one[index].cpu() for name, one in stack.masks.items()}
    out, hidden, second = weights["out"], None, None
    if "first" in masks:
        sees, bias = masks["first"].any(-1), weights.get("bias")
        if bias is not None:  # a neuron that sees nothing says the same of everything
            out = out + (weights["second"] * masks["second"])[:, ~sees] @ bias[~sees].relu()
        on = sees & masks["second"].any(-2)
        if bool(on.any()):
            first = _divided(weights["first"][on], scale)
            hidden = MaskedLinear(first, masks["first"][on], None if bias is None else bias[on])
            second = MaskedLinear(weights["second"][:, on], masks["second"][:, on], out)
    direct = None
    if "direct" in masks or hidden is None:
        nothing = torch.zeros(stack.outputs, stack.inputs)
        weight = _divided(weights.get("direct", nothing), scale)
        direct = MaskedLinear(
            weight, masks.get("direct", nothing.bool()), out if second is None else None
        )
    return SparseNet(hidden, second, direct)


def _divided(weight: Tensor, scale: float) -> Tensor:
    return (weight.double() / scale).to(weight.dtype)


def _empty(
    name: str, shapes: Mapping[str, Sequence[int]], *, bias: bool = True
) -> MaskedLinear | None:
    if f"{name}.weight" not in shapes:
        return None
    shape = shapes[f"{name}.weight"]
    if len(shape) != 2 or min(shape) < 1:
        raise FissileError(f"{name}.weight is no matrix, but of shape {tuple(shape)}")
    weight = torch.zeros(*shape)
    return MaskedLinear(weight, weight.bool(), torch.zeros(shape[0]) if bias else None)


def _check(
    hidden: MaskedLinear | None, second: MaskedLinear | None, direct: MaskedLinear | None
) -> None:
    if (hidden is None) != (second is None) or (hidden is None and direct is None):
        raise FissileError("a network needs hidden and second, or direct, or all three")
    if hidden is None or second is None:
        return
    fits = hidden.out_features == second.in_features
    if direct is not None:
        sizes = hidden.in_features, second.out_features
        fits = fits and sizes == (direct.in_features, direct.out_features)
    if not fits:
        raise FissileError("the layers do not fit each other")
