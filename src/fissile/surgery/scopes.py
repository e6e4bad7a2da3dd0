"""Going through a whole model, scope by scope, and collecting what its graphs say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fissile.surgery.facts import has_hooks, is_layer, is_transformer_layer
from fissile.surgery.follow import Found, follow
from fissile.surgery.trace import Scope, closed_leaves, trace_scope

__all__ = ["Survey", "survey"]


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
    return surveyor.seen


class _Surveyor:
    def __init__(self, closed: set[str], trouble: dict[str, str], given: dict[str, Any]) -> None:
        self.closed, self.trouble, self.given = closed, trouble, given
        self.seen = Survey()
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
        elif path in self.closed:
            return
        elif type(module).forward is nn.Module.forward and "forward" not in vars(module):
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
            self._children(module, path, _hidden(module, path, scope))
            return
        wiring = follow(scope, path, self.trouble)
        self.seen.found += wiring.found
        for name, reason in wiring.reasons.items():
            self.seen.reasons.setdefault(name, reason)
        self._note(scope, path)
        self._uncalled(scope, module, path, "")

    def _scope(self, module: nn.Module, path: str) -> Scope | str:
        # What failed a few times fails always: a model may have hundreds of layers.
        broken = {kind for kind, times in self.broken.items() if times > 2}
        if type(module) in broken:
            return "as with others of its kind"
        closed = _below(self.closed, path)
        if self.given and not path:
            scope = trace_scope(module, closed, broken, self.given)
            if isinstance(scope, Scope):
                return scope
        return trace_scope(module, closed, broken, {})

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
        hooked = [name for name in passed if has_hooks(module.get_submodule(name))]
        trouble = [self.trouble[name] for name in names if name in self.trouble]
        if trouble:
            self.seen.reasons[first] = trouble[0]
        elif hooked:
            self.seen.reasons[first] = f"{_join(path, hooked[0])!r} has hooks; remove them"
        elif not _bends(module.activation):
            self.seen.reasons[first] = "its output goes through an activation that may mix neurons"
        else:
            between = tuple(_join(path, name) for name in passed)
            self.seen.found.append(Found("mlp", (first,), between, second))


def _hidden(module: nn.Module, path: str, error: str) -> str:
    """Say why layers inside a module cannot be judged."""
    name = type(module).__name__
    if "Attention" in name:
        return f"it is inside attention ({path!r})"
    return (
        f"the forward of {name} could not be traced ({error}); pass example_inputs to have it "
        "tried out"
    )


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
