"""The recipe of a packed file in few bytes: a head of some thousand weights is no larger than one.

It is JSON, deflated with a dictionary of what recipes are made of, in 85 printable characters.
"""

from __future__ import annotations

import base64
import zlib

from fissile._common.errors import FileError

__all__ = ["NEWER", "lengthened", "opened", "sealed", "shortened"]

#: What to say of a file that this version knows nothing about.
NEWER = "written by a newer fissile; update it"

#: Part of the format: what it holds must never change, or files can no longer be read.
_WORDS = (
    b'"transposed":true,"partitioned-conv","masked-conv","layer_norm":true,"embedding":512,'
    b'"settings":{"approximate":"none"}},"name":"gelu","name":"silu","layout":"plane","group":8'
    b'"model.layers.0.mlp.gate_proj":"encoder.layer.0.intermediate.dense":"output.dense",'
    b'"frozen":["layers.0.weight","layers.0.bias"],"norms":{"layers.1":'
    b'{"version":1,"mlp":{"sizes":[784,512,100,32,10],"embedding":null,"layer_norm":false,'
    b'"dropout":0.0,"activation":{"name":"relu","settings":{"inplace":false}}},"frozen":[],'
    b'"layers":{"layers.0":{"kind":"partitioned","inputs":512,"outputs":128,"alpha":4,'
    b'"layout":"inline"},"layers.2":{"kind":"masked","inputs":128,"outputs":100,'
    b'"layout":"inline","group":4}},"norms":{},"pairs":[{"firsts":["layers.0"],"between":[],'
    b'"second":"layers.2"}],"crc32":'
)
#: The first character of a shortened recipe, and those of one that is not; others are yet to come.
_MARK, _PLAIN = "z", frozenset("{[ 0123456789abcdef")
#: No recipe is longer, nor so many times longer than what it was shortened to: reading JSON takes
#: up to 25 times its length, and a small file shall not ask for much memory.
_LONGEST, _ALWAYS, _TIMES = 2**24, 2**20, 64


def shortened(text: str) -> str:
    """Write a recipe in fewer characters, if it can be lengthened again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, _WORDS)
    raw = text.encode()
    short = _MARK + base64.b85encode(packer.compress(raw) + packer.flush()).decode()
    return short if len(raw) <= _most(short) else text


def lengthened(text: str) -> str:
    """Return a recipe as it was, shortened or not; a damaged one is a ``ValueError``."""
    if not text or text[0] in _PLAIN:
        return text
    if text[0] != _MARK:
        raise FileError(f"its recipe begins with {text[0]!r}: {NEWER}")
    unpacker = zlib.decompressobj(-15, _WORDS)
    try:
        whole = unpacker.decompress(base64.b85decode(text[1:]), _most(text))
    except zlib.error as error:
        raise ValueError(f"it is not deflated: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it does not end where it should")
    return whole.decode()


def sealed(text: str) -> str:
    """Put a checksum before a recipe, in which one letter may make another activation."""
    return f"{zlib.crc32(text.encode()):08x}{text}"


def opened(text: str) -> str:
    """Return a recipe, sealed or not; one that has changed since is a ``ValueError``."""
    if text[:1] in ("{", "[", " ", ""):
        return text
    if sealed(text[8:]) != text:
        raise ValueError("its checksum differs")
    return text[8:]


def _most(short: str) -> int:
    return min(_LONGEST, _ALWAYS + _TIMES * len(short))
