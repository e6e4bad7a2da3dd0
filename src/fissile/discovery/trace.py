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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fissile.discovery.follow import Scope, follow
from fissile.discovery.meta_copy import reseed
from fissile.discovery.module_checks import (
    Candidate,
    contents,
    forward_of,
    has_hooks,
    is_known_code,
    is_layer,
    is_torch_s,
    is_transformer_layer,
    passes_silently,
    sizes_of,
)

__all__ = ["Survey", "closed_leaves", "survey"]

_TRY = "pass example_inputs to have it tried out"


@dataclass
class Survey:
    """What was seen of a model in one mode: places, reasons and the order of its layers."""

    places: list[Candidate] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    reads: set[str] = field(default_factory=set)  # parameters that forward code reads itself
    untraced: list[str] = field(default_factory=list)  # modules whose own code was not traced


def survey(
    model: nn.Module,
    asked: set[str],
    closed: set[str],
    trouble: dict[str, str],
    given: dict[str, Any],
) -> Survey:
    """Trace a copy of a model as far as its code allows.

    Args:
        model: the copy without values, in the mode to look at.
        asked: the set that notes whose widths are asked for.
        closed: names of the modules that stay whole in a graph.
        trouble: layers, by name, that cannot take part, and why.
        given: arguments that the model's forward will get.
    """
    surveyor = _Surveyor(asked, closed, trouble, given)
    surveyor.visit(model, "", "it is all there is", None)
    return surveyor.result()


class _Surveyor:
    def __init__(
        self, asked: set[str], closed: set[str], trouble: dict[str, str], given: dict[str, Any]
    ) -> None:
        self.asked, self.closed, self.trouble, self.given = asked, closed, trouble, given
        self.seen = Survey()
        self.measured: set[str] = set()  # layers whose widths the code asks for
        self.visited: set[int] = set()
        self.broken: Counter[type[nn.Module]] = Counter()  # classes whose own code cannot be traced

    def result(self) -> Survey:
        """Return what was seen; places with a layer whose width is asked for are doubtful."""
        for i, place in enumerate(self.seen.places):
            parts = (*place.firsts, *place.between, place.second)
            for name in [name for name in parts if name in self.measured][:1]:
                why = f"the code asks for the width of {name!r}; {_TRY}"
                self.seen.places[i] = _doubted(place, why)
        return self.seen

    def visit(self, module: nn.Module, path: str, why: str, doubt: str | None) -> None:
        """See what can be seen of a module.

        Args:
            module: the module.
            path: its name in the model.
            why: what hides its layers from their surroundings.
            doubt: why code around it may use parts of it alone; None if no code does.
        """
        if id(module) in self.visited:
            return
        self.visited.add(id(module))
        if is_layer(module):
            self.seen.order.append(path)
            self.seen.reasons.setdefault(path, self.trouble.get(path, why))
        elif isinstance(module, nn.MultiheadAttention):
            self._children(module, path, f"it is inside attention ({path!r})", doubt)
        elif is_transformer_layer(module):
            self._transformer_layer(module, path, doubt)
        elif path in self.closed or isinstance(module, torch.jit.ScriptModule):
            return
        elif forward_of(module) is nn.Module.forward and "forward" not in vars(module):
            self._children(module, path, why, doubt)  # a list of modules
        else:
            self._trace(module, path, doubt)

    def _children(self, module: nn.Module, path: str, why: str, doubt: str | None) -> None:
        for name, child in module.named_children():
            self.visit(child, _join(path, name), why, doubt)

    def _trace(self, module: nn.Module, path: str, doubt: str | None) -> None:
        scope = self._scope(module, path)
        if isinstance(scope, str):
            self.broken[type(module)] += 1
            self.seen.untraced.append(path)
            if doubt is None and not is_known_code(module):
                name = type(module).__name__
                doubt = f"the forward of {name}, which may use parts of it alone, could not be "
                doubt += f"traced; {_TRY}"
            self._children(module, path, _hidden(module, path, scope), doubt)
            return
        wiring = follow(scope, path, self.trouble)
        self.measured |= scope.asked
        self.seen.places += [_doubted(place, doubt) for place in wiring.places]
        for name, reason in wiring.reasons.items():
            self.seen.reasons.setdefault(name, reason)
        self._note(scope, path, doubt)
        self._uncalled(scope, module, path, "", doubt)

    def _scope(self, module: nn.Module, path: str) -> Scope | str:
        # What failed a few times fails always: a model may have hundreds of layers.
        broken = {kind for kind, times in self.broken.items() if times > 2}
        if type(module) in broken:
            return "as with others of its kind"
        closed = _below(self.closed, path)
        if self.given and not path:
            scope = trace_scope(module, closed, broken, self.given, self.asked)
            if isinstance(scope, Scope):
                return scope
        return trace_scope(module, closed, broken, {}, self.asked)

    def _note(self, scope: Scope, path: str, doubt: str | None) -> None:
        """Note the calls in order, opaque modules opened where they stand."""
        for node in scope.graph.nodes:
            name = _join(path, str(node.target))
            if node.op == "get_attr" and _is_read(node):
                self.seen.reads.add(name)
            if node.op != "call_module":
                continue
            self.seen.calls[name] += 1
            module = scope.root.get_submodule(str(node.target))
            if is_layer(module):
                self.seen.order.append(name)
            else:
                self.visit(module, name, f"it is inside {name!r}, which stays closed", doubt)

    def _uncalled(
        self, scope: Scope, module: nn.Module, path: str, below: str, doubt: str | None
    ) -> None:
        """Look into modules that the traced code never reached; they may be used otherwise."""
        for name, child in module.named_children():
            inner = _join(below, name)
            if inner not in scope.reached:
                why = "nothing that could be traced calls it"
                self.visit(child, _join(path, inner), why, doubt)
            elif inner not in scope.opaque and _join(path, inner) not in self.closed:
                self._uncalled(scope, child, path, inner, doubt)

    def _transformer_layer(self, module: nn.Module, path: str, doubt: str | None) -> None:
        """Read the layers of torch's own, which compute linear2(dropout(act(linear1(x))))."""
        first, second = names = [_join(path, name) for name in ("linear1", "linear2")]
        for name, child in module.named_children():
            if name not in ("linear1", "linear2"):
                self.visit(child, _join(path, name), f"it is inside {path!r}", doubt)
        self.seen.order += names
        self.seen.calls.update(names)
        self.seen.reasons[second] = "its output is added to something that does not widen"
        passed = ["dropout"]
        if isinstance(module.activation, nn.Module):
            passed = ["activation", *passed]
        trouble = [self.trouble[name] for name in names if name in self.trouble]
        trouble = trouble or _trouble_between(module, path, passed)
        if trouble:
            self.seen.reasons[first] = trouble[0]
        else:
            between = tuple(_join(path, name) for name in passed)
            self.seen.places.append(Candidate("mlp", (first,), between, second, doubt))


