"""The bank: many small networks trained as one program."""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Adam

from fissile._common.errors import FissileError, check_device, needs, whole
from fissile._common.progress import ProgressBar, number_of
from fissile._common.shapes import Float, Int, brief
from fissile.bank import engines
from fissile.bank.spec import Arm, Dense, Dynamic, Spec
from fissile.bank.stack import (
    Stack,
    concatenated,
    first_index,
    linear_layers,
    module_at,
    stacked_modules,
)
from fissile.layers import PartitionedLinear, SparseLinear, weight_of
from fissile.layers.mlp import MLP

_log = logging.getLogger("fissile")


@dataclass(frozen=True)
class Member:
    """A network of a bank: what it is, its arm, and which network it branched from.

    >>> [member.name for member in arms.members[:2]]
    ['dense', 'split']
    """

    spec: Spec
    arm: Arm
    name: str = ""
    origin: int | None = None


@dataclass(frozen=True)
class Group:
    """Networks of one shape, as a measure sees them: plain matrices, zeros for removed weights.

    >>> bank.measure(lambda group: group.w1.abs().sum((-2, -1)))
    """

    members: Int[Tensor, " networks"]
    weights: list[Float[Tensor, "networks outputs inputs"]]
    biases: list[Float[Tensor, "networks outputs"] | None]
    nonzeros: list[Int[Tensor, " networks"]]
    specs: list[Spec]
    first: int = 0  # which layer the paper calls W1: not an embedding in front

    __repr__ = brief

    @property
    def w1(self) -> Float[Tensor, "networks outputs inputs"]:
        """The weights of the first hidden layer."""
        return self.weights[self.first]


class Progress:
    """Shows how far a bank is, in the terminal (needs rich).

    >>> bank.train(until=25, progress=True)
    """

    @contextmanager
    def of(self, networks: int, epochs: int) -> Iterator[None]:
        """Show the bar while a bank trains ``epochs`` epochs, summed over its networks."""
        needs("rich", "bank")
        text = number_of(networks, "network")
        self._steps, self._since = 0, time.perf_counter()
        with ProgressBar(text, "epoch") as self._bar:
            self._bar.start(epochs)
            yield

    def advance(self, epochs: int, steps: int) -> None:
        """Count epochs and steps that are done."""
        self._steps += steps
        rate = self._steps / max(time.perf_counter() - self._since, 1e-9)
        self._bar.note = f"{rate:,.0f} steps/s"
        self._bar.advance(epochs)


class Quiet(Progress):
    """Shows nothing."""

    @contextmanager
    def of(self, networks: int, epochs: int) -> Iterator[None]:
        yield

    def advance(self, epochs: int, steps: int) -> None:
        """Do nothing."""


