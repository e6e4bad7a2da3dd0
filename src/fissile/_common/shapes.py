"""Shape-typed annotations: checked by jaxtyping where it is installed, documentation elsewhere.

>>> def bias_of(layer: nn.Linear) -> Float[Tensor, " neurons"]:
...     return layer.bias
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:  # running the library must not need a shape checker

        class _Unchecked:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int"]
