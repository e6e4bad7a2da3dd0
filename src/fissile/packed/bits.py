"""Numbers as bit patterns: weights that end in bits of our choice, and bits in bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from fissile._common.errors import FissileError
from fissile._common.shapes import Bool, Float, Int

__all__ = [
    "MANTISSA",
    "ending_in",
    "exists",
    "from_bytes",
    "low_bits",
    "owner_bits",
    "pattern_of",
    "to_bytes",
]

#: The dtypes a weight may be packed in, and the bits of their mantissas.
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}

_WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
#: Numbers that are rounded at a time, so that a large layer needs no multiple of its memory.
_CHUNK = 2**22


def owner_bits(alpha: int) -> int:
    """Return how many bits name one of ``alpha`` children.

    >>> [owner_bits(alpha) for alpha in (1, 2, 3, 4, 8)]
    [0, 1, 2, 2, 3]
    """
    return (alpha - 1).bit_length()


def pattern_of(weight: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """View numbers as the integers their bits make."""
    return weight.detach().view(_WORDS[weight.dtype])


def exists(weight: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Tell which weights are there: a removed one is all zero bits, a living zero is -0.0."""
    return pattern_of(weight) != 0


def low_bits(weight: Float[Tensor, "*shape"], count: int) -> Int[Tensor, "*shape"]:
    """Return the lowest bits of every number.

    >>> low_bits(torch.tensor([1.0]), 3)
    tensor([0], dtype=torch.int32)
    """
    return pattern_of(weight) & ((1 << count) - 1)


def ending_in(
    low: Int[Tensor, " numbers"],
    count: int | Int[Tensor, " numbers"],
    weight: Float[Tensor, " numbers"],
    dtype: torch.dtype,
) -> Float[Tensor, " numbers"]:
    """Return the nearest numbers of a dtype whose lowest ``count`` bits are ``low``.

    >>> ending_in(torch.tensor([1]), 1, torch.tensor([1.0]), torch.float16)
    tensor([0.9995], dtype=torch.float16)

    What would be zero comes back as -0.0, so that no living weight is all zero bits; nothing
    finite becomes infinite. A weight that has the bits already is left as it is.
    """
    counts = torch.as_tensor(count, device=weight.device).expand(weight.shape)
    found = torch.empty_like(weight, dtype=dtype, requires_grad=False)
    for begin in range(0, len(weight), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        found[part] = _nearest(low[part], counts[part], weight.detach()[part], dtype)
    return found


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
    """Put eight bits into a byte, the first the lowest; the last byte is filled with zeros.

    >>> to_bytes(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    count = bits.shape[-1]
    byte = bits.new_zeros(*bits.shape[:-1], -(-count // 8), dtype=torch.uint8)
    for place in range(min(count, 8)):
        every = bits[..., place::8]
        byte[..., : every.shape[-1]] |= every.to(torch.uint8) << place
    return byte


def from_bytes(packed: Int[Tensor, "*batch bytes"], n: int) -> Bool[Tensor, "*batch n"]:
    """Take ``n`` bits out of bytes again."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1) >> places
    bits &= 1
    return bits.flatten(-2)[..., :n].bool()
