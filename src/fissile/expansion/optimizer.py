"""The optimizer across the split: it goes on, on the new parameters, with what it has learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fissile._common.errors import FissileError


@dataclass
class Moments:
    """The state of an Adam whose steps somebody else does, as the engines of a bank do.

    >>> moments = Moments.of(model.parameters())
    >>> wide = expand(model, 2, optimizer=moments)

    Parameters and state are kept as an optimizer keeps them. A real Adam would import PyTorch's
    compiler when it is made, which takes over a second.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> Moments:
        return cls([{"params": list(parameters)}], {})


_KNOWN = (SGD, Adam, AdamW, Moments)
#: An optimizer, or its state alone.
Held = TypeVar("Held", bound=Optimizer | Moments)


@dataclass(frozen=True)
class Move:
    """What became of a parameter, and how to carry a tensor of its shape along.

    Surviving weights keep their moments, removed ones drop them, children inherit the parent's.
    """

    old: nn.Parameter
    new: nn.Parameter
    how: Callable[[Tensor], Tensor]


def check_optimizer(optimizer: Held, model: nn.Module) -> Held:
    """Return the optimizer, unwrapped; refuse one whose state cannot be carried over."""
    if type(optimizer) not in _KNOWN:  # accelerate wraps the one that holds the state
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if type(optimizer) not in _KNOWN:
        raise FissileError(
            f"cannot carry the state of {type(optimizer).__name__} across the split (known: SGD, "
            "Adam, AdamW); expand without optimizer= and make a new one"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise FissileError("the optimizer holds none of this model's parameters")
    return optimizer


def carried(optimizer: Optimizer | Moments, moves: Sequence[Move]) -> Callable[[], None]:
    """Work out what the optimizer holds after the moves; the answer, called, changes it in place.

    In place, so that schedulers keep working; in two steps, so that nothing changes by halves.
    """
    by_old = {id(move.old): move.new for move in moves}
    groups = [[by_old.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]
    states = {
        move: {key: _carried(key, value, move) for key, value in optimizer.state[move.old].items()}
        for move in moves
        if move.old in optimizer.state
    }

    def change() -> None:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for move, state in states.items():
            del optimizer.state[move.old]
            optimizer.state[move.new] = state

    return change


def _carried(key: str, value: Any, move: Move) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.shape != move.old.shape:  # a count, not a moment of each weight
        return value.clone()
    return move.how(value).clone()
