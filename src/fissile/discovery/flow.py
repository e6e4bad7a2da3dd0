"""What tensors carry between layers, and what every call on the way does to it.

A tensor carries neurons (`Stream`) or both halves of a fused layer's neurons (`Halves`). Calls that
treat every neuron by itself are told from those that may mix them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional

#: What a call does: it bends every number alone, lets it through, casts it, cuts in two, multiplies
#: or divides, or acts on every channel alone.
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


@dataclass(frozen=True)
class Stream:
    """A tensor whose last dimension (for filters: channels) is the neurons of one or two layers."""

    roots: tuple[fx.Node, ...]  # the calls of those layers, the gate first
    width: int
    conv: bool
    half: int | None = None  # which half of a fused layer's neurons
    fused: bool = False  # both halves, multiplied
    active: bool = False  # an activation was on the way
    between: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether these are all neurons of one layer and nothing else."""
        return len(self.roots) == 1 and self.half is None and not self.fused

    def through(self, name: str, active: bool = False) -> Stream:
        """Return the stream after it passed a module."""
        between = tuple(dict.fromkeys((*self.between, name)))
        return replace(self, between=between, active=self.active or active)

    def alike(self, other: Stream) -> bool:
        """Return whether another stream has the same neurons in the same order."""
        mine, yours = (self.roots, self.half, self.fused), (other.roots, other.half, other.fused)
        return mine == yours

    def taken(self, which: int) -> Stream:
        """Return one half of a fused layer's neurons."""
        return replace(self, half=which, width=self.width // 2)

    def joined(self) -> Stream:
        """Return both halves multiplied; half as many neurons as rows."""
        width = self.width if self.half is not None else self.width // 2
        return replace(self, half=None, fused=True, active=True, width=width)


@dataclass(frozen=True)
class Halves:
    """Both halves of a stream, as ``chunk(2, -1)`` gives them."""

    stream: Stream


def merged(streams: list[Stream], active: bool) -> Stream:
    """Return the first of several streams with all that any of them has passed."""
    between = dict.fromkeys(name for stream in streams for name in stream.between)
    active = active or any(stream.active for stream in streams)
    return replace(streams[0], between=tuple(between), active=active)


def gate_trouble(one: Stream, other: Stream) -> str | None:
    """Return why two streams that are multiplied are not gate and up; None if they are."""
    if not (one.whole and other.whole) or one.conv or other.conv or one.width != other.width:
        return "its output is multiplied with other neurons, and they are not gate and up"
    if one.roots[0].all_input_nodes[:1] != other.roots[0].all_input_nodes[:1]:
        return "it is multiplied like gate and up with a layer that reads a different input"
    return None


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
    """Return a call's name as its author would have written it."""
    if node.op == "call_method":
        return f".{node.target}()"
    if node.target is operator.getitem:
        return "indexing"
    if node.target is getattr:
        return f".{node.args[1]}"
    return str(getattr(node.target, "__name__", node.target))


def halves_of(node: fx.Node, tag: Stream | Halves) -> tuple[Halves | Stream, bool] | None:
    """Return what a cut in two or the taking of a half yields; None for anything else.

    The second value says whether the code gives the width of a half, which may not widen along.
    """
    if isinstance(tag, Halves):
        which = node.args[1] if node.target is operator.getitem else None
        if not isinstance(which, int) or not -2 <= which < 2:
            return None
        return tag.stream.taken(which % 2), False
    if not tag.whole or tag.conv or tag.width % 2:
        return None
    role = role_of(node)
    if role == "glu":
        return (tag.joined(), False) if _argument(node, 1, "dim", -1) == -1 else None
    if role == "cut":
        return _cut(node, tag)
    half = _slice(node.args[1], tag) if node.target is operator.getitem else None
    return None if half is None else (half, True)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _cut(node: fx.Node, stream: Stream) -> tuple[Halves, bool] | None:
    """Read ``chunk(2, -1)``, or a cut by sizes that are or may be half the width."""
    if _argument(node, 2, "dim", 0) != -1:
        return None
    name = str(getattr(node.target, "__name__", node.target))
    sizes = [value for key, value in node.kwargs.items() if key not in ("dim", "input")]
    size = node.args[1] if len(node.args) > 1 else next(iter(sizes), None)
    if name in ("chunk", "tensor_split") and size == 2:
        return Halves(stream), False
    half = stream.width // 2
    fixed = (half, [half, half]) if name.startswith("split") else ([half],)
    size = list(size) if isinstance(size, list | tuple) else size
    return (Halves(stream), True) if isinstance(size, fx.Node) or size in fixed else None


def _slice(index: Any, stream: Stream) -> Stream | None:
    """Read ``x[..., :h]`` or ``x[..., h:]``, where h is half the width, or computed."""
    parts = index if isinstance(index, tuple) else (index,)
    last = parts[-1] if parts else None
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if any(part not in (..., slice(None)) for part in parts[:-1]):
        return None
    start, stop = (
        "half" if isinstance(bound, fx.Node) or bound == stream.width // 2 else bound
        for bound in (last.start, last.stop)
    )
    if start in (None, 0) and stop == "half":
        return stream.taken(0)
    return stream.taken(1) if start == "half" and stop in (None, stream.width) else None
