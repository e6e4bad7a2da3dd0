"""Seeing how a model is wired, without running it: torch.fx on a hollow copy, scope by scope.

A scope is a module whose forward can be followed from its inputs to what it returns. What cannot
be followed inside it stays closed, an opaque module, and becomes a scope of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fissile.discovery.isolate import quietly, reseed
from fissile.discovery.meta_copy import Width
from fissile.discovery.module_checks import (
    contents,
    has_hooks,
    is_layer,
    is_torch_s,
    is_transformer_layer,
)

__all__ = ["Scope", "closed_leaves", "quietly", "trace_scope"]


@dataclass
class Scope:
    """A module that was followed, and what its forward does."""

    root: nn.Module
    graph: fx.Graph
    opaque: dict[str, str]  # modules that stayed closed, and why
    reached: set[str]  # modules that were called, and all above them
    kept: list[fx.Node] = field(default_factory=list)
    measured: set[str] = field(default_factory=set)  # layers whose widths the code asks for


def closed_leaves(model: nn.Module) -> set[str]:
    """Name the modules that stay whole in a graph: layers, norms, activations and their like."""
    return {name for name, module in model.named_modules() if _is_closed(module)}


def _is_closed(module: nn.Module) -> bool:
    if is_layer(module) or isinstance(module, nn.MultiheadAttention):
        return True
    if is_transformer_layer(module):
        return True
    if any(True for _ in module.children()):
        return False
    return is_torch_s(module) or has_hooks(module)


def trace_scope(
    root: nn.Module, closed: set[str], broken: set[type[nn.Module]], given: dict[str, Any]
) -> Scope | str:
    """Follow a module's forward; return its graph, or why its own code cannot be followed.

    Args:
        root: the module, hollow.
        closed: names below ``root`` of modules to leave whole.
        broken: classes whose code is known not to be traceable.
        given: arguments of ``forward`` that will be there although they have defaults.
    """
    inner = {name: module for name, module in root.named_modules() if name}
    shut = {n for n, m in inner.items() if _stays_shut(m) or type(m) in broken} - closed
    opaque = dict.fromkeys(shut, "")
    failures: Counter[type[nn.Module]] = Counter()
    while True:
        tracer = _Tracer(closed | opaque.keys(), given)
        try:
            reseed()
            with _unchanged(root), torch.enable_grad():
                graph = tracer.trace(root)
                kept = list(_kept(root, tracer))
        except Exception as error:  # foreign code may raise whatever it likes
            culprit = tracer.culprit(error)
            if not culprit or culprit in opaque:
                return _short(error)
            # What fails twice is the code of a class: all of its kind at once, not one by one.
            kind = type(inner[culprit])
            failures[kind] += 1
            opaque[culprit] = _short(error)
            if failures[kind] > 1:
                alike = [name for name, module in inner.items() if type(module) is kind]
                opaque |= dict.fromkeys(alike, _short(error))
        else:
            return Scope(root, graph, opaque, _above(tracer.called), kept, tracer.measured)


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


def _has_tensors(value: Any) -> bool:
    return any(isinstance(one, Tensor) for one in tree_leaves(value))


def _stays_shut(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or has_hooks(module)


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].split(". ")[0].rstrip(".") if lines else ""
    text = text if len(text) <= 80 else text[:77] + "..."
    return text or type(error).__name__


def _kept(root: nn.Module, tracer: fx.Tracer) -> Iterator[fx.Node]:
    """Find what forward left behind in attributes, where anyone may read it."""
    for module in root.modules():
        for value in vars(module).values():
            for one in contents(value):
                if isinstance(one, fx.Proxy) and one.tracer is tracer:
                    yield one.node


class _Tracer(fx.Tracer):
    """Record a module's forward; what has a default keeps it, and only the rest is unknown."""

    def __init__(self, leaves: set[str], given: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.leaves, self.given = leaves, given
        self.called, self.measured = set[str](), set[str]()
        self._failed: tuple[str, Exception] | None = None
        self._names: dict[int, str] = {}
        self._dtype: torch.dtype | None = None

    def culprit(self, error: Exception) -> str | None:
        """Return the path of the innermost module whose own code raised the error."""
        return self._failed[0] if self._failed and self._failed[1] is error else None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            path = self.path_of_module(m)
        except NameError:
            # Made on the fly, such as nn.ReLU()(x): with nothing to learn it is but a function.
            if any(True for _ in m.parameters()):
                text = f"a {type(m).__name__} is called in another way than by its name"
                raise NameError(text) from None
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
        if isinstance(attr_val, Width):
            self.measured.add(attr_val.owner)
            return int(attr_val)
        name = self._names.get(id(attr_val)) if isinstance(attr_val, nn.Parameter) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
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
        forward = self.root.forward
        plain: list[Any] = []
        named: dict[str, Any] = {}
        for one in inspect.signature(forward).parameters.values():
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            if one.default is not one.empty and one.name not in self.given:
                continue
            value = self.given.get(one.name)
            if value is None or _has_tensors(value):
                value = self.create_proxy("placeholder", one.name, (), {})
            if one.kind is one.POSITIONAL_ONLY:
                plain.append(value)
            else:
                named[one.name] = value
        return lambda: forward(*plain, **named), []

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer questions about dtypes as though every tensor had the parameters' dtype."""
        node = obj.node
        if node.op == "call_function" and node.target in (operator.eq, operator.ne):
            sides = [self._known(one) for one in node.args]
            if None not in sides:
                return bool(node.target(*sides))
        return super().to_bool(obj)

    def _known(self, side: Any) -> Any:
        if not isinstance(side, fx.Node):
            return side if isinstance(side, torch.dtype | torch.device) else None
        asked = side.args[1] if side.target is getattr else None
        return {"dtype": self._dtype, "device": torch.device("meta")}.get(str(asked))
