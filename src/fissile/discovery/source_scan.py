"""Code that cannot be traced, read instead: what it does with the modules below it.

A module that is called as a whole keeps its wiring, whatever surrounds the call. Code that reaches
into it, as ``self.body[0](x)`` or ``self.body[0].weight`` does, may use its neurons elsewhere.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from fissile.discovery.meta_copy import WIDTHS

__all__ = ["Reach", "reach"]

_LISTING = {"enumerate", "zip", "reversed", "list", "tuple", "iter", "sorted"}
_ASKING = {"isinstance", "hasattr", "getattr", "len", "callable", "type", "bool", "super", "next"}
_CHILDREN = {"children", "named_children", "_modules", "values", "items"}  # of a list's too
_ALL = {"modules", "named_modules", "get_submodule", "__dict__"}
_HARMLESS = {"dtype", "device", "requires_grad", "is_cuda", "is_meta"}
_HANDING = ast.Call | ast.keyword | ast.Return | ast.Dict | ast.Starred


class Reach:
    """What the code of a module does with those below it, all by id.

    ``touched`` are modules used in other ways than being called; ``called`` has for every call of
    a module what it takes in, the module and all below; ``passed`` are arguments with a default
    that modules are called with, where None stands for a value that is not known.
    """

    def __init__(self) -> None:
        self.touched: set[int] = set()
        self.called: list[set[int]] = []
        self.passed: dict[int, dict[str, Any]] = {}

    def touch(self, modules: Iterable[nn.Module]) -> None:
        """Note modules with all that is below them."""
        for module in modules:
            self.touched |= _ids(module)

    def also(self, other: Reach) -> None:
        """Add what was found elsewhere."""
        self.touched |= other.touched
        self.called += other.called
        self.passed |= other.passed

    def parts_used(self, modules: list[nn.Module]) -> bool:
        """Tell whether some of these modules are used without the others."""
        parts = {id(module) for module in modules}
        cut = any(0 < len(parts & call) < len(parts) for call in self.called)
        return cut or not parts.isdisjoint(self.touched)


def _ids(module: nn.Module) -> set[int]:
    return {id(part) for part in module.modules()}


def reach(module: nn.Module) -> Reach:
    """Read a module's forward and the methods it uses; without their source, expect everything."""
    found, read, unread = Reach(), set[str](), ["forward"]
    while unread:
        name = unread.pop()
        if name in read:
            continue
        read.add(name)
        for function in _definitions(module, name):
            tree = _tree(function)
            if tree is None:
                found.touch(module.children())
            else:
                unread += _Reader(module, tree, found).run()
    if "forward" in vars(module):
        found.touch(module.children())
    return found


def _definitions(module: nn.Module, name: str) -> Iterator[Any]:
    """Yield a method as every class of a module's line defines it, for one may call the next."""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return
        if name in vars(kind) and not isinstance(vars(kind)[name], staticmethod):  # knows no self
            yield vars(kind)[name]


@lru_cache(maxsize=1024)
def _tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) and tree.args.args else None


