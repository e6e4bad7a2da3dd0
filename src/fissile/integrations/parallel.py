"""Data parallel training of expanded models: expand first, wrap afterwards.

Every rank expands the same weights with the same seed, makes sure that all ranks came to the same
expansion, and wraps the result, in ``DistributedDataParallel`` or ``fully_shard``::

    wide = fissile.expand(model, 2, seed=0)
    check_same(wide)
    parallel = DistributedDataParallel(wide)

By default the owners and masks, which are buffers, are sent around at every step; a model without
batch norms is as well off with ``broadcast_buffers=False``.

In the middle of a run, unwrap, expand together with the optimizer, and wrap again::

    wide = fissile.expand(parallel.module, 2, optimizer=adam)
    check_same(wide)
    parallel = DistributedDataParallel(wide)

A model that was sharded (``fully_shard``) has no whole weights to rank, and is not expanded: expand
it before, or save it, load it unsharded, expand and shard again.
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

    >>> check_same(fissile.expand(model, 2))  # before DistributedDataParallel or fully_shard

    Compared are the owners and masks, and the names and shapes of all tensors, not the weights.
    A wrapper that makes the weights of all ranks equal does not do so with the moments of an
    optimizer that was carried along, and ``fully_shard`` with nothing: the ranks would drift apart
    unseen. Without a process group there is nothing to compare.
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
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            yield name, f"{tuple(tensor.shape)} {tensor.dtype}"
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer):
            for key, buffer in layer.named_buffers(recurse=False):
                yield f"{name}.{key}".lstrip("."), _digest(buffer)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    return f"{tuple(values.shape)} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"
