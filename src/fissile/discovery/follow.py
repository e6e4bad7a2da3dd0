"""Following neurons through a graph, from the layer that makes them to the one that reads them.

Calls that treat every neuron by itself are told from those that may mix them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional

from fissile.discovery.module_checks import Candidate, Kind, has_hooks, is_layer, passage, sizes_of

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
    cut: bool = False  # a tuple of both halves, as ``chunk(2, -1)`` gives them
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
        return (self.roots, self.half, self.fused) == (other.roots, other.half, other.fused)

    def taken(self, which: int) -> Stream:
        """Return one half of a fused layer's neurons."""
        return replace(self, half=which, cut=False, width=self.width // 2)

    def joined(self) -> Stream:
        """Return both halves multiplied; half as many neurons as rows."""
        width = self.width if self.half is not None else self.width // 2
        return replace(self, half=None, fused=True, active=True, width=width)


def merged(streams: list[Stream], active: bool) -> Stream:
    """Return the first of several streams with all that any of them has passed."""
    between = dict.fromkeys(name for stream in streams for name in stream.between)
    active = active or any(stream.active for stream in streams)
    return replace(streams[0], between=tuple(between), active=active)


def _roles() -> dict[Any, Role]:
    """Look every name up among torch's functions, Python's operators and a tensor's methods."""
    roles: dict[Any, Role] = {}
    for role, names in _NAMES.items():
        for name in names.split():
            for known in (name, f"{name}_"):  # and the variant in place
                for home in (torch, functional, operator):
                    function = getattr(home, known, None)
                    if callable(function) and not isinstance(function, type):
                        roles[function] = role
                if hasattr(torch.Tensor, known):
                    roles[known] = role
    return roles


#: What the calls of a graph do to neurons, by function or a method's name; others may mix them.
_ROLES = _roles()


def name_of(node: fx.Node) -> str:
    """Return a call's name as its author would have written it."""
    if node.op == "call_method":
        return f".{node.target}()"
    if node.target is operator.getitem:
        return "indexing"
    if node.target is getattr:
        return f".{node.args[1]}"
    return str(getattr(node.target, "__name__", node.target))


def halves_of(node: fx.Node, stream: Stream) -> tuple[Stream, bool] | None:
    """Return what a cut in two or the taking of a half yields; None for anything else.

    The second value says whether the code gives the width of a half, which may not widen along.
    """
    index = node.args[1] if node.target is operator.getitem else None
    if stream.cut:
        if not isinstance(index, int) or not -2 <= index < 2:
            return None
        return stream.taken(index % 2), False
    if not stream.whole or stream.conv or stream.width % 2:
        return None
    role = _ROLES.get(node.target)
    if role == "glu":
        return (stream.joined(), False) if _argument(node, 1, "dim", -1) == -1 else None
    if role == "cut":
        return _cut(node, stream)
    half = _slice(index, stream)
    return None if half is None else (half, True)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _cut(node: fx.Node, stream: Stream) -> tuple[Stream, bool] | None:
    """Read ``chunk(2, -1)``, or a cut by sizes that are or may be half the width."""
    if _argument(node, 2, "dim", 0) != -1:
        return None
    name = str(getattr(node.target, "__name__", node.target))
    sizes = [value for key, value in node.kwargs.items() if key not in ("dim", "input")]
    size = node.args[1] if len(node.args) > 1 else next(iter(sizes), None)
    if name in ("chunk", "tensor_split") and size == 2:
        return replace(stream, cut=True), False
    half = stream.width // 2
    fixed = (half, [half, half]) if name.startswith("split") else ([half],)
    size = list(size) if isinstance(size, list | tuple) else size
    if not isinstance(size, fx.Node) and size not in fixed:
        return None
    return replace(stream, cut=True), True


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


_HARMLESS = ("dtype", "device", "ndim", "dim", "is_cuda", "requires_grad", "layout")
#: What decides where the code alone does not.
TRY = "pass example_inputs to have it tried out"
_FIXED = "its halves are cut at a fixed width, which may not widen along; write chunk(2, -1), or "
#: Why neurons are refused that take part in no training.
FROZEN = "it is used under torch.no_grad(), so no gradient comes back"
_VERBS = {"add": "added to", "sub": "subtracted from", "mul": "multiplied with"}


def joined_path(path: str, name: str) -> str:
    """Return the name of a module below another one; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


@dataclass
class Scope:
    """A module whose forward was traced, and what it does."""

    graph: fx.Graph
    opaque: set[str]  # modules that stayed closed
    reached: set[str]  # modules that were called, and all above them
    kept: list[fx.Node]  # what forward left behind in attributes


class Follower:
    """Finds the places of a scope, and why its other layers are none.

    ``trouble`` has layers, by name, that cannot take part whatever surrounds them.
    """

    def __init__(self, scope: Scope, root: nn.Module, path: str, trouble: dict[str, str]) -> None:
        self.scope, self.root, self.path, self.trouble = scope, root, path, trouble
        self.streams: dict[fx.Node, Stream] = {}
        self.spoiled: dict[fx.Node, str] = {}
        self.reads: dict[fx.Node, list[tuple[Stream, fx.Node]]] = {}
        self.modules = dict(root.named_modules())
        self.doubts: dict[fx.Node, str] = {}  # of a layer, why only a try-out can tell
        self.places: list[Candidate] = []
        self.reasons: dict[str, str] = {}

        for node in scope.graph.nodes:
            stream = self._step(node)
            if stream is not None:
                self.streams[node] = stream
                if not stream.cut and _in_place(node, self.modules):
                    self.streams[node.all_input_nodes[0]] = stream
        for node in scope.kept:
            self._spoil([node], "its output is kept in an attribute, where others may read it")
        for layer in self.reads:
            if (reason := self._judge(layer)) is not None:
                self.reasons[self._name(layer)] = reason

    def _step(self, node: fx.Node) -> Any:
        """Return what a node carries; what is not understood spoils the neurons it takes."""
        carried = [source for source in node.all_input_nodes if source in self.streams]
        if node.meta.get("frozen"):
            self._spoil(carried, FROZEN)
        if node.op == "call_module":
            return self._module(node)
        if not carried:
            return None
        if node.op == "output" or isinstance(node.target, type):
            where = self._called("") if self.path else "the model"
            return self._spoil(carried, f"its output is what {where} returns")
        return self._function(node, carried)

    def _module(self, node: fx.Node) -> Stream | None:
        module, name = self.modules[str(node.target)], self._name(node)
        carried = [source for source in node.all_input_nodes if source in self.streams]
        stream = self.streams[carried[0]] if len(carried) == 1 else None
        if stream is None or stream.cut:
            self._spoil(carried, f"its output is used by {self._called(str(node.target))}")
            stream = None
        if not is_layer(module):
            return None if stream is None else self._pass(str(node.target), module, stream)
        if stream is not None:
            self._read(node, module, stream)
        self.reads[node] = []
        if node.meta.get("frozen"):
            self.spoiled[node] = FROZEN
        if name in self.trouble:
            self.spoiled[node] = self.trouble[name]
            return None
        return Stream((node,), sizes_of(module)[1], isinstance(module, nn.Conv2d))

    def _read(self, node: fx.Node, module: nn.Module, stream: Stream) -> None:
        """Note that a layer reads neurons, if it can be the second of a place at all."""
        name = self._name(node)
        if stream.half is not None:
            self._refuse(stream, f"{name!r} reads only a part of its output")
        elif name in self.trouble:
            self._refuse(stream, f"{name!r} reads it and cannot widen: {self.trouble[name]}")
        elif isinstance(module, nn.Conv2d) is not stream.conv:
            self._refuse(stream, f"{name!r}, a layer of another kind, reads it")
        elif sizes_of(module)[0] != stream.width:
            self._refuse(stream, f"{name!r} reads it but has another number of inputs")
        else:
            for root in stream.roots:
                self.reads[root].append((stream, node))

    def _pass(self, target: str, module: nn.Module, stream: Stream) -> Stream | None:
        """Return the neurons after a module that is not a layer, if they pass it."""
        name = joined_path(self.path, target)
        bends = passage(module, name, stream.width, stream.conv)
        if isinstance(bends, bool):
            return stream.through(name, active=bends)
        halves = isinstance(module, nn.GLU) and module.dim == -1 and not has_hooks(module)
        if halves and stream.whole and not stream.conv:
            return stream.through(name).joined()
        if target in self.scope.opaque and not has_hooks(module):
            bends = f"its output goes into {self._called(target)}, which could not be traced"
        self._refuse(stream, bends)
        return None

    def _function(self, node: fx.Node, carried: list[fx.Node]) -> Any:
        asked = node.args[1] if node.target is getattr else node.target
        if asked in _HARMLESS:
            return None
        streams = [self.streams[source] for source in carried]
        if asked in ("shape", "size"):
            return self._doubt(streams, f"its width is read by {self._what(node)}; {TRY}")
        if len(streams) == 1 and (half := halves_of(node, streams[0])) is not None:
            if half[1]:
                self._doubt(streams, _FIXED + TRY)
            return half[0]
        if any(stream.cut for stream in streams):
            return self._spoil(carried, f"its halves go through {self._what(node)} together")
        if asked in ("detach", "detach_", "data"):
            return self._spoil(carried, "its output is detached, so no gradient comes back")
        return self._elementwise(node, carried, streams)

    def _elementwise(self, node: fx.Node, carried: list[fx.Node], streams: list[Stream]) -> Any:
        role, what = _ROLES.get(node.target), self._what(node)
        if role == "cast":
            return streams[0] if carried[0] is node.args[0] else None
        if role == "channels" and streams[0].conv and not node.kwargs.get("return_indices"):
            return streams[0]
        if role not in ("bend", "pass", "times", "ratio"):
            return self._spoil(carried, f"its output goes through {what}, which may mix neurons")
        others = [source for source in node.all_input_nodes if source not in self.streams]
        if any(source.meta.get("numel") != 1 for source in others):
            verb = _VERBS.get(name_of(node).strip(".()_"), "combined with")
            trouble = f"its output is {verb} something that does not widen, by {what}"
            return self._spoil(carried, trouble)
        # x * x and x * f(x) bend; x * 2 does not.
        several = sum(isinstance(argument, fx.Node) for argument in node.args) > 1
        bends = role == "bend" or (role in ("times", "ratio") and several)
        if all(stream.alike(streams[0]) for stream in streams):
            return merged(streams, bends)
        if role == "times" and len(streams) == 2:
            return self._multiply(carried, *streams)
        return self._spoil(carried, f"its output is combined with other neurons by {what}")

    def _multiply(self, carried: list[fx.Node], one: Stream, other: Stream) -> Any:
        """Join the halves of a fused layer, or gate and up."""
        if one.roots == other.roots and {one.half, other.half} == {0, 1}:
            return merged([one, other], True).joined()
        if not (one.whole and other.whole) or one.conv or other.conv or one.width != other.width:
            trouble = "its output is multiplied with other neurons, and they are not gate and up"
            return self._spoil(carried, trouble)
        if one.roots[0].all_input_nodes[:1] != other.roots[0].all_input_nodes[:1]:
            trouble = "it is multiplied like gate and up with a layer that reads a different input"
            return self._spoil(carried, trouble)
        # The gate is what passes an activation; where that tells nothing, what is listed first.
        order = list(self.modules)
        gate, up = sorted(
            (one, other), key=lambda s: (not s.active, order.index(str(s.roots[0].target)))
        )
        return replace(merged([gate, up], True), roots=(*gate.roots, *up.roots))

    def _judge(self, root: fx.Node) -> str | None:
        """Make a place of a layer's neurons, or return why there is none."""
        reads = self.reads[root]
        if root in self.spoiled:
            return self.spoiled[root]
        if not reads:
            return "nothing reads its output"
        if len(reads) > 1:
            readers = " and ".join(dict.fromkeys(repr(self._name(node)) for _, node in reads))
            return f"its output is read more than once, by {readers}"
        stream, reader = reads[0]
        for other in stream.roots:
            if other in self.spoiled or len(self.reads[other]) != 1:
                return f"{self._name(other)!r}, its partner, is used elsewhere"
        second = self._name(reader)
        if not stream.active:
            return f"nothing but linear layers from here to {second!r}"
        if root is stream.roots[0]:
            kind: Kind = "conv" if stream.conv else "fused" if stream.fused else "mlp"
            kind = "gated" if len(stream.roots) == 2 else kind
            firsts = tuple(self._name(layer) for layer in stream.roots)
            doubt = next((self.doubts[r] for r in stream.roots if r in self.doubts), None)
            self.places.append(Candidate(kind, firsts, stream.between, second, doubt))
        return None

    def _spoil(self, nodes: list[fx.Node], reason: str) -> Any:
        for node in nodes:
            if node in self.streams:
                self._refuse(self.streams[node], reason)
        return None  # so nothing is carried on

    def _doubt(self, streams: list[Stream], reason: str) -> None:
        for root in (root for stream in streams for root in stream.roots):
            self.doubts.setdefault(root, reason)

    def _refuse(self, stream: Stream, reason: str) -> None:
        for root in stream.roots:
            self.spoiled.setdefault(root, reason)

    def _name(self, node: fx.Node) -> str:
        return joined_path(self.path, str(node.target))

    def _called(self, target: str) -> str:
        return f"{joined_path(self.path, target)!r} ({type(self.modules[target]).__name__})"

    def _what(self, node: fx.Node) -> str:
        """Name a call and the module it stands in, unless that is the scope itself."""
        stack = node.meta.get("nn_module_stack")
        inside = next(reversed(stack.values()))[0] if stack else ""
        return f"{name_of(node)} in {self._called(inside)}" if inside else name_of(node)


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a call changes its input, as ``x.relu_()`` does."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    changing = node.op == "call_method" and str(node.target).endswith("_")
    return changing or bool(node.kwargs.get("inplace"))