class _Reader:
    """Read one function: which expressions may be modules, and what is done with them."""

    def __init__(self, module: nn.Module, tree: ast.FunctionDef, found: Reach) -> None:
        self.module, self.tree, self.found = module, tree, found
        self.me = tree.args.args[0].arg
        self.names: dict[str, list[nn.Module]] = {}  # what a variable may be
        self.lists: dict[str, list[nn.Module]] = {}  # what one that is a list may hold
        self.above = {part: node for node in ast.walk(tree) for part in ast.iter_child_nodes(node)}

    def run(self) -> list[str]:
        """Note what the function does; return the module's own methods that it uses."""
        nodes = list(ast.walk(self.tree))
        for _ in range(2):  # a name may be used above the line that binds it
            for node in nodes:
                if isinstance(node, ast.For | ast.comprehension):
                    self._bind(node.target, self.names, self._items(node.iter))
                elif isinstance(node, ast.Assign | ast.NamedExpr):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._assign(target, node.value)
        for node in nodes:
            if isinstance(node, ast.expr):
                self._use(node, self.above[node])
        own = [n.attr for n in nodes if isinstance(n, ast.Attribute) and self._is_me(n.value)]
        return [name for name in own if callable(getattr(type(self.module), name, None))]

    def _is_me(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.me

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        look = self._modules
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                for one, part in zip(target.elts, value.elts, strict=True):
                    self._assign(one, part)
                return
            look = self._items
        self._bind(target, self.names, look(value))
        self._bind(target, self.lists, self._listed(value) or [])

    def _bind(
        self, target: ast.AST, names: dict[str, list[nn.Module]], modules: list[nn.Module]
    ) -> None:
        if isinstance(target, ast.Name):
            known = names.setdefault(target.id, [])
            known += [module for module in modules if all(module is not one for one in known)]
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one.value if isinstance(one, ast.Starred) else one, names, modules)

    def _modules(self, node: ast.expr) -> list[nn.Module]:
        """Return the modules that an expression may be."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, [])
        if isinstance(node, ast.Attribute):
            owners = [self.module] if self._is_me(node.value) else self._modules(node.value)
            inner = [owner._modules.get(node.attr) for owner in owners]
            return [module for module in inner if module is not None]
        if isinstance(node, ast.Subscript):
            return self._items(node.value)
        if isinstance(node, ast.Call) and _name(node.func) == "getattr" and node.args:
            return self._items(node.args[0])
        parts: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, ast.NamedExpr):
            parts = [node.value]
        return [module for part in parts for module in self._modules(part)]

    def _items(self, node: ast.expr) -> list[nn.Module]:
        """Return the modules that one gets by going through an expression, or by an index."""
        listed = self._listed(node)
        if listed is not None:
            return listed
        owners = [self.module] if self._is_me(node) else self._modules(node)
        return [part for owner in owners for part in owner.children()]

    def _listed(self, node: ast.expr) -> list[nn.Module] | None:
        """Return what a list of modules holds; None if the expression is not known as one."""
        if isinstance(node, ast.Name):
            return self.lists.get(node.id) or None
        if isinstance(node, ast.Tuple | ast.List):
            return [module for part in node.elts for module in self._modules(part)]
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._items(node.value)
        if isinstance(node, ast.ListComp):
            return self._modules(node.elt)
        if isinstance(node, ast.Attribute) and node.attr in _CHILDREN:  # or a call of it
            return self._items(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._listed(node.func)
        if isinstance(node, ast.Call) and _name(node.func) in _LISTING:
            return [module for part in node.args for module in self._items(part)]
        return None

    def _use(self, node: ast.expr, above: ast.AST) -> None:
        """Note what is done with an expression that is a module, or a list of them."""
        if self._is_me(node):
            if isinstance(above, _HANDING) or getattr(above, "attr", "") in _ALL:
                self._hand_on(list(self.module.children()), above)
            return
        modules = self._modules(node)
        if isinstance(above, ast.Attribute):
            for module in modules:
                self._ask(module, above)
        elif isinstance(above, ast.Call) and above.func is node:
            for module in modules:
                self._call(module, above)
        elif isinstance(above, ast.Assign):
            if not all(isinstance(one, ast.Name | ast.Tuple | ast.List) for one in above.targets):
                self.found.touch(modules)
        elif isinstance(above, _HANDING):
            self._hand_on([*modules, *(self._listed(node) or [])], above)

    def _ask(self, module: nn.Module, asked: ast.Attribute) -> None:
        """Note that code asks for something that a module has."""
        further = self.above[asked]
        if isinstance(further, ast.Attribute) and further.attr in _HARMLESS:
            return
        own = asked.attr in module._parameters or asked.attr in WIDTHS or asked.attr in _ALL
        if own or (asked.attr != "forward" and _uses_modules(module, asked.attr)):
            self.found.touch([module])

    def _hand_on(self, modules: list[nn.Module], above: ast.AST) -> None:
        """Note modules that are given to some function, unless that is known to do no harm."""
        call = self.above[above] if isinstance(above, ast.keyword) else above
        name = _name(call.func) if isinstance(call, ast.Call) else ""
        if name not in _LISTING | _ASKING and "checkpoint" not in name:
            self.found.touch(modules)

    def _call(self, module: nn.Module, call: ast.Call) -> None:
        self.found.called.append(_ids(module))
        known = inspect.signature(module.forward).parameters
        given = {one.arg: one.value for one in call.keywords if one.arg in known}
        if not any(isinstance(one, ast.Starred) for one in call.args):
            given |= dict(zip(known, call.args, strict=False))
        passed = self.found.passed.setdefault(id(module), {})
        for name, node in given.items():
            default = known[str(name)].default
            value = node.value if isinstance(node, ast.Constant) else None
            same = isinstance(node, ast.Constant) and value == default
            if isinstance(default, bool) and not same:
                passed[str(name)] = not default
            elif default is not inspect.Parameter.empty and not same:
                passed[str(name)] = value


def _name(function: ast.expr) -> str:
    """Return the last part of a function's name."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _uses_modules(module: nn.Module, name: str) -> bool:
    """Tell a method, other than forward, that uses the modules below."""
    for function in _definitions(module, name):
        tree = _tree(function) if callable(function) else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Attribute) and node.attr in module._modules:
                return True
    return False
