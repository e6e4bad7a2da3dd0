"""What a features file is called, so that the catalogue finds it."""

from __future__ import annotations

import re

__all__ = ["stem"]


#: What the catalogue calls an encoder that has another name.
_SHORT = {"all-MiniLM-L6-v2": "minilm"}


def stem(
    source: str, encoder: str, width: int, *, pca: int | None = None, normalize: bool = False
) -> str:
    """Return a name for features: the set, the encoder by its name, and how many there are.

    >>> stem("cifar100", "open_clip:ViT-B-16/openai", 512)
    'cifar100-clip-vit-b-16'
    >>> stem("cifar100", "open_clip:ViT-L-14/openai", 768, pca=512)
    'cifar100-clip-vit-l-14-768-pca512'
    >>> stem("cifar100", "efficientnet_lite:2", 1280, pca=512)
    'cifar100-efficientnet-lite2-512'
    """
    encoder = _SHORT.get(encoder, encoder)
    family, _, rest = encoder.partition(":")
    if family == "open_clip":
        # The paper's encoder has the short name; it always gives 512 features.
        words = f"clip-{rest.removesuffix('/openai')}" + ("" if width == 512 else f"-{width}")
    elif family == "efficientnet_lite":
        # Fewer than there are can only be components; the catalogue calls them so.
        width, pca = (pca, None) if pca is not None and pca < width else (width, pca)
        words = f"efficientnet-lite{rest}-{width}"
    else:
        words = f"{encoder}-{width}"
    words = f"{source}-{words}" + ("" if pca is None else f"-pca{pca}")
    words += "-unit" if normalize else ""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
