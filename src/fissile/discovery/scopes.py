"""Going through a whole model, scope by scope, and collecting what its graphs say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from fissile.discovery.follow import Found, follow
from fissile.discovery.module_checks import (
    forward_of,
    has_hooks,
    is_layer,
    is_torch_s,
    is_transformer_layer,
    passes_silently,
    sizes_of,
)
from fissile.discovery.source_scan import Reach, reach
from fissile.discovery.trace import Scope, closed_leaves, trace_scope

__all__ = ["Survey", "survey"]

_BRANCH = "cannot be used as inputs to control flow"
_TRY = "pass example_inputs to have it tried out"


@dataclass
class Survey:
    """What was seen of a model in one mode: places, reasons and the order of its layers."""

    found: list[Found] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    reads: set[str] = field(default_factory=set)  # parameters that forward code reads itself
    untraced: list[str] = field(default_factory=list)  # modules whose own code was not followed


def survey(
    model: nn.Module, closed: set[str], trouble: dict[str, str], given: dict[str, Any]
) -> Survey:
    """Trace a hollow model as far as its code allows.

    Args:
        model: the hollow copy, in the mode to look at.
        closed: names of the modules that stay whole in a graph.
        trouble: layers, by name, that cannot take part, and why.
        given: arguments that the model's forward will get.
    """
    surveyor = _Surveyor(closed, trouble, given)
    surveyor.visit(model, "", "it is all there is")
    surveyor.doubt(model)
    return surveyor.seen


class _Surveyor:
    def __init__(self, closed: set[str], trouble: dict[str, str], given: dict[str, Any]) -> None:
        self.closed, self.trouble, self.given = closed, trouble, given
        self.seen, self.reach = Survey(), Reach()
        self.measured: set[str] = set()  # layers whose widths the code asks for
        self.settled: dict[type[nn.Module], set[str]] = {}  # arguments that change nothing
        self.visited: set[int] = set()
        self.broken: Counter[type[nn.Module]] = Counter()  # classes whose own code cannot be traced

    def visit(self, module: nn.Module, path: str, why: str) -> None:
        """See what can be seen of a module; ``why`` says what hides it from its surroundings."""
        if id(module) in self.visited:
            return
        self.visited.add(id(module))
        if is_layer(module):
            self.seen.order.append(path)
            self.seen.reasons.setdefault(path, self.trouble.get(path, why))
        elif isinstance(module, nn.MultiheadAttention):
            self._children(module, path, f"it is inside attention ({path!r})")
        elif is_transformer_layer(module):
            self._transformer_layer(module, path)
        elif path in self.closed or isinstance(module, torch.jit.ScriptModule):
            return
        elif forward_of(module) is nn.Module.forward and "forward" not in vars(module):
            self._children(module, path, why)  # a list of modules
        else:
            self._trace(module, path)

    def _children(self, module: nn.Module, path: str, why: str) -> None:
        for name, child in module.named_children():
            self.visit(child, _join(path, name), why)

    def _trace(self, module: nn.Module, path: str) -> None:
        scope = self._scope(module, path)
        if isinstance(scope, str):
            self.broken[type(module)] += 1
            self.seen.untraced.append(path)
            self._read(module)
            self._children(module, path, _hidden(module, path, scope))
            return
        wiring = follow(scope, path, self.trouble)
        self.measured |= scope.measured
        self.seen.found += self._as_called(scope, path, wiring.found)
        for name, reason in wiring.reasons.items():
            self.seen.reasons.setdefault(name, reason)
        self._note(scope, path)
        self._uncalled(scope, module, path, "")

    def _read(self, module: nn.Module) -> None:
        """Read the code that could not be traced for what it does with the modules below."""
        if not is_torch_s(module):
            self.reach.also(reach(module))

    def _as_called(self, scope: Scope, path: str, found: list[Found]) -> list[Found]:
        """Doubt places that are not there when a module gets the arguments that it is called with.

        A trace knows none but those without a default.
        """
        settled = self.settled.setdefault(type(scope.root), set())
        passed = self.reach.passed.get(id(scope.root), {})
        passed = {name: value for name, value in passed.items() if name not in settled}
        if not found or not passed or self._there(scope, path, passed) == found:
            return found
        for name, value in passed.items():
            there = self._there(scope, path, {name: value})
            if there in (None, found):
                settled.add(name)
            else:
                why = f"{path!r} is called with {name!r}, which may change its wiring; {_TRY}"
                found = [one if one in (there or []) else _doubted(one, why) for one in found]
        return found

    def _there(self, scope: Scope, path: str, passed: dict[str, Any]) -> list[Found] | None:
        """Return the places there are with these arguments; None if the code does not take them."""
        new = trace_scope(scope.root, _below(self.closed, path), self._broken(), passed)
        opaque = {} if isinstance(new, str) else new.opaque
        errors = [error for name, error in opaque.items() if name not in scope.opaque]
        errors += [new] if isinstance(new, str) else []
        if list(passed.values()) == [None] and any(_BRANCH in error for error in errors):
            return self._there(scope, path, dict.fromkeys(passed, True))  # it is a flag
        if any(_BRANCH not in error for error in errors):
            return None
        return follow(new, path, self.trouble).found if isinstance(new, Scope) else []

    def doubt(self, model: nn.Module) -> None:
        """Doubt places of which other code uses parts, and those whose widths are asked for."""
        for i, one in enumerate(self.seen.found):
            parts = (*one.firsts, *one.between, one.second)
            measured = [name for name in parts if name in self.measured]
            if self.reach.parts_used([model.get_submodule(name) for name in parts]):
                one = _doubted(one, f"code that cannot be traced uses parts of it alone; {_TRY}")
            if measured:
                one = _doubted(one, f"the code asks for the width of {measured[0]!r}; {_TRY}")
            self.seen.found[i] = one

    def _scope(self, module: nn.Module, path: str) -> Scope | str:
        broken = self._broken()
        if type(module) in broken:
            return "as with others of its kind"
        closed = _below(self.closed, path)
        if self.given and not path:
            scope = trace_scope(module, closed, broken, self.given)
            if isinstance(scope, Scope):
                return scope
        return trace_scope(module, closed, broken, {})

    def _broken(self) -> set[type[nn.Module]]:
        # What failed a few times fails always: a model may have hundreds of layers.
        return {kind for kind, times in self.broken.items() if times > 2}

    def _note(self, scope: Scope, path: str) -> None:
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
                self.visit(module, name, f"it is inside {name!r}, which stays closed")

    def _uncalled(self, scope: Scope, module: nn.Module, path: str, below: str) -> None:
        """Look into modules that the traced code never reached; they may be used otherwise."""
        for name, child in module.named_children():
            inner = _join(below, name)
            if inner not in scope.reached:
                self.visit(child, _join(path, inner), "nothing that could be traced calls it")
            elif inner not in scope.opaque and _join(path, inner) not in self.closed:
                self._uncalled(scope, child, path, inner)

    def _transformer_layer(self, module: nn.Module, path: str) -> None:
        """Read the layers of torch's own, which compute linear2(dropout(act(linear1(x))))."""
        first, second = names = [_join(path, name) for name in ("linear1", "linear2")]
        for name, child in module.named_children():
            if name not in ("linear1", "linear2"):
                self.visit(child, _join(path, name), f"it is inside {path!r}")
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
            self.seen.found.append(Found("mlp", (first,), between, second))