class Bank:
    """Many networks, each with its own shape, data, seed and recipe, trained together.

    >>> bank = Bank([Spec([32, 8, 1], data, seed=seed) for seed in range(500)])
    >>> bank.train(until=25)
    >>> bank.last.mean()  # test accuracy

    A network trains identically alone or in a bank: its seed alone decides its weights, the order
    of its batches and its splits.

    Args:
        specs: the networks.
        device: where to train.
        dtype: of the weights.
        engine: ``"auto"`` takes the fastest that can do a network; ``"plain"`` forces batched
            PyTorch.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        engine: str = "auto",
    ) -> None:
        if not specs:
            raise FissileError("a bank needs at least one network")
        if engine not in ("auto", "plain"):
            raise FissileError(f"unknown engine {engine!r}; use one of auto, plain")
        self.device, self.dtype, self.engine = check_device(device), dtype, engine
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, spec in enumerate(specs):
            shape = (tuple(spec.sizes), spec.embedding, spec.layer_norm, spec.activation)
            groups[shape, spec.recipe.batch, spec.data.shapes()].append(index)
        stacks = [Stack.of([specs[i] for i in group], group, dtype) for group in groups.values()]
        self._begin([Member(spec, Dense()) for spec in specs], stacks)

    def _begin(self, members: list[Member], stacks: list[Stack]) -> None:
        self.members = members
        self._stacks = _merged(stacks)
        self._accuracy: list[list[float]] = [[] for _ in members]
        self._loss: list[list[float]] = [[] for _ in members]

    def __len__(self) -> int:
        return len(self.members)

    # --- training

    def train(self, until: int, *, progress: bool | Progress = False) -> None:
        """Train every network up to an epoch; called again, it goes on where it stopped.

        Ctrl-C leaves every network at its last finished epoch. A network that diverges is frozen
        at its last finished epoch and listed in :attr:`diverged`; its curves end there. Where
        memory runs out, networks are trained in smaller parts.
        """
        until = whole("until", until, least=0)
        left = [stack for stack in self._stacks if stack.epoch < until]
        epochs = sum(len(stack) * (until - stack.epoch) for stack in left)
        bar = progress if isinstance(progress, Progress) else Progress() if progress else Quiet()
        before = set(self.diverged)

        def record(
            members: Sequence[int], accuracy: Sequence[Sequence[float]],
            loss: Sequence[Sequence[float]], steps: int,
        ) -> None:  # fmt: skip
            for member, curve, losses in zip(members, accuracy, loss, strict=True):
                self._accuracy[member].extend(curve)
                self._loss[member].extend(losses)
            bar.advance(sum(map(len, accuracy)), steps)

        with bar.of(networks=len(self), epochs=epochs), engines.deferred_sigint() as stop:
            try:
                engines.run(self._stacks, until, self.device, self.engine, record, stop)
            finally:
                self._stacks = _merged(self._stacks)
                if lost := [number for number in self.diverged if number not in before]:
                    names = ", ".join(map(str, lost[:10])) + (", ..." if lost[10:] else "")
                    _log.warning(
                        "%d of %d networks diverged and were frozen at their last finite epoch: %s",
                        len(lost), len(self), names,
                    )  # fmt: skip
            if stop.is_set():
                raise KeyboardInterrupt

    def branch(self, arms: Mapping[str, Arm]) -> Bank:
        """Return a bank in which every network goes on in each arm; this bank stays as it is.

        >>> arms = bank.branch({"dense": Dense(), "split": Expand(2)})
        >>> arms.train(until=50)
        >>> arms.last.view(len(bank), 2).mean(0)  # accuracy of each arm

        Network ``i`` in the arm number ``a`` is network ``i * len(arms) + a`` of the new bank. All
        arms of a network share its weights and moments at the split and see the same batches.
        """
        if not arms:
            raise FissileError("branch needs at least one arm")
        if len({stack.epoch for stack in self._stacks}) > 1:
            raise FissileError("some networks have not finished; call train() again first")
        members = [
            Member(member.spec, arm, name, origin)
            for origin, member in enumerate(self.members)
            for name, arm in arms.items()
        ]
        stacks = [
            stack.branch(arm, stack.members * len(arms) + number)
            for stack in self._stacks
            for number, arm in enumerate(arms.values())
        ]
        return self._like(members, stacks)

    def select(self, numbers: Sequence[int]) -> Bank:
        """Return a bank of some of the networks, in this order; this bank stays as it is.

        >>> bank.select([3, 5]).train(until=100)  # the others need no more
        """
        place = {number: i for i, number in enumerate(numbers)}
        if not place or len(place) < len(numbers) or not place.keys() <= set(range(len(self))):
            raise FissileError(
                f"select takes some of the networks 0 to {len(self) - 1}, each once; got "
                f"{list(numbers)}"
            )
        stacks = []
        for stack in self._stacks:
            members = stack.members.tolist()
            if rows := [row for row, number in enumerate(members) if number in place]:
                stacks.append(stack.select(rows))
                stacks[-1].members = torch.tensor([place[members[row]] for row in rows])
        return self._like([self.members[number] for number in numbers], stacks)

    def _like(self, members: list[Member], stacks: list[Stack]) -> Bank:
        bank = copy.copy(self)
        bank._begin(members, stacks)
        return bank

    # --- results

    @property
    def accuracy(self) -> Float[Tensor, "networks epochs"]:
        """The test accuracy after every epoch since the bank began.

        NaN where a network has not been trained yet, or has diverged.
        """
        return _table(self._accuracy)

    @property
    def loss(self) -> Float[Tensor, "networks epochs"]:
        """The mean training loss of every epoch since the bank began."""
        return _table(self._loss)

    @property
    def last(self) -> Float[Tensor, " networks"]:
        """The test accuracy after the last epoch; of a diverged network, the last it finished."""
        return torch.tensor([_finite(curve)[-1] for curve in self._accuracy])

    @property
    def best(self) -> Float[Tensor, " networks"]:
        """The test accuracy after the best epoch; chosen on the test set, as the paper does."""
        return torch.tensor([max(_finite(curve)) for curve in self._accuracy])

    @property
    def diverged(self) -> list[int]:
        """The numbers of the networks that diverged and were frozen."""
        return sorted(i for stack in self._stacks for i in stack.members[~stack.alive].tolist())

    @property
    def nonzeros(self) -> Int[Tensor, " networks"]:
        """The number of non-zero weights of every network: in expanded layers, those that exist."""
        return self.measure(lambda group: torch.stack(group.nonzeros).sum(0))

    @torch.no_grad()
    def measure(self, function: Callable[[Group], Tensor]) -> Tensor:
        """Evaluate a measure on all networks, shape by shape, and return it network by network.

        >>> bank.measure(lambda group: fissile.measure.cosine(group.w1))
        """
        results: dict[int, Tensor] = {}
        for stack in self._stacks:
            values = function(self._group(stack))
            for member, value in zip(stack.members.tolist(), values, strict=True):
                results[member] = value.cpu()
        return torch.stack([results[member] for member in range(len(self))])

    def _group(self, stack: Stack) -> Group:
        layers = linear_layers(stack.module)
        return Group(
            members=stack.members,
            weights=[weight_of(layer).detach().cpu() for layer in layers],
            biases=[None if m.bias is None else m.bias.detach().cpu() for m in layers],
            nonzeros=[_existing(layer) for layer in layers],
            specs=[self.members[i].spec for i in stack.members.tolist()],
            first=first_index(stack.module),
        )

    # --- networks in and out

    def take(self, index: int) -> tuple[nn.Module, Adam]:
        """Return a copy of a network as an ordinary module, and an Adam that goes on with it."""
        stack, row = self._find(index)
        module = module_at(stack.module, row).cpu()
        adam = Adam(module.parameters(), float(stack.hyper["lr"][row]))
        for new, old in zip(module.parameters(), stack.module.parameters(), strict=True):
            state = stack.adam.state[old]
            adam.state[new] = {k: v[row].clone().cpu() for k, v in state.items()}
        return module, adam

    def put(self, index: int, module: nn.Module, adam: Adam | None = None) -> None:
        """Put a network back, with its Adam or with fresh moments; its recipe stays the bank's."""
        old, row = self._find(index)
        spec = self.members[index].spec
        _check_module(module, spec, old.arm, adam)
        new = Stack.around(stacked_modules([module]).to(self.dtype), [spec], [index])
        new.epoch, new.arm, new.steps = old.epoch, old.arm, old.steps
        if adam is not None:
            for parameter, source in zip(new.module.parameters(), module.parameters(), strict=True):
                state = new.adam.state[parameter]
                for key in state.keys() & adam.state.get(source, {}).keys():
                    value = adam.state[source][key].detach()
                    state[key] = value.reshape(state[key].shape).to(state[key]).clone()
        new.to(next(old.module.parameters()).device)
        rest = [i for i in range(len(old)) if i != row]
        stacks = [stack for stack in self._stacks if stack is not old]
        self._stacks = _merged([*stacks, *([old.select(rest)] if rest else []), new])

    def _find(self, index: int) -> tuple[Stack, int]:
        for stack in self._stacks:
            for row in (stack.members == index).nonzero().flatten().tolist():
                return stack, row
        raise FissileError(f"there is no network {index}; the bank has {len(self)}")


