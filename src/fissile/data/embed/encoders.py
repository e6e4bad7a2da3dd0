"""An encoder from a short text, such as ``open_clip:ViT-B-16/openai``."""

from __future__ import annotations

import torch

from fissile._common.errors import FissileError, needs
from fissile.data.embed.families import FAMILIES
from fissile.data.embed.frozen import Encoder
from fissile.data.embed.trouble import foreign

__all__ = ["EXAMPLES", "Encoder", "encoder"]

EXAMPLES = {
    "open_clip:ViT-B-16/openai": "images, CLIP; the paper's encoder",
    "open_clip:ViT-B-16-quickgelu/weights.safetensors": "the same from a file",
    "timm:NAME or timm:NAME@weights.safetensors": "images, a model of timm without its head",
    "efficientnet_lite:0": "images, 0 to 4; needs no network",
    "module:package.module:factory": "images, a torch module that your function makes",
    "minilm": "texts; needs no network",
    "sentence:NAME": "texts, a model of sentence-transformers by name or in a folder",
}


def encoder(spec: str, device: torch.device | str = "cpu", precision: str | None = None) -> Encoder:
    """Return a frozen encoder.

    >>> clip = encoder("open_clip:ViT-B-16/openai", device="cuda")
    >>> clip.width
    512

    Args:
        spec: which one; the examples are in ``EXAMPLES``.
        device: where it runs.
        precision: "float32", or "bfloat16" or "float16" for mixed precision; by default mixed
            precision on a GPU and floats elsewhere.
    """
    needs("PIL", "data")
    family, _, rest = spec.partition(":")
    if family not in FAMILIES:
        raise FissileError(f"there is no encoder {spec!r}; there are: {', '.join(EXAMPLES)}")
    with foreign(f"the encoder {spec} could not be made"):  # no network, no such model, no memory
        return FAMILIES[family](rest, {"device": device, "precision": precision})
