"""What a features file is called, so that the catalogue finds it."""

from __future__ import annotations

import re

__all__ = ["stem"]


def stem(source: str, encoder: str, width: int, *, normalize: bool = False) -> str:
    """Return a name for features: the set, the encoder, and how many there are.

    >>> stem("cifar100", "open_clip:ViT-B-16/openai", 512)
    'cifar100-clip-vit-b-16'
    >>> stem("cifar100", "efficientnet_lite:2", 512)
    'cifar100-efficientnet-lite2-512'
    """
    family, _, rest = encoder.partition(":")
    if family == "open_clip":
        # The paper's encoder has the short name; it always gives 512 features.
        words = f"clip-{rest.removesuffix('/openai')}" + ("" if width == 512 else f"-{width}")
    elif family == "efficientnet_lite":
        words = f"efficientnet-lite{rest}-{width}"
    else:
        words = f"{encoder}-{width}"
    words = f"{source}-{words}" + ("-unit" if normalize else "")
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
