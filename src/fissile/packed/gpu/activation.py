"""What every kernel does last: the activation."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finished"]


@triton.jit  # type: ignore[untyped-decorator]
def finished(a, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply an activation in float32; a NaN stays one, as in torch."""
    if ACTIVATION == "relu":
        a = tl.where(a <= 0, 0.0, a)
    elif ACTIVATION == "gelu":
        a = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif ACTIVATION == "silu":
        a = a * tl.sigmoid(a)
    return a
