"""What a tensor carries on the way from one layer to the next: neurons, halves, their number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

__all__ = ["Halves", "Span", "Stream", "gate_trouble", "merged"]


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
    doubt: str | None = None  # why only a try-out can tell whether the code widens along

    @property
    def whole(self) -> bool:
        """Whether these are all neurons of one layer and nothing else."""
        return len(self.roots) == 1 and self.half is None and not self.fused

    def through(self, name: str, active: bool = False) -> Stream:
        """Return the stream after it passed a module."""
        between = tuple(dict.fromkeys((*self.between, name)))
        return replace(self, between=between, active=self.active or active)

    def alike(self, other: Stream) -> bool:
        """Tell whether another stream has the same neurons in the same order."""
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


@dataclass(frozen=True)
class Span:
    """A stream's shape (``parts`` is None), its width (1) or half of that (2), as a number."""

    stream: Stream
    parts: int | None


def merged(streams: list[Stream], active: bool) -> Stream:
    """Return the first of several streams with all that any of them has passed."""
    between = dict.fromkeys(name for stream in streams for name in stream.between)
    doubt = next((stream.doubt for stream in streams if stream.doubt), None)
    active = active or any(stream.active for stream in streams)
    return replace(streams[0], between=tuple(between), active=active, doubt=doubt)


def gate_trouble(one: Stream, other: Stream) -> str | None:
    """Say why two different streams that are multiplied are not gate and up; None if they are."""
    if not (one.whole and other.whole) or one.conv or other.conv or one.width != other.width:
        return "its output is multiplied with other neurons, and they are not gate and up"
    if one.roots[0].all_input_nodes[:1] != other.roots[0].all_input_nodes[:1]:
        return "it is multiplied like gate and up with a layer that reads a different input"
    return None
