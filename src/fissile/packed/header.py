"""The recipe of a packed file in few bytes: a head of some thousand weights is no larger than one.

It is JSON, deflated with a dictionary of what recipes are made of, in 85 printable characters.
"""

from __future__ import annotations

import base64
import zlib

__all__ = ["lengthened", "shortened"]

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
#: The first character of a shortened recipe; JSON begins otherwise.
_MARK = "z"
#: No recipe is longer; what claims to be is not unpacked.
_LONGEST = 2**26


def shortened(text: str) -> str:
    """Write a recipe in fewer characters."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, _WORDS)
    return _MARK + base64.b85encode(packer.compress(text.encode()) + packer.flush()).decode()


def lengthened(text: str) -> str:
    """Return a recipe as it was, shortened or not; a damaged one is a ``ValueError``."""
    if not text.startswith(_MARK):
        return text
    unpacker = zlib.decompressobj(-15, _WORDS)
    try:
        whole = unpacker.decompress(base64.b85decode(text[1:]), _LONGEST)
    except zlib.error as error:
        raise ValueError(f"it is not deflated: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it does not end where it should")
    return whole.decode()
