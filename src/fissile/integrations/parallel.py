"""Data parallel training of expanded models: expand first, wrap afterwards.

Every rank expands the same weights with the same seed, checks that all ranks came to the same
expansion, and wraps the result, in ``DistributedDataParallel`` or ``fully_shard``. In the middle of
a run, expand ``parallel.module`` together with its optimizer and wrap it again. A model without
batch norms needs no ``broadcast_buffers``: only owners and masks are sent around. A sharded model
has no whole weights to rank, and is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import distributed, nn

from fissile._common.errors import FissileError
from fissile.layers import SparseLayer

__all__ = ["check_same"]


def check_same(model: nn.Module, group: distributed.ProcessGroup | None = None) -> None:
    """Raise an error, on every rank, unless all ranks hold the same expansion.

    >>> wide = fissile.expand(model, 2, seed=0)
    >>> check_same(wide)
    >>> parallel = DistributedDataParallel(wide)

    Owners and masks are compared, and the names and shapes of all tensors. Ranks that differ would
    drift apart unseen: a wrapper makes at most their weights equal, not the optimizer's moments.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    mine = dict(_fingerprints(model))
    ranks: list[dict[str, str]] = [{}] * distributed.get_world_size(group)
    distributed.all_gather_object(ranks, mine, group)
    for rank, other in enumerate(ranks):
        if other == ranks[0]:
            continue
        names = sorted(ranks[0].keys() | other.keys())
        first = next(name for name in names if ranks[0].get(name) != other.get(name))
        raise FissileError(
            f"the ranks hold different models: {first!r} of rank {rank} is not that of rank 0; "
            "give every rank the same weights and expand them with the same settings and seed"
        )


def _fingerprints(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Describe every tensor by its shape, and the structure of an expanded layer by a hash."""
    layers = [layer for layer in model.modules() if isinstance(layer, SparseLayer)]
    structure = {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            values = tensor.cpu().contiguous().numpy().tobytes() if id(tensor) in structure else b""
            digest = hashlib.sha256(values).hexdigest()
            yield name, f"{tuple(tensor.shape)} {tensor.dtype} {digest}"
