"""Guesses for code that cannot be traced: layers in the order in which they were registered."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fissile.discovery.follow import Found
from fissile.discovery.module_checks import (
    has_hooks,
    is_layer,
    is_norm,
    norm_trouble,
    passes_channels,
    passes_silently,
    sizes_of,
)
from fissile.discovery.place import Kind
from fissile.layers.mlp import is_elementwise

__all__ = ["guesses"]


def guesses(
    model: nn.Module, paths: list[str], trouble: dict[str, str], reasons: dict[str, str]
) -> list[Found]:
    """Guess places among the children of modules whose forward could not be traced.

    Two layers with norms, dropout and an activation listed between them look like a place; whether
    they are one, only a try-out can tell.
    """
    found: list[Found] = []
    for path in paths:
        start = f"{path}." if path else ""
        children = [(start + n, m) for n, m in model.get_submodule(path).named_children()]
        layers = [i for i, (_, module) in enumerate(children) if is_layer(module)]
        for here, after in pairwise(layers):
            first, second = children[here], children[after]
            if first[0] in trouble or second[0] in trouble:
                continue
            between = children[here + 1 : after]
            if _looks_right(first[1], between, second[1]):
                passed = tuple(name for name, _ in between)
                kind: Kind = "conv" if isinstance(first[1], nn.Conv2d) else "mlp"
                doubt = reasons.get(first[0], "its forward could not be traced")
                found.append(Found(kind, (first[0],), passed, second[0], doubt))
    return found


def _looks_right(first: nn.Module, between: list[tuple[str, nn.Module]], second: nn.Module) -> bool:
    width, conv = sizes_of(first)[1], isinstance(first, nn.Conv2d)
    if isinstance(second, nn.Conv2d) is not conv or sizes_of(second)[0] != width:
        return False
    active = False
    for _, module in between:
        if has_hooks(module):
            return False
        if is_norm(module):
            if norm_trouble(module, width, conv) is not None:
                return False
            active = active or isinstance(module, nn.PReLU)
        elif not passes_silently(module) and not (conv and passes_channels(module)):
            if not is_elementwise(module):
                return False
            active = True
    return active