def _trouble_between(module: nn.Module, path: str, passed: list[str]) -> list[str]:
    """Say what in one of torch's own transformer layers is not as torch made it."""
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
    """Say why layers inside a module cannot be judged."""
    name = type(module).__name__
    if "Attention" in name:
        return f"it is inside attention ({path!r})"
    return f"the forward of {name} could not be traced ({error}); {_TRY}"


def _doubted(found: Found, why: str) -> Found:
    return found if found.doubt is not None else replace(found, doubt=why)


class _Probe(nn.Module):
    """Two layers with something between them, to find out whether neurons get through."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(2, 2, device="meta"), between
        self.second = nn.Linear(2, 2, device="meta")

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def _bends(activation: Any) -> bool:
    """Tell whether a function or module acts on every number alone."""
    probe = _Probe(activation)
    scope = trace_scope(probe, closed_leaves(probe), set(), {})
    return isinstance(scope, Scope) and bool(follow(scope, "", {}).found)


def _is_read(node: fx.Node) -> bool:
    """Tell a parameter that is used from one that is only asked for its dtype or device."""
    plain = ("dtype", "device", "requires_grad")
    return any(user.target is not getattr or user.args[1] not in plain for user in node.users)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _below(names: set[str], path: str) -> set[str]:
    """Keep what is below a path, named from there."""
    start = f"{path}." if path else ""
    return {name.removeprefix(start) for name in names if name.startswith(start)}
