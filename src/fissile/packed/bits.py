"""Numbers as bit patterns, and where a model's weights are, written into their lowest bits.

A file of layout ``inline`` holds the weights that exist and nothing else. Their places are a stream
of bits: bit 0 of every weight, then bit 1, until the stream ends. The owners of a partitioned layer
lie in its own lowest bits; it carries a part of the stream only when all others carry as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fissile._common.errors import FileError, FissileError
from fissile._common.shapes import Bool, Float, Int

#: The dtypes a weight may be packed in, and the bits of their mantissas.
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}

#: The most bits of a mantissa that are given away: three of bfloat16, four of float16 are left.
MOST = {torch.float32: 12, torch.float16: 6, torch.bfloat16: 4}
_WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
#: Numbers that are rounded at a time, so that a large layer needs no multiple of its memory.
_CHUNK = 2**22
#: Counts in the stream have this many bits.
_COUNT = 40


def owner_bits(alpha: int) -> int:
    """Return how many bits name one of ``alpha`` children."""
    return (alpha - 1).bit_length()


def pattern_of(weight: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """View numbers as the integers their bits make."""
    return weight.detach().view(_WORDS[weight.dtype])


def exists(weight: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return which weights exist: a removed one is all zero bits, a living zero is -0.0."""
    return pattern_of(weight) != 0


def low_bits(weight: Float[Tensor, "*shape"], count: int) -> Int[Tensor, "*shape"]:
    """Return the lowest bits of every number."""
    return pattern_of(weight) & ((1 << count) - 1)


