"""The optimizer across the split: it goes on, on the new parameters, with what it has learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fissile.errors import FissileError

__all__ = ["Move", "carry", "check_optimizer"]

_KNOWN = (SGD, Adam, AdamW)


@dataclass(frozen=True)
class Move:
    """What became of a parameter, and how to carry a tensor of its shape along.

    Surviving weights keep their moments, removed ones drop them, children inherit the parent's.
    """

    old: nn.Parameter
    new: nn.Parameter
    how: Callable[[Tensor], Tensor]


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return the optimizer, unwrapped; refuse one whose state we could not carry over."""
    if type(optimizer) not in _KNOWN:  # accelerate wraps the one that holds the state
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if type(optimizer) not in _KNOWN:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise FissileError(
            f"cannot carry the state of {type(optimizer).__name__} across the split (known: "
            f"{known}); expand without optimizer= and make a new one"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise FissileError("the optimizer holds none of this model's parameters")
    return optimizer


def carry(optimizer: Optimizer, moves: Sequence[Move]) -> None:
    """Point the optimizer at the new parameters, in place, so that schedulers keep working."""
    by_old = {id(move.old): move for move in moves}
    for group in optimizer.param_groups:
        group["params"] = [by_old[id(p)].new if id(p) in by_old else p for p in group["params"]]
    for move in moves:
        if move.old in optimizer.state:
            state = optimizer.state.pop(move.old)
            optimizer.state[move.new] = {k: _carried(k, v, move) for k, v in state.items()}


def _carried(key: str, value: Any, move: Move) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.shape != move.old.shape:  # a count, not a moment of each weight
        return value.clone()
    return move.how(value).clone()
