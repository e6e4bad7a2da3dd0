"""The gradient of the mean cross-entropy with respect to the logits, for many networks at once.

Twice: in plain PyTorch, and as one Triton kernel, since small networks wait for launches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fissile._common.shapes import Float

__all__ = ["error"]


def error(
    logits: Float[Tensor, "networks outputs batch"],
    targets: Float[Tensor, "seeds outputs batch"],
    smooth: Float[Tensor, " networks"],
) -> Float[Tensor, "networks outputs batch"]:
    """Return how far every output is off, over the batch; a share of each label is spread evenly.

    The networks of a seed lie side by side. One output is a logit of yes against no.
    """
    if logits.is_cuda and logits.shape[1] > 1:
        return _on_gpu(logits, targets, smooth)
    return _plain(logits, targets, smooth)


def _plain(logits: Tensor, targets: Tensor, smooth: Tensor) -> Tensor:
    wanted = targets.repeat_interleave(len(logits) // len(targets), 0)
    spread, outputs = smooth.view(-1, 1, 1), logits.shape[1]
    wanted = wanted * (1 - spread) + spread / max(2, outputs)
    found = logits.sigmoid() if outputs == 1 else logits.softmax(1)
    return (found - wanted) / logits.shape[-1]


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        logits, targets, smooth, found, plans, outputs, batch,
        WIDE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        network = tl.program_id(0).to(tl.int64)
        rows = tl.arange(0, WIDE)[:, None]
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        here = (rows < outputs) & (columns < batch)
        at = rows * batch + columns
        size = outputs * batch
        z = tl.load(logits + network * size + at, here, float("-inf"))
        z = tl.where(columns < batch, z, 0.0)  # no column may be empty
        e = tl.exp(z - tl.max(z, 0)[None, :])
        share = e / tl.sum(e, 0)[None, :]
        y = tl.load(targets + network // plans * size + at, here, 0.0)
        spread = tl.load(smooth + network)
        off = (share - y * (1 - spread) - spread / outputs) / batch
        tl.store(found + network * size + at, off, here)

    return kernel


def _on_gpu(logits: Tensor, targets: Tensor, smooth: Tensor) -> Tensor:
    networks, outputs, batch = logits.shape
    found = torch.empty_like(logits, memory_format=torch.contiguous_format)
    wide = 1 << (outputs - 1).bit_length()
    block = max(4, min(64, 4096 // wide))
    _kernel()[(networks, -(-batch // block))](
        logits.contiguous(), targets.contiguous(), smooth, found, networks // len(targets),
        outputs, batch, wide, block,
    )  # fmt: skip
    return found