def _trouble_between(module: nn.Module, path: str, passed: list[str]) -> list[str]:
    """Return what in one of torch's own transformer layers is not as torch made it."""
    layers = [module.get_submodule(name) for name in ("linear1", "linear2")]
    plain = all(isinstance(layer, nn.Linear) for layer in layers)
    hooked = [name for name in passed if has_hooks(module.get_submodule(name))]
    if not plain or sizes_of(layers[0])[1] != sizes_of(layers[1])[0]:
        return [f"linear1 and linear2 of {path!r} do not fit together"]
    if hooked:
        return [f"{_join(path, hooked[0])!r} has hooks; remove them"]
    if not passes_silently(module.get_submodule("dropout")):
        return [f"{_join(path, 'dropout')!r} is no dropout, and may mix neurons"]
    if not _bends(module.activation):
        return ["its output goes through an activation that may mix neurons"]
    return []


def _hidden(module: nn.Module, path: str, error: str) -> str:
    """Return why layers inside a module cannot be judged."""
    name = type(module).__name__
    if "Attention" in name:
        return f"it is inside attention ({path!r})"
    return f"the forward of {name} could not be traced ({error}); {_TRY}"


def _doubted(place: Candidate, why: str | None) -> Candidate:
    return place if place.doubt is not None else replace(place, doubt=why)


class _Probe(nn.Module):
    """Two layers with something between them, to find out whether neurons get through."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(2, 2, device="meta"), between
        self.second = nn.Linear(2, 2, device="meta")

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def _bends(activation: Any) -> bool:
    """Return whether a function or module acts on every number alone."""
    probe = _Probe(activation)
    scope = trace_scope(probe, closed_leaves(probe), set(), {}, set())
    return isinstance(scope, Scope) and bool(follow(scope, "", {}).places)


def _is_read(node: fx.Node) -> bool:
    """Return whether a parameter is used for more than its dtype or device."""
    plain = ("dtype", "device", "requires_grad")
    return any(user.target is not getattr or user.args[1] not in plain for user in node.users)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _below(names: set[str], path: str) -> set[str]:
    """Keep what is below a path, named from there."""
    start = f"{path}." if path else ""
    return {name.removeprefix(start) for name in names if name.startswith(start)}


def closed_leaves(model: nn.Module) -> set[str]:
    """Return the names of modules that stay whole in a graph: layers, norms, activations."""
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
    root: nn.Module,
    closed: set[str],
    broken: set[type[nn.Module]],
    given: dict[str, Any],
    asked: set[str],
) -> Scope | str:
    """Trace a module's forward; return its graph, or why its own code cannot be traced.

    Args:
        root: the module, without values.
        closed: names below ``root`` of modules to leave whole.
        broken: classes whose code is known not to be traceable.
        given: arguments of ``forward`` that will be there although they have defaults.
        asked: the set that notes whose widths are asked for.
    """
    inner = {name: module for name, module in root.named_modules() if name}
    shut = {n for n, m in inner.items() if _stays_shut(m) or type(m) in broken} - closed
    opaque = dict.fromkeys(shut, "")
    failures: Counter[type[nn.Module]] = Counter()
    while True:
        tracer = _Tracer(closed | opaque.keys(), given)
        try:
            reseed()
            asked.clear()
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
            return Scope(root, graph, opaque, _above(tracer.called), kept, {*asked})


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
    """Yield what forward left behind in attributes, where anyone may read it."""
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
        self.called = set[str]()
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