def _check_module(module: nn.Module, spec: Spec, arm: Arm, adam: Adam | None) -> None:
    """Refuse a network that could not go on in its place."""
    if not isinstance(module, MLP) or type(module).forward is not MLP.forward:
        raise FissileError(f"a bank holds fissile.MLP networks, not {type(module).__name__}")
    layers = linear_layers(module)
    mine = layers[0].in_features, layers[-1].out_features
    if mine != (spec.sizes[0], spec.sizes[-1]):
        raise FissileError(
            f"the network maps {mine[0]} inputs to {mine[1]} outputs, its place in the bank "
            f"{spec.sizes[0]} to {spec.sizes[-1]}"
        )
    if not all(parameter.requires_grad for parameter in module.parameters()):
        raise FissileError("the network has frozen parameters; a bank trains them all")
    if isinstance(arm, Dynamic) and any(isinstance(m, PartitionedLinear) for m in layers):
        raise FissileError("dynamic masks need masked layers; pass fissile.to_masked(network)")
    if adam is not None and type(adam) is not Adam:
        raise FissileError(f"a bank goes on with Adam, not {type(adam).__name__}")


def _existing(layer: nn.Linear | SparseLinear) -> Int[Tensor, " networks"]:
    pattern = layer.pattern() if isinstance(layer, SparseLinear) else layer.weight != 0
    return pattern.sum((-2, -1)).cpu()


def _merged(stacks: Sequence[Stack]) -> list[Stack]:
    """Join the stacks that can be one."""
    groups: dict[Hashable, list[Stack]] = defaultdict(list)
    for stack in stacks:
        groups[stack.key()].append(stack)
    return [concatenated(group) for group in groups.values()]


def _finite(curve: list[float]) -> list[float]:
    """Return the epochs a network has finished, or one NaN if there are none."""
    return [value for value in curve if value == value] or [torch.nan]


def _table(curves: list[list[float]]) -> Tensor:
    longest = max(map(len, curves))
    return torch.tensor([[*curve, *[torch.nan] * (longest - len(curve))] for curve in curves])