def ending_in(
    low: Int[Tensor, " numbers"], count: int | Int[Tensor, " numbers"],
    weight: Float[Tensor, " numbers"], dtype: torch.dtype,
) -> Float[Tensor, " numbers"]:  # fmt: skip
    """Return the nearest numbers of a dtype whose lowest ``count`` bits are ``low``.

    >>> ending_in(torch.tensor([1]), 1, torch.tensor([1.0]), torch.float16)
    tensor([0.9995], dtype=torch.float16)

    What would be zero comes back as -0.0, so that no living weight is all zero bits; nothing
    finite becomes infinite. A weight that has the bits already is left as it is.
    """
    counts = torch.as_tensor(count, device=weight.device).expand(weight.shape)
    nearest = torch.empty_like(weight, dtype=dtype, requires_grad=False)
    for begin in range(0, len(weight), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        nearest[part] = _nearest(low[part], counts[part], weight.detach()[part], dtype)
    return nearest


def _nearest(low: Tensor, count: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    plain = weight.to(dtype)
    if not bool(plain.isfinite().all()):
        raise FissileError(
            f"a weight is not finite in {dtype}; pack finite weights, or in another dtype"
        )
    words = plain.view(_WORDS[dtype]).int()
    most = plain.new_tensor(torch.finfo(dtype).max).view(_WORDS[dtype]).int()
    top = 1 << (torch.finfo(dtype).bits - 1)
    step = 1 << count.int()
    magnitude = words & (top - 1)
    middle = (magnitude & -step) | low.int()
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    wanted = weight.abs().to(wide)
    best, least = middle, torch.full_like(wanted, torch.inf)
    for candidate in (middle, middle - step, middle + step):
        fits = (candidate >= 0) & (candidate <= most)
        value = torch.where(fits, candidate, 0).to(_WORDS[dtype]).view(dtype).to(wide)
        distance = torch.where(fits, (value - wanted).abs(), torch.inf)
        closer = distance < least
        best, least = torch.where(closer, candidate, best), torch.where(closer, distance, least)
    negative = (words < 0) | (best == 0)
    # The top bit is the sign; in 32 bits, and cut to 16, it is the lowest number there is.
    signed = torch.where(negative, best - top, best)
    return signed.to(_WORDS[dtype]).view(dtype)


def to_bytes(bits: Bool[Tensor, "*batch n"]) -> Int[Tensor, "*batch bytes"]:
    """Put eight bits into a byte, the first the lowest; the last byte is filled with zeros."""
    count = bits.shape[-1]
    byte = bits.new_zeros(*bits.shape[:-1], -(-count // 8), dtype=torch.uint8)
    for place in range(min(count, 8)):
        every = bits[..., place::8]
        byte[..., : every.shape[-1]] |= every.to(torch.uint8) << place
    return byte


def from_bytes(packed: Int[Tensor, "*batch bytes"], n: int) -> Bool[Tensor, "*batch n"]:
    """Return the first ``n`` bits of bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1) >> shifts
    bits &= 1
    return bits.flatten(-2)[..., :n].bool()


# --- the stream of places


class Carrier(NamedTuple):
    """A layer's living weights, in order, and how many of their lowest bits are spoken for."""

    weight: Float[Tensor, " living"]
    owner_bits: int


def write_mask(mask: Bool[Tensor, " cells"]) -> Bool[Tensor, " bits"]:
    """Write down which places are taken; a reader knows how many there are and how many of them.

    The rarer kind is listed as Elias and Fano did, low bits apart from a unary code of the high
    ones; where that takes more than a bit for every place, the mask is written as it is.
    """
    cells, taken = len(mask), int(mask.count_nonzero())
    low, rare = _code(cells, taken), mask if 2 * taken <= cells else ~mask
    if low is None:
        return mask[:0] if taken in (0, cells) else mask
    at = rare.nonzero().squeeze(1)
    high = torch.zeros(len(at) + (cells >> low) + 1, dtype=torch.bool, device=mask.device)
    high[(at >> low) + torch.arange(len(at), device=mask.device)] = True
    return torch.cat([high, _digits(at, low).flatten()])


def read_mask(reader: Reader, cells: int, taken: int) -> Bool[Tensor, " cells"]:
    """Read what :func:`write_mask` wrote."""
    if not 0 <= taken <= cells:
        raise FileError(f"the pattern is damaged: {taken} weights in {cells} places")
    low = _code(cells, taken)
    if low is None:
        if taken in (0, cells):
            return torch.full((cells,), taken > 0, device="cpu")
        mask = reader.take(cells)
    else:
        count = min(taken, cells - taken)
        at = reader.take(count + (cells >> low) + 1).nonzero().squeeze(1)
        if len(at) != count:
            raise FileError("the pattern is damaged: it lists another number of places")
        at -= torch.arange(count, device=at.device)
        at = (at << low) | _number(reader.take(count * low), low)
        if bool((at >= cells).any()) or bool((at.diff() <= 0).any()):
            raise FileError("the pattern is damaged: its places are not in order")
        mask = torch.full((cells,), 2 * taken > cells, device="cpu")
        mask[at] = 2 * taken <= cells
    if int(mask.count_nonzero()) != taken:
        raise FileError("the pattern is damaged: it has another number of weights")
    return mask


def write_groups(mask: Bool[Tensor, "groups size"]) -> Bool[Tensor, " bits"]:
    """Write down a mask that is nearly all or nothing in groups."""
    some = mask.any(1)
    part = ~mask[some].all(1)
    counts = _digits(torch.stack([some.count_nonzero(), part.count_nonzero()]), _COUNT).flatten()
    return torch.cat([counts, write_mask(some), write_mask(part), mask[some][part].flatten()])


def read_groups(
    reader: Reader, groups: int, size: int, taken: int
) -> tuple[Bool[Tensor, " groups"], Bool[Tensor, "stored size"]]:
    """Return which groups are stored, and which of their weights exist."""
    stored, parts = _number(reader.take(2 * _COUNT), _COUNT).tolist()
    some = read_mask(reader, groups, stored)
    part = read_mask(reader, stored, parts)
    inside = torch.ones(stored, size, dtype=torch.bool, device="cpu")
    inside[part] = reader.take(parts * size).view(-1, size)
    if int(inside.count_nonzero()) != taken or not bool(inside.any(1).all()):
        raise FileError("the pattern is damaged: its groups do not fit the weights")
    return some, inside


def embedded(stream: Bool[Tensor, " bits"], carriers: Sequence[Carrier]) -> list[Tensor] | None:
    """Return the carriers' weights, rounded so that they end in their owners and the stream.

    None if it does not fit into what may be given away.
    """
    low = [low_bits(layer.weight, layer.owner_bits).long() for layer in carriers]
    count = [torch.full_like(low[k], layer.owner_bits) for k, layer in enumerate(carriers)]
    begin = 0
    for plane, k in _planes(carriers):
        if begin >= len(stream):
            break
        part = stream[begin : begin + len(low[k])]
        low[k][: len(part)] |= part.long() << plane
        count[k][: len(part)] = plane + 1
        begin += len(part)
    if begin < len(stream):
        return None
    weights = [layer.weight for layer in carriers]
    return [ending_in(low[k], count[k], x, x.dtype) for k, x in enumerate(weights)]


class Reader:
    """Takes a stream out of the weights again, from its beginning, or first out of ``bits``."""

    def __init__(
        self, carriers: Sequence[Carrier], bits: Bool[Tensor, " bits"] | None = None
    ) -> None:
        self._carriers = carriers
        self._planes = _planes(carriers)
        self._left = torch.zeros(0, dtype=torch.bool, device="cpu") if bits is None else bits

    def take(self, count: int) -> Bool[Tensor, " count"]:
        """Return the next bits of the stream."""
        parts, room = [self._left], count - len(self._left)
        while room > 0:
            plane, k = next(self._planes, (None, 0))
            if plane is None:
                raise FileError("the pattern is damaged: it is longer than the weights can hold")
            parts.append(low_bits(self._carriers[k].weight, plane + 1) >> plane != 0)
            room -= len(parts[-1])
        bits = torch.cat(parts)
        self._left = bits[count:]
        return bits[:count]


def _planes(carriers: Sequence[Carrier]) -> Iterator[tuple[int, int]]:
    """Go through the planes of all carriers, the lowest first."""
    for plane in range(max(MOST.values())):
        for k, layer in enumerate(carriers):
            if layer.owner_bits <= plane < MOST[layer.weight.dtype]:
                yield plane, k


def _code(cells: int, taken: int) -> int | None:
    """Return how many low bits are kept apart; None where a plain mask, or nothing, is shorter."""
    rare = min(taken, cells - taken)
    if rare == 0:
        return None
    high = max(0, (cells // rare).bit_length() - 1)
    costs = {low: rare * (low + 1) + (cells >> low) + 1 for low in (high, high - 1) if low >= 0}
    best = min(costs, key=lambda low: costs[low])
    return best if costs[best] < cells else None


def _digits(numbers: Int[Tensor, " n"], count: int) -> Bool[Tensor, "n count"]:
    return (numbers.unsqueeze(1) >> torch.arange(count, device=numbers.device)) & 1 != 0


def _number(bits: Bool[Tensor, " bits"], count: int) -> Int[Tensor, " n"]:
    """Return numbers of ``count`` bits each; a single zero if ``count`` is 0."""
    number = torch.zeros(len(bits) // count if count else 1, dtype=torch.long, device=bits.device)
    for place, digit in enumerate(bits.view(-1, count).unbind(1) if count else ()):
        number |= digit.long() << place
    return number
