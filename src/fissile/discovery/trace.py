"""Seeing how a model is wired, without running it: torch.fx on a copy without values.

A scope is a module whose forward can be traced from its inputs to what it returns. What cannot be
traced inside it stays closed, an opaque module, and becomes a scope of its own. A survey goes
through all scopes of a model and collects what their graphs say.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fissile._common.errors import first_line
from fissile.discovery.follow import TRY, Follower, Scope, joined_path
from fissile.discovery.meta_copy import reseed
from fissile.discovery.module_checks import (
    Candidate,
    contents,
    forward_of,
    has_hooks,
    is_known_code,
    is_layer,
    is_of_torch,
    is_transformer_layer,
)


@dataclass
class Survey:
    """What was seen of a model in one mode: places, reasons and the order of its layers."""

    model: nn.Module
    trouble: dict[str, str]
    places: list[Candidate] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    reads: set[str] = field(default_factory=set)  # parameters that forward code reads itself
    untraced: list[str] = field(default_factory=list)  # modules whose own code was not traced
    visited: set[int] = field(default_factory=set)
    broken: Counter[type[nn.Module]] = field(default_factory=Counter)  # untraced, by class

    def visit(self, module: nn.Module, path: str, why: str, doubt: str | None) -> None:
        """See what can be seen of a module, in the copy without values.

        ``why`` says what hides its layers from their surroundings; ``doubt``, why code around it
        may use parts of it alone.
        """
        if id(module) in self.visited:
            return
        self.visited.add(id(module))
        if is_layer(module):
            self.order.append(path)
            self.reasons.setdefault(path, self.trouble.get(path, why))
        elif isinstance(module, nn.MultiheadAttention):
            self._children(module, path, f"it is inside attention ({path!r})", doubt)
        elif is_transformer_layer(module):
            added = "its output is added to something that does not widen"
            self.reasons.setdefault(joined_path(path, "linear2"), added)
            for name, child in module.named_children():
                if name not in ("linear1", "linear2"):  # attention comes first, as data flows
                    self.visit(child, joined_path(path, name), f"it is inside {path!r}", doubt)
            self._trace(module, path, doubt, "_ff_block")
        elif _is_closed(module) or isinstance(module, torch.jit.ScriptModule):
            return
        elif forward_of(module) is nn.Module.forward and "forward" not in vars(module):
            self._children(module, path, why, doubt)  # a list of modules
        else:
            self._trace(module, path, doubt)

    def _children(self, module: nn.Module, path: str, why: str, doubt: str | None) -> None:
        for name, child in module.named_children():
            self.visit(child, joined_path(path, name), why, doubt)

    def _trace(
        self, module: nn.Module, path: str, doubt: str | None, method: str = "forward"
    ) -> None:
        # What failed a few times fails always: a model may have hundreds of layers.
        broken = {kind for kind, times in self.broken.items() if times > 2}
        if type(module) in broken:
            scope: Scope | str = "as with others of its kind"
        else:
            scope = _trace_scope(module, broken, method)
        if isinstance(scope, str):
            self.broken[type(module)] += 1
            self.untraced.append(path)
            if doubt is None and not is_known_code(module):
                name = type(module).__name__
                uses = f"the forward of {name}, which may use parts of it alone"
                doubt = f"{uses}, could not be traced; {TRY}"
            self._children(module, path, _hidden(module, path, scope), doubt)
            return
        follower = Follower(scope, self.model.get_submodule(path), path, self.trouble)
        self.places += [replace(place, doubt=place.doubt or doubt) for place in follower.places]
        self.reasons = follower.reasons | self.reasons
        self._note(scope, module, path, doubt)
        self._uncalled(scope, module, path, "", doubt)

    def _note(self, scope: Scope, root: nn.Module, path: str, doubt: str | None) -> None:
        """Note the calls in order, opaque modules opened where they stand."""
        for node in scope.graph.nodes:
            name = joined_path(path, str(node.target))
            if node.op == "get_attr" and _is_read(node):
                self.reads.add(name)
            if node.op != "call_module":
                continue
            self.calls[name] += 1
            module = root.get_submodule(str(node.target))
            if is_layer(module):
                self.order.append(name)
            else:
                self.visit(module, name, f"it is inside {name!r}, which stays closed", doubt)

    def _uncalled(
        self, scope: Scope, module: nn.Module, path: str, below: str, doubt: str | None
    ) -> None:
        """Look into modules that the traced code never reached; they may be used otherwise."""
        for name, child in module.named_children():
            inner = joined_path(below, name)
            if inner not in scope.reached:
                why = "nothing that could be traced calls it"
                self.visit(child, joined_path(path, inner), why, doubt)
            elif inner not in scope.opaque and not _is_closed(child):
                self._uncalled(scope, child, path, inner, doubt)


def _hidden(module: nn.Module, path: str, error: str) -> str:
    """Return why layers inside a module cannot be judged."""
    name = type(module).__name__
    if "Attention" in name:
        return f"it is inside attention ({path!r})"
    return f"the forward of {name} could not be traced ({error}); {TRY}"


def _is_read(node: fx.Node) -> bool:
    """Return whether a parameter is used for more than its dtype or device."""
    plain = ("dtype", "device", "requires_grad")
    return any(user.target is not getattr or user.args[1] not in plain for user in node.users)


def _is_closed(module: nn.Module) -> bool:
    """Return whether a module stays whole in a graph: layers, norms, activations."""
    known = is_layer(module) or is_transformer_layer(module)
    if known or isinstance(module, nn.MultiheadAttention):
        return True
    if any(True for _ in module.children()):
        return False
    return is_of_torch(module) or has_hooks(module)


def _trace_scope(root: nn.Module, broken: set[type[nn.Module]], method: str) -> Scope | str:
    """Trace a method of a module; return its graph, or why its own code cannot be traced."""
    inner = {name: module for name, module in root.named_modules() if name}
    opaque = {
        name
        for name, m in inner.items()
        if type(m) in broken or isinstance(m, torch.jit.ScriptModule) or has_hooks(m)
    }
    opaque = {name for name in opaque if not _is_closed(inner[name])}
    while True:
        tracer = _Tracer(opaque, method)
        try:
            reseed()
            with _unchanged(root), torch.enable_grad():
                graph = tracer.trace(root)
                kept = list(_kept(root, tracer))
        except Exception as error:  # foreign code may raise whatever it likes
            culprit = tracer.culprit(error)
            if not culprit or culprit in opaque:
                return _short(error)
            # The code of a class fails for all of its kind.
            opaque |= {name for name, m in inner.items() if type(m) is type(inner[culprit])}
        else:
            return Scope(graph, opaque, _above(tracer.called), kept)


@contextlib.contextmanager
def _unchanged(root: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves in attributes, lest the next trace finds it there."""
    before = [(module, dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _above(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}


def _short(error: Exception) -> str:
    text = first_line(error).split(". ")[0].rstrip(".")
    return text if len(text) <= 80 else text[:77] + "..."


def _kept(root: nn.Module, tracer: fx.Tracer) -> Iterator[fx.Node]:
    """Yield what forward left behind in attributes, where anyone may read it."""
    for module in root.modules():
        for value in vars(module).values():
            for item in contents(value):
                if isinstance(item, fx.Proxy) and item.tracer is tracer:
                    yield item.node


class _Tracer(fx.Tracer):
    """Record a module's forward; what has a default keeps it, and only the rest is unknown."""

    def __init__(self, opaque: set[str], method: str) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.opaque, self.traced_func_name = opaque, method
        self.called = set[str]()
        self._failed: tuple[str, Exception] | None = None
        self._names: dict[int, str] = {}
        self._dtype: torch.dtype | None = None

    def culprit(self, error: Exception) -> str | None:
        """Return the path of the innermost module whose own code raised the error."""
        return self._failed[0] if self._failed and self._failed[1] is error else None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or _is_closed(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            path = self.path_of_module(m)
        except NameError:
            # Made on the fly, such as nn.ReLU()(x): with nothing to learn it is but a function.
            if any(True for _ in m.parameters()):
                kind, advice = type(m).__name__, "use nn.ModuleList or nn.ModuleDict"
                raise NameError(f"a {kind} is called past its name; {advice}") from None
            return forward(*args, **kwargs)
        self.called.add(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            known = self._failed is not None and self._failed[1] is error
            if not known and not self.is_leaf_module(m, path):
                self._failed = path, error
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._names.get(id(attr_val)) if isinstance(attr_val, nn.Parameter) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            proxy = self.create_proxy("get_attr", name, (), {})
            proxy.node.meta["numel"] = attr_val.numel()
            parameter_proxy_cache[name] = proxy
        return parameter_proxy_cache[name]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        # What forward does without gradients in evaluation only is its own business.
        node.meta["frozen"] = self.root.training and not torch.is_grad_enabled()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):  # the tracer of torch would store it in the model
            name = self._names.get(id(a), "_constant")
            node = self.create_node("get_attr", name, (), {})
            node.meta["numel"] = a.numel()
            return node
        return super().create_arg(a)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self._names = {id(p): name for name, p in self.root.named_parameters()}
        floats = (p.dtype for p in self.root.parameters() if p.is_floating_point())
        self._dtype = next(floats, torch.float32)
        forward = getattr(self.root, self.traced_func_name)
        plain: list[Any] = []
        named: dict[str, Any] = {}
        for argument in inspect.signature(forward).parameters.values():
            variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
            if variadic or argument.default is not argument.empty:
                continue
            value = self.create_proxy("placeholder", argument.name, (), {})
            if argument.kind is argument.POSITIONAL_ONLY:
                plain.append(value)
            else:
                named[argument.name] = value
        return lambda: forward(*plain, **named), []

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer questions about dtypes as though every tensor had the parameters' dtype."""
        node = obj.node
        if node.op == "call_function" and node.target in (operator.eq, operator.ne):
            sides = [self._known(side) for side in node.args]
            if None not in sides:
                return bool(node.target(*sides))
        return super().to_bool(obj)

    def _known(self, side: Any) -> Any:
        if not isinstance(side, fx.Node):
            return side if isinstance(side, torch.dtype | torch.device) else None
        asked = side.args[1] if side.target is getattr else None
        return {"dtype": self._dtype, "device": torch.device("meta")}.get(str(asked))
