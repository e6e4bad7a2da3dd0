"""Shape-typed annotations: checked by jaxtyping where it is installed, documentation elsewhere.

>>> def bias_of(layer: nn.Linear) -> Float[Tensor, " neurons"]:
...     return layer.bias
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

__all__ = ["Bool", "Float", "Int", "brief"]


def brief(thing: Any) -> str:
    """Return a dataclass as one line: arrays by their type and shape, long lists by their length.

    >>> brief(Samples(x=torch.zeros(9, 2), y=torch.zeros(9), bits=torch.ones(9, 2).bool()))
    'Samples(x=float32[9, 2], y=float32[9], bits=bool[9, 2])'
    """
    shown = []
    for name, value in vars(thing).items():
        text = repr(value)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        elif len(text) > 60 and isinstance(value, list | tuple):
            text = f"<{len(value)} of {type(value[0]).__name__}>"
        shown.append(f"{name}={text}")
    return f"{type(thing).__name__}({', '.join(shown)})"
