"""Functions and tensor methods that treat every neuron by itself, told from those that do not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional

__all__ = ["Role", "name_of", "role_of"]

#: Bends every number alone, lets it through, casts it, cuts in two, multiplies or divides, acts on
#: every channel alone.
Role = Literal["bend", "pass", "cast", "cut", "glu", "times", "ratio", "channels"]

_NAMES: dict[Role, str] = {
    "bend": """
        abs acos acosh asin asinh atan atanh celu ceil clamp clamp_max clamp_min clip copysign cos
        cosh elu eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge gelu gt hardshrink
        hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu log log10 log1p log2
        logical_and logical_not logical_or logit logsigmoid lt masked_fill maximum minimum mish
        nan_to_num ne pow prelu reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn
        sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink
        threshold trunc where xlogy floordiv mod and or not invert
    """,
    "pass": """
        add alpha_dropout clone contiguous dropout dropout1d dropout2d dropout3d
        feature_alpha_dropout feature_dropout iadd isub neg negative positive pos rand_like
        randn_like ones_like sub subtract zeros_like bfloat16 cpu cuda double float half
        requires_grad_ retain_grad
    """,
    "cast": "to type type_as",
    "times": "mul multiply imul",
    "ratio": "div divide truediv true_divide",
    "cut": "chunk split tensor_split split_with_sizes",
    "glu": "glu",
    "channels": """
        max_pool2d avg_pool2d lp_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate
    """,
}


def _tables() -> tuple[dict[Callable[..., Any], Role], dict[str, Role]]:
    """Look every name up among torch's functions, Python's operators and a tensor's methods."""
    functions: dict[Callable[..., Any], Role] = {}
    methods: dict[str, Role] = {}
    for role, names in _NAMES.items():
        for name in names.split():
            for known in (name, f"{name}_"):  # and the variant in place
                for home in (torch, functional, operator):
                    function = getattr(home, known, None)
                    if callable(function) and not isinstance(function, type):
                        functions[function] = role
                if hasattr(torch.Tensor, known):
                    methods[known] = role
    return functions, methods


_FUNCTIONS, _METHODS = _tables()


def role_of(node: fx.Node) -> Role | None:
    """Return what a call in a graph does to neurons; None where it may mix them."""
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    return _FUNCTIONS.get(node.target) if callable(node.target) else None


def name_of(node: fx.Node) -> str:
    """Name a call as its author would have written it.

    Subscripts and attributes are told by what is taken.
    """
    if node.op == "call_method":
        return f".{node.target}()"
    if node.target is operator.getitem:
        return "indexing"
    if node.target is getattr:
        return f".{node.args[1]}"
    return str(getattr(node.target, "__name__", node.target))
