"""Fused layers: one matrix whose neurons are cut into two halves, gate and up."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from fissile.discovery.flow import Halves, Span, Stream
from fissile.discovery.ops import role_of

__all__ = ["halves_of", "is_interleaved", "span_of"]

_FIXED = (
    "its halves are cut at a fixed width, which may not widen along; write chunk(2, -1), or pass "
    "example_inputs to have it tried out"
)


def halves_of(node: fx.Node, tag: Any, tags: dict[fx.Node, Any]) -> Halves | Stream | None:
    """Return what a cut in two or the taking of a half yields; None for anything else.

    Args:
        node: a function or method call.
        tag: what its first argument carries.
        tags: what other nodes carry, for bounds that are computed from the width.
    """
    if isinstance(tag, Halves):
        which = node.args[1] if node.target is operator.getitem else None
        return tag.stream.taken(which % 2) if isinstance(which, int) and -2 <= which < 2 else None
    if not isinstance(tag, Stream) or not tag.whole or tag.conv or tag.width % 2:
        return None
    role = role_of(node)
    if role == "glu":
        return tag.joined() if _argument(node, 1, "dim", -1) == -1 else None
    if role == "cut":
        return _cut(node, tag)
    return _slice(node.args[1], tag, tags) if node.target is operator.getitem else None


def is_interleaved(node: fx.Node) -> bool:
    """Tell ``x[..., ::2]``, which takes every second neuron."""
    index = node.args[1] if node.target is operator.getitem else None
    last = index[-1] if isinstance(index, tuple) and index else index
    return isinstance(last, slice) and last.step not in (None, 1)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _cut(node: fx.Node, stream: Stream) -> Halves | None:
    """Cut with ``chunk(2, -1)``, or with a number or list of sizes that is half the width."""
    if _argument(node, 2, "dim", 0) != -1:
        return None
    name = str(getattr(node.target, "__name__", node.target))
    sizes = [value for key, value in node.kwargs.items() if key not in ("dim", "input")]
    size = node.args[1] if len(node.args) > 1 else next(iter(sizes), None)
    if name in ("chunk", "tensor_split") and size == 2:
        return Halves(stream)
    half = stream.width // 2
    fixed = (half, [half, half]) if name.startswith("split") else ([half],)
    size = list(size) if isinstance(size, list | tuple) else size
    return Halves(replace(stream, doubt=_FIXED)) if size in fixed else None


def _slice(index: Any, stream: Stream, tags: dict[fx.Node, Any]) -> Stream | None:
    """Take ``x[..., :h]`` or ``x[..., h:]``, with h a number or half of the width as read."""
    parts = index if isinstance(index, tuple) else (index,)
    last = parts[-1] if parts else None
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if any(part not in (..., slice(None)) for part in parts[:-1]):
        return None
    half = stream.width // 2
    bounds = [_bound(one, tags) for one in (last.start, last.stop)]
    doubt = _FIXED if half in bounds else stream.doubt
    start, stop = ("half" if one == half else one for one in bounds)
    if start in (None, 0) and stop == "half":
        return replace(stream.taken(0), doubt=doubt)
    if start == "half" and stop in (None, stream.width):
        return replace(stream.taken(1), doubt=doubt)
    return None


def _bound(bound: Any, tags: dict[fx.Node, Any]) -> Any:
    if not isinstance(bound, fx.Node):
        return bound
    span = tags.get(bound)
    parts = span.parts if isinstance(span, Span) else None
    return {1: None, 2: "half"}.get(parts or 0, "unknown")


def span_of(node: fx.Node, tag: Any) -> Span | None:
    """Return a stream's shape, its width, or half of it; None for anything else."""
    if isinstance(tag, Span):
        if tag.parts is None and node.target is operator.getitem and node.args[1] == -1:
            return Span(tag.stream, 1)
        halved = node.target is operator.floordiv and node.args[1] == 2
        return Span(tag.stream, 2) if tag.parts == 1 and halved else None
    if not isinstance(tag, Stream):
        return None
    if node.target is getattr and node.args[1] == "shape":
        return Span(tag, None)
    sized = node.op == "call_method" and node.target == "size" and not node.kwargs
    if sized and node.args[1:] in ((), (-1,)):
        return Span(tag, 1 if node.args[1:] else None)
    return None
